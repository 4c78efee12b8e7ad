"""What does not divide by the ranks: matrices, rows, classes, banks; and what is not trained.

The model of engine_runs.py is uneven itself: 6 matrices of 18 rows and 10 classes on 4 ranks. Here
are more: fewer matrices than ranks, ranks without a row, banks of different sizes, and groups of
blocks that are frozen. All must train as one process does. test_parallel_parity.py explains the
bound.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine_runs import (
    BOUND,
    STEPS,
    Configurations,
    Outcome,
    Visit,
    assert_parity,
    assert_same_bits,
    continue_each,
    continue_run,
    joined,
    of_all_ranks,
    stored,
    tensor_errors,
    train,
)
from gloo import run_processes
from torch import Tensor

from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import local_part
from lipnext_scale.parallel import SingleEngine
from lipnext_scale.trainer import Trainer

ROW, HSDP = "parallel.weight_layout=row", "parallel.shard_size=2"
# name → settings of a model.
MODELS = {
    "six matrices": [],
    "two matrices": ["model.depth=1"],
    "narrow": ["model.width=5", "model.shift_ratio=0.25"],
    "banks of 4 and 2": ["model.blocks_per_bank=2"],
    "banks of 2": ["model.blocks_per_bank=1"],
}
FROZEN_MODEL = ["model.blocks_per_bank=1"]


@dataclass(frozen=True)
class Share:
    """How much a rank holds: whole matrices, and the first dimension of every parameter."""

    matrices: int
    lengths: dict[str, int]


def train_shares(
    rank: int, world_size: int, directory: Path, configurations: Configurations
) -> dict[str, tuple[Outcome, Share]]:
    results = {}
    for name, overrides in configurations.items():
        lengths: dict[str, int] = {}

        def note(trainer: Trainer, lengths: dict[str, int] = lengths) -> None:
            for parameter, value in trainer.model.named_parameters():
                lengths[parameter] = local_part(value).shape[0]

        outcome = train(directory / f"{world_size} {name}", *overrides, change=note)
        whole = sum(key.startswith("model.") and key.endswith((".R", ".M")) for key in outcome.end)
        results[name] = outcome, Share(whole, lengths)
    return results


class Reference:
    """Models trained in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: dict[str, Outcome] = {}

    def of(self, model: str) -> Outcome:
        if model not in self._made:
            self._made[model] = train(self.directory / model / "single", *MODELS[model])
        return self._made[model]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("uneven"))


# (world size, layout) → for each model the matrices (bank) or the rows of one (row) on each rank.
Shares = dict[tuple[int, str], dict[str, list[int]]]
SHARES: Shares = {
    (4, "bank"): {"two matrices": [1, 1, 0, 0]},
    (4, "row"): {"narrow": [2, 2, 1, 0]},
}
MORE_SHARES: Shares = {
    (3, "bank"): {"two matrices": [1, 1, 0], "banks of 4 and 2": [3, 3, 0]},
    (3, "row"): {"narrow": [2, 2, 1], "two matrices": [6, 6, 6]},
    (4, "bank"): {
        "six matrices": [2, 2, 1, 1],
        "banks of 4 and 2": [2, 2, 1, 1],
        "banks of 2": [3, 3, 0, 0],
        "narrow": [2, 2, 1, 1],
    },
    (4, "row"): {
        "six matrices": [5, 5, 5, 3],
        "two matrices": [5, 5, 5, 3],
        "banks of 4 and 2": [5, 5, 5, 3],
        "banks of 2": [5, 5, 5, 3],
    },
}
CLASSES = {3: [4, 4, 2], 4: [3, 3, 3, 1]}


def share_cases() -> list[Any]:
    quick = [pytest.param(*case, id="ranks{}-{}".format(*case[0])) for case in SHARES.items()]
    more = [
        pytest.param(*case, id="ranks{}-{}-more".format(*case[0]), marks=pytest.mark.slow)
        for case in MORE_SHARES.items()
    ]
    return quick + more


