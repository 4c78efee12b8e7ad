"""Runs of one small LipNeXt under any engine on real processes, and how far two of them lie apart.

The model has three blocks of width 18: six matrices, rows and classes that 4 ranks do not share
evenly. Eleven steps have Lookahead at 3, 6 and 9 and ends of epochs, with a retraction, at 5 and
10, so they end between Lookahead steps. Some of the steps clip their gradient.

Runs compute in float64: two orders of summation then agree to 1e-9 for any seed and on any CPU, and
what does not agree is a mistake. DeepSpeed has no float64; `SMOOTH` is for its runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from torch import Tensor
from torch.distributed.tensor import DTensor
from training.small import checkpoint_content

from lipnext_scale.checkpoint import StateShard, StateShards, latest_checkpoint
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.data import evaluation as datasets
from lipnext_scale.distributed import DeepSpeedEngine
from lipnext_scale.distributed.engine import DTYPES
from lipnext_scale.distributed.replicas import SharedManifoldAdam
from lipnext_scale.optim import local_part
from lipnext_scale.training.trainer import Trainer

# The sets are exchanged: 360 images are 5 steps an epoch, and neither 2 nor 4 ranks share the 1437
# test images evenly.
SETTINGS = """
data.train=builtin:digits/test-*.tar.gz data.test=builtin:digits/train-*.tar.gz data.batch_size=72
data.augment.crop_padding=1 model.depth=4 model.width=18 model.image_size=8 model.patch_size=2
model.in_channels=1 loss.radius_max=0.5 loss.logit_scale=4 optim.lr=1e-2 optim.euclidean_lr=1e-2
optim.eps=1e-3 optim.lookahead=3 optim.clip_norm=8 optim.epochs=4 optim.warmup_epochs=0.1
run.max_steps=11 run.log_every=10 run.eval_every=0 run.checkpoint_every=0 run.summary=false
""".split()
STEPS = 11
# How far runs in float64 may lie apart, of the largest number of each kind. A sum of n = 72·16
# terms loses at most n·2⁻⁵³ = 1e-13 of them, and Adam's lr·g/(|g| + ε) makes at most lr/ε = 10
# times as much of an error where g is nearly 0: 1e-11 in eleven steps, and a hundred for growth.
BOUND = 1e-9
KINDS = {"model", "slow", "loss", "norm", "exp_avg", "exp_avg_sq", "buffer"}
# For runs in float32, nothing that amplifies a rounding error: no kink (β = 0 leaves |·| out), an
# update whose slope is lr/ε = 1 at most, and exponentials to rounding. Then an error grows as in
# one process that cuts its batch, which is measured beside it: another order of summation may do
# ten times that, and a mistake does a thousand times more.
SMOOTH = ["model.beta=0", "optim.eps=1e-2", "optim.exp_rule=bounded"]
ROUNDING = 10
ULP = 2.0**-23
Configurations = dict[str, list[str]]  # name → overrides of the recipe


@dataclass(frozen=True)
class Outcome:
    """A run as one rank saw it, or (with whole tensors as its shards) as all of them did."""

    engine: str
    losses: list[float]
    norms: list[float]
    scores: list[dict[str, float]]  # in the middle and at the end
    counters: dict[str, float]
    start: StateShards
    end: StateShards

    @property
    def weights_at_start(self) -> dict[str, Tensor]:
        return {name: shard.tensor for name, shard in self.start.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: shard.tensor for name, shard in self.end.items()}


def recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [*SETTINGS, f"run.dir={directory}", *overrides])


open_once = cache(datasets.open_catalog)


@contextmanager
def arithmetic(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what is float32 in a run is of this type, on this process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mock.patch.dict(DTYPES, fp32=dtype):
            yield
    finally:
        torch.set_default_dtype(before)


def dtype_of(overrides: Sequence[str]) -> torch.dtype:
    return torch.float32 if set(SMOOTH) <= set(overrides) else torch.float64


def build_trainer(directory: Path, *overrides: str) -> Trainer:
    """A trainer of the run in `directory`; the shards are opened once for all runs of a process."""
    with mock.patch.object(datasets, "open_catalog", open_once):
        return Trainer(recipe(directory, *overrides))


def train(
    directory: Path, *overrides: str, change: Callable[[Trainer], None] | None = None
) -> Outcome:
    """A run on this process, alone or together with the other ranks, step by step.

    change: done to the trainer before its first step.
    """
    with arithmetic(dtype_of(overrides)):
        return train_steps(build_trainer(directory, *overrides), change)


def train_steps(trainer: Trainer, change: Callable[[Trainer], None] | None) -> Outcome:
    if change is not None:
        change(trainer)
    start = held_shards(trainer, weights_only=True)
    metrics: list[dict[str, Any]] = []
    scores: list[dict[str, float]] = []
    for batch in trainer.loader:
        metrics.append(trainer.train_step(batch))
        if trainer.step in (STEPS // 2, trainer.last_step):
            # Training must go on as if it had not been.
            scores.append(trainer.observer.evaluation.of_test_set())
        if trainer.step == trainer.last_step:
            break
    require_rows_of_owners(trainer)
    require_whole_weights(trainer)
    return Outcome(
        engine=trainer.engine.describe(),
        losses=[float(values["train/loss"]) for values in metrics],
        norms=[float(values["train/gradient_norm"]) for values in metrics],
        scores=scores,
        counters=trainer.optimizers.counters(),
        start=start,
        end=held_shards(trainer),
    )


def train_each(
    rank: int, world_size: int, directory: Path, configurations: Configurations
) -> dict[str, Outcome]:
    """One after the other on the same processes."""
    return {
        name: train(directory / f"{world_size} {name}", *overrides)
        for name, overrides in configurations.items()
    }


def run_each(
    world_size: int, directory: Path, configurations: Configurations
) -> dict[str, Outcome]:
    """Every configuration on `world_size` ranks, as all of them together saw it."""
    ranks = run_processes(world_size, train_each, directory, configurations, timeout=300)
    return {name: of_all_ranks([outcomes[name] for outcomes in ranks]) for name in configurations}


def of_all_ranks(outcomes: Sequence[Outcome]) -> Outcome:
    """The ranks agree on all metrics; their shards are put together."""
    first = outcomes[0]
    for other in outcomes[1:]:
        for key in ("engine", "losses", "norms", "scores", "counters"):
            assert getattr(other, key) == getattr(first, key), f"the ranks differ in {key}"
    start, end = (joined([getattr(o, key) for o in outcomes]) for key in ("start", "end"))
    return replace(first, start=whole_shards(start), end=whole_shards(end))


def held_shards(trainer: Trainer, weights_only: bool = False) -> StateShards:
    """A copy of what this rank holds: all weights, W too where M is learned, and the state."""
    shards = trainer.engine.state_shards(None)
    if not weights_only:
        shards = shards | trainer.engine.state_shards(trainer.optimizers)
    return {name: replace(p, tensor=p.tensor.detach().clone()) for name, p in shards.items()}


def checkpointed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without W where M is learned."""
    learned = {name.removesuffix("M") + "W" for name in tensors if name.endswith(".M")}
    return {name: tensor for name, tensor in tensors.items() if name not in learned}


