"""Steps that are not finite: left out, alike on all engines, and resumed exactly."""

import json
from pathlib import Path

import pytest
import torch
from gloo import run_processes
from poisoned import (
    ENGINES,
    THOROUGH,
    stored,
    tensors_of,
    train,
    train_all,
    train_offloaded_in_bf16,
    train_with_a_huge_loss,
)
from training.small import assert_same

from lipnext_scale.errors import RunFailed

MANY = [name for name in ENGINES if name != "single"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all engines' runs: one rank for `single`, two for all others."""
    directory = tmp_path_factory.mktemp("poisoned")
    train_all(0, 1, directory, ["single"])
    run_processes(2, train_all, directory, MANY, timeout=400)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("engine", THOROUGH)
def test_a_skipped_step_moves_nothing_and_is_resumed_exactly(runs: Path, engine: str) -> None:
    """Step 5 leaves every tensor as it was; with a stop right behind it the end is the same."""
    whole, stopped = runs / engine / "skip", runs / engine / "skip, stopped"
    before, after = stored(stopped, 4), stored(stopped, 5)
    assert_same(tensors_of(after), tensors_of(before))
    assert after["optimizers"] == before["optimizers"]
    assert (before["non_finite"], after["non_finite"]) == (
        {"count": 0, "missing": 0},
        {"count": 1, "missing": 1},
    )
    assert after["loader"]["step"] == 5
    assert_same(stored(stopped, 12), stored(whole, 12))
    assert stored(whole, 12)["non_finite"] == {"count": 2, "missing": 2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", MANY)
def test_all_engines_do_the_same(runs: Path, engine: str) -> None:
    """What is left differs from one process by rounding; an update too many would be 1e-2."""
    alone = tensors_of(stored(runs / "single" / "skip", 12))
    ours = tensors_of(stored(runs / engine / "skip", 12))
    assert ours.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_batch_in_bf16_is_left_out_alone(tmp_path: Path) -> None:
    """With the optimizer on the CPU DeepSpeed adds up parts in a place of their own, which must not
    keep what was not finite for the steps after it."""
    run_processes(2, train_offloaded_in_bf16, tmp_path, timeout=300)
    for stage in (1, 2, 3):
        assert stored(tmp_path / f"ZeRO-{stage}", 12)["non_finite"] == {"count": 1, "missing": 1}


@pytest.mark.slow
def test_a_norm_beyond_float32_ends_in_a_line(tmp_path: Path) -> None:
    """Gradients are finite and would be clipped; DeepSpeed looks at them before that."""
    (said,) = run_processes(1, train_with_a_huge_loss, tmp_path)
    assert said.startswith("step 3: DeepSpeed made no step: it cannot tell the gradient's norm; ")


def test_it_is_told_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line with step and tensor, a metric, no NaN in metrics.jsonl; one too many is the end."""
    settings = ["run.on_non_finite=skip", "run.non_finite_limit=2"]
    with pytest.raises(
        RunFailed, match=r"step 9: the loss is nan; run\.non_finite_limit = 2 allow"
    ):
        train(tmp_path / "run", {1, 7, 9}, *settings)
    out = capsys.readouterr().out
    assert "warning: step 1: the loss is nan (1 of at most 2 such steps); its batch was" in out
    assert "warning: step 7: the loss is nan (2 of at most 2 such steps)" in out
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert "NaN" not in text and [r["step"] for r in records] == list(range(1, 9))
    assert [r["train/non_finite_steps"] for r in records] == [1, 1, 1, 1, 1, 1, 2, 2]
    assert [r["step"] for r in records if r["move/largest"] == 0] == [1, 7]
    with pytest.raises(RunFailed, match="step 9"):  # counted on from the checkpoint of step 8
        train(tmp_path / "run", {9}, *settings)