@pytest.mark.parametrize(("place", "shares"), share_cases())
def test_uneven_shares_train_as_one_process_does(
    reference: Reference, place: tuple[int, str], shares: dict[str, list[int]]
) -> None:
    """Ranks with fewer matrices, rows or classes than others, or none, change nothing."""
    world_size, layout = place
    layout_setting = f"parallel.weight_layout={layout}"
    configurations = {model: [layout_setting, *MODELS[model]] for model in shares}
    ranks = run_processes(world_size, train_shares, reference.directory / layout, configurations)
    for model, expected in shares.items():
        assert_parity(of_all_ranks([rank[model][0] for rank in ranks]), reference.of(model))
        held = [rank[model][1] for rank in ranks]
        if layout == "bank":
            assert [share.matrices for share in held] == expected
        else:
            assert [share.lengths["groups.0.matrices.0"] for share in held] == expected
        assert [share.lengths["head.weight"] for share in held] == CLASSES[world_size]


@contextmanager
def frozen_groups(*numbers: int) -> Iterator[None]:
    """Inside, engines build models of which these groups of blocks are not trained."""
    build = SingleEngine.build_on_meta

    def build_and_freeze(engine: SingleEngine, *arguments: Any, **options: Any) -> LipNeXt:
        model = build(engine, *arguments, **options)
        for number in numbers:
            model.block_groups()[number].requires_grad_(False)
        return model

    with mock.patch.object(SingleEngine, "build_on_meta", build_and_freeze):
        yield


FROZEN_ENGINES: dict[int, Configurations] = {
    2: {"ddp": ["parallel.engine=ddp"]},
    3: {"bank": [], "row": [ROW]},
    4: {"bank": [], "row": [ROW], "2x2-bank": [HSDP], "2x2-row": [HSDP, ROW]},
}


def train_frozen(
    rank: int, world_size: int, directory: Path, configurations: Configurations, frozen: int
) -> dict[str, Outcome]:
    with frozen_groups(frozen):
        return {
            name: train(directory / f"{world_size} {name}", *FROZEN_MODEL, *overrides)
            for name, overrides in configurations.items()
        }


def assert_only_others_moved(run: Outcome, frozen: int) -> None:
    """The frozen group is what it was at the start and has no optimizer state."""
    for name, tensor in run.tensors.items():
        kind, _, weight = name.partition(".")
        is_frozen = weight.startswith(f"blocks.{frozen}.")
        assert not (is_frozen and kind != "model"), name
        if kind == "model":
            assert bool((tensor == run.weights_at_start[name]).all()) == is_frozen, name


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_group_stays_and_the_others_train(tmp_path: Path, frozen: int) -> None:
    """First, where gradients end before it, and in the middle, where they pass through it."""
    with frozen_groups(frozen):
        single = train(tmp_path / "single", *FROZEN_MODEL)
    assert_only_others_moved(single, frozen)
    for world_size in (2, 3, 4) if frozen else (3,):
        engines = FROZEN_ENGINES[world_size]
        ranks = run_processes(world_size, train_frozen, tmp_path, engines, frozen)
        for name in engines:
            ours = of_all_ranks([outcomes[name] for outcomes in ranks])
            assert_parity(ours, single)
            assert_only_others_moved(ours, frozen)


def continue_frozen(
    rank: int, world_size: int, runs: list[tuple[Path, int, list[str]]]
) -> list[Visit]:
    with frozen_groups(1):
        return continue_each(rank, world_size, runs)


@pytest.mark.slow
def test_a_frozen_run_moves_between_engines(tmp_path: Path) -> None:
    """row(3) → bank(4) → single: each finds what was left, and the end is that of one process."""
    with frozen_groups(1):
        expected = train(tmp_path / "expected", *FROZEN_MODEL)
    run, left = tmp_path / "run", dict[str, Tensor]()
    for world_size, last_step, overrides in [(3, 5, [ROW]), (4, 14, [])]:
        job = (run, last_step, [*FROZEN_MODEL, *overrides])
        visits = [visit[0] for visit in run_processes(world_size, continue_frozen, [job])]
        assert_same_bits(joined([visit.found for visit in visits]), left)  # nothing at first
        left = stored(run)[1]
    with frozen_groups(1):
        visit = continue_run(run, STEPS, *FROZEN_MODEL)
    assert_same_bits(joined([visit.found]), left)
    left = stored(run)[1]
    assert_same_bits(joined([visit.left]), left)
    errors = tensor_errors(left, expected.tensors)
    assert max(errors.values()) <= BOUND, errors
    for name, tensor in expected.weights_at_start.items():
        if name.startswith("model.blocks.1."):
            assert torch.equal(left[name], tensor)