def joined(parts: Sequence[StateShards]) -> dict[str, Tensor]:
    """Whole tensors from the shards of all ranks. What several hold has the same bits on all."""
    wholes: dict[str, Tensor] = {}
    for shards in parts:
        for name, shard in shards.items():
            dtype = shard.tensor.dtype
            whole = wholes.setdefault(name, torch.full(shard.shape, torch.nan, dtype=dtype))
            assert whole.dtype == dtype, f"{name} is {dtype} here and {whole.dtype} elsewhere"
            sizes = zip(shard.offset, shard.tensor.shape, strict=True)
            here = whole[tuple(slice(start, start + length) for start, length in sizes)]
            known = ~here.isnan()
            assert torch.equal(here[known], shard.tensor[known]), f"two ranks differ in {name}"
            here.copy_(shard.tensor)
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"no rank has some of {name}, or it is NaN"
    return wholes


def whole_shards(tensors: dict[str, Tensor]) -> StateShards:
    return {name: StateShard.full(tensor) for name, tensor in tensors.items()}


def require_rows_of_owners(trainer: Trainer) -> None:
    """Every rank's rows or copies are those of the owner, in the type that computes."""
    owned = trainer.engine.owner
    if owned is None:
        return
    dtype = DTYPES[trainer.recipe.parallel.precision]
    for name, parameter in trainer.model.named_parameters():
        if isinstance(owned, SharedManifoldAdam):
            ours = local_part(parameter).to(dtype)
            theirs = ours.clone()
            dist.broadcast(theirs, group_src=0, group=owned._group)
            assert torch.equal(ours, theirs), name
        if ".matrices." in name:
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor()  # all ranks together
            if (found := owned.owned_tensors(name, with_state=False)) is not None:
                index, tensors = found
                own = tensors["model"][index]
                assert torch.equal(whole, own.to(dtype).to(whole.dtype)), name


def require_whole_weights(trainer: Trainer) -> None:
    """Padding is still identities; in ZeRO-1 and 2 the model has the numbers of the partitions."""
    engine = trainer.engine
    if not isinstance(engine, DeepSpeedEngine):
        return
    weights = dict(trainer.model.named_parameters())
    for partition in engine.partitions:
        for slot in partition.slots:
            name, here = partition.names[slot.index], partition.flat.detach()[slot.in_partition]
            if not name:
                width = partition.width
                for matrix in here.view(-1, width, width):
                    assert torch.equal(matrix, torch.eye(width))
            elif trainer.recipe.parallel.zero_stage < 3:
                published = weights[name].detach().flatten()[slot.in_parameter]
                assert torch.equal(published, here.to(published.dtype)), name


