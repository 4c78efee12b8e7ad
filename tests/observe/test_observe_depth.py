"""Gradient, step and drift by block: the same numbers whatever engine they are gathered from."""

from pathlib import Path

import pytest
import torch
from gloo import run_processes
from observed_runs import (
    BETAS,
    DEPTH,
    LAST,
    LR,
    QUIET,
    WIDTH,
    checkpoint_tensors,
    last_record,
    recipe,
    records,
    run,
    run_each,
)

from lipnext_scale.optim import learning_rate, manifold_adam
from lipnext_scale.training.trainer import Trainer

FSDP_ROW = ["parallel.engine=fsdp", "parallel.weight_layout=row"]
TWO_RANKS = {
    "ddp": ["parallel.engine=ddp"],
    "fsdp bank": ["parallel.engine=fsdp", "run.profile_steps=[2,4]", "run.profile_ranks=[0,1]"],
    "fsdp row": FSDP_ROW,
    "fsdp replicated": ["parallel.engine=fsdp", "parallel.shard_size=1"],
    "row quiet": [*FSDP_ROW, *QUIET],
    "zero 2": ["parallel.engine=deepspeed"],
    "zero 3": ["parallel.engine=deepspeed", "parallel.zero_stage=3"],
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("single") / "run"
    run(directory)
    return directory


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("two")
    run_processes(2, run_each, directory, TWO_RANKS)
    return directory


def plain(directory: Path) -> dict[str, float]:
    """Drift and step of every block, worked out from the checkpoint's whole matrices."""
    tensors = checkpoint_tensors(directory)
    lr = learning_rate(LAST - 1, LR, 28, 0, 1e-5)
    values = {}
    for block in range(DEPTH):
        drifts, moves = [], []
        for name in (f"blocks.{block}.R", f"blocks.{block}.M"):
            x, m, v = (tensors[f"{k}.{name}"].double() for k in ("model", "exp_avg", "exp_avg_sq"))
            drifts.append(float((x.mT @ x - torch.eye(WIDTH)).norm()) / WIDTH**0.5)
            m_hat, v_hat = m / (1 - BETAS[0] ** LAST), v / (1 - BETAS[1] ** LAST)
            moves.append(float((lr * m_hat / (v_hat.sqrt() + 1e-2)).norm()))
        values |= {f"drift/block_{block:02d}": max(drifts), f"move/block_{block:02d}": max(moves)}
    return values


def assert_recorded(directory: Path) -> None:
    record, expected = last_record(directory), plain(directory)
    assert record["step"] == LAST
    for name, value in expected.items():
        kind = name.split("/")[0]
        bounds = {"rel": 0.02, "abs": 1e-7} if kind == "drift" else {"rel": 1e-4}
        assert record[name] == pytest.approx(value, **bounds), name
    drifts = [value for name, value in expected.items() if name.startswith("drift")]
    assert min(drifts) > 1e-6, "or the comparison would be one of rounding"
    assert record["drift/largest"] == max(record[f"drift/block_{b:02d}"] for b in range(DEPTH))
    assert record["move/largest"] == max(record[f"move/block_{b:02d}"] for b in range(DEPTH))
    gradients = [f"gradient/block_{block:02d}" for block in range(DEPTH)] + ["gradient/head"]
    squares = sum(record[name] ** 2 for name in gradients)
    assert squares**0.5 == pytest.approx(record["train/gradient_norm"], rel=1e-5)


def test_one_process_records_its_matrices(single):
    assert_recorded(single)


def test_the_step_is_what_the_optimizer_took(tmp_path, monkeypatch):
    """‖Δ‖ is computed from the moments afterwards; here every Δ is looked at as it is made."""
    taken: list[float] = []
    original = manifold_adam.adam_direction

    def noting(*arguments: object, **named: object) -> torch.Tensor:
        delta = original(*arguments, **named)  # type: ignore[arg-type]
        taken.append(float(torch.linalg.matrix_norm(delta).max()))
        return delta

    monkeypatch.setattr(manifold_adam, "adam_direction", noting)
    run(tmp_path / "run")  # steps 3 is a Lookahead step, whose exponent is another
    recorded = [r["move/largest"] for r in records(tmp_path / "run") if "train/loss" in r]
    largest = [max(both) for both in zip(taken[::2], taken[1::2], strict=True)]  # every R, every M
    assert len(recorded) == len(largest) == LAST
    assert recorded == pytest.approx(largest, rel=1e-5)


def test_gradients_by_block_are_those_of_its_parameters(tmp_path):
    """Of one step, whose gradients are still there: merged, or they would be those of (R, M)."""
    overrides = ["run.max_steps=1", "optim.clip_norm=1e9", "optim.parametrisation=merged"]
    trainer = Trainer(recipe(tmp_path / "run", *overrides))
    trainer.run()
    record, group = last_record(tmp_path / "run"), trainer.model.block_groups()[0]
    head = [p.grad.double().square().sum() for p in trainer.model.head.parameters()]
    assert record["gradient/head"] == pytest.approx(float(sum(head)) ** 0.5, rel=1e-5)
    for block in range(DEPTH):
        parts = [p.grad[block] for p in (group.bank, group.bias, group.pos)]
        total = float(sum(part.double().square().sum() for part in parts)) ** 0.5
        assert record[f"gradient/block_{block:02d}"] == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name != "row quiet"])
def test_every_engine_records_the_same(single, two_ranks, name):
    """As its own matrices say, and as one process said, up to the order of sums."""
    assert_recorded(two_ranks / name)
    ours, theirs = last_record(two_ranks / name), last_record(single)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        if key.startswith(("train/", "move/", "gradient/")):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3), key
    scores = [
        [r for r in records(d) if "watch/nominal_cra" in r] for d in (two_ranks / name, single)
    ]
    for our, their in zip(*scores, strict=True):
        for key in ("step", "watch/clean_accuracy", "watch/nominal_cra"):
            assert our[key] == their[key]


@pytest.mark.slow
def test_two_ranks_train_the_same_unobserved(two_ranks):
    """The row layout exchanges rows with its owners in a watched evaluation, and back."""
    loud, quiet = (checkpoint_tensors(two_ranks / name) for name in ("fsdp row", "row quiet"))
    assert loud.keys() == quiet.keys()
    assert all(torch.equal(loud[name], quiet[name]) for name in loud)


@pytest.mark.slow
def test_every_rank_that_is_named_is_profiled(two_ranks):
    names = {path.name for path in (two_ranks / "fsdp bank" / "profile").glob("*.gz")}
    assert names == {f"steps-000002-000003.rank-{rank}.json.gz" for rank in (0, 1)}
    assert not (two_ranks / "fsdp row" / "profile").exists()