def relative_errors(ours: Outcome, reference: Outcome) -> dict[str, float]:
    """`tensor_errors` of all tensors, of the losses and of the gradient norms of all steps."""

    def numbers(run: Outcome) -> dict[str, Tensor]:
        values = {
            "loss": torch.tensor(run.losses, dtype=torch.float64),
            "norm": torch.tensor(run.norms, dtype=torch.float64),
        }
        return {**run.tensors, **values}

    return tensor_errors(numbers(ours), numbers(reference))


def tensor_errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each kind of number, in units of the largest of that kind.

    A kind is the first part of a name: those of `state_shards` are model, slow, exp_avg,
    exp_avg_sq and buffer.
    """
    assert ours.keys() == reference.keys()
    differences: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for name, expected in reference.items():
        kind, difference = name.partition(".")[0], ours[name] - expected
        assert bool(difference.isfinite().all()), name
        differences[kind] = max(differences.get(kind, 0.0), float(difference.abs().max()))
        sizes[kind] = max(sizes.get(kind, 0.0), float(expected.abs().max()))
    return {kind: difference / sizes[kind] for kind, difference in differences.items()}


def rounding_alone(directory: Path, reference: Outcome, *overrides: str) -> dict[str, float]:
    """The most that cutting the batch into parts does to each kind, in one process, in float32."""
    errors = []
    for count in (2, 6, 24):
        parts = f"parallel.accumulation={count}"
        cut = train(directory / f"{count} parts", *SMOOTH, *overrides, parts)
        errors.append(relative_errors(cut, reference))
    return {kind: max(error[kind] for error in errors) for kind in KINDS}


def assert_parity(ours: Outcome, reference: Outcome, kinds: set[str] = KINDS) -> None:
    """Of runs in float64."""
    errors = relative_errors(ours, reference)
    assert errors.keys() == kinds
    assert max(errors.values()) <= BOUND, errors
    assert ours.scores == reference.scores  # the same counts of 1437 images
    assert ours.counters == reference.counters


def assert_parity_in_float32(ours: Outcome, reference: Outcome, rounding: dict[str, float]) -> None:
    errors = relative_errors(ours, reference)
    assert errors.keys() == KINDS
    for kind, error in errors.items():
        assert error <= ROUNDING * max(rounding[kind], ULP), (kind, errors, rounding)
    for mine, theirs in zip(ours.scores, reference.scores, strict=True):
        # An image or two may lie within rounding of a boundary.
        assert mine == pytest.approx(theirs, abs=2.5 / 1437)
    assert ours.counters == reference.counters


def assert_same_bits(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@dataclass(frozen=True)
class Visit:
    """What a rank found when it resumed a run, and what it left behind."""

    first_step: int
    counters: dict[str, Any]
    found: StateShards
    left: StateShards


def continue_run(directory: Path, last_step: int, *overrides: str) -> Visit:
    """Train the run in `directory` up to `last_step`, where a checkpoint is left."""
    with arithmetic(dtype_of(overrides)):
        return _continue_run(directory, last_step, *overrides)


def _continue_run(directory: Path, last_step: int, *overrides: str) -> Visit:
    trainer = build_trainer(directory, *overrides, f"run.max_steps={last_step}")
    first_step, found, counters = trainer.step, {}, {}
    if first_step:
        found = held_shards(trainer)
        counters = {
            "loader": trainer.loader.state_dict(),
            "optimizers": trainer.optimizers.counters(),
            "steps": steps_taken(trainer),
            "rng": torch.get_rng_state().tolist(),
        }
        require_rows_of_owners(trainer)
    trainer.run()
    require_rows_of_owners(trainer)
    return Visit(first_step, counters, found, held_shards(trainer))


def continue_each(
    rank: int, world_size: int, runs: Sequence[tuple[Path, int, list[str]]]
) -> list[Visit]:
    """`continue_run` of one run after the other."""
    return [continue_run(path, last_step, *overrides) for path, last_step, overrides in runs]


def steps_taken(trainer: Trainer) -> set[int]:
    """What the state of either optimizer says of the steps it has seen."""
    both = (trainer.optimizers.euclidean, trainer.optimizers.manifold)
    return {int(state["step"]) for optimizer in both for state in optimizer.state.values()}


def stored(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(facts, tensors) of the newest checkpoint of a run."""
    path = latest_checkpoint(directory / "checkpoints")
    assert path is not None
    return checkpoint_content(path)
