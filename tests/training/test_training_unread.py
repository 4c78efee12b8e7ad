"""Runs whose host does not look at every step, as on a GPU: it reads them with the next line."""

import json
import signal
from pathlib import Path

import pytest
from small import STEPS, assert_same, final_state, poison, small_recipe

from lipnext_scale.training.signals import StopRequest
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import RunFailed, Stopped

# As many steps in a quarter of the digits.
FEW = ["data.train=builtin:digits/test-*.tar.gz", "data.batch_size=120", "run.eval_every=0"]
SKIP, QUARTERLY = "run.on_non_finite=skip", ["run.log_every=4", "run.checkpoint_every=0"]


class Unread(Trainer):
    reads_every_step = False  # type: ignore[assignment]


def run(kind: type[Trainer], directory: Path, steps: set[int], *overrides: str) -> Trainer:
    """These steps are not finite. Epochs have three of them."""
    trainer = kind(small_recipe(directory, *FEW, *overrides))
    with poison(trainer, steps):
        trainer.run()
    return trainer


def counts(trainer: Trainer) -> set[int]:
    both = (trainer.optimizers.manifold, trainer.optimizers.euclidean)
    return {int(state["step"]) for optimizer in both for state in optimizer.state.values()}


def test_an_unread_run_is_the_same(tmp_path):
    """With lines between, and where steps are skipped with a line for each."""
    for name, bad, overrides in (("sound", set(), QUARTERLY), ("poisoned", {1, 5, 8}, [SKIP])):
        for kind in (Trainer, Unread):
            run(kind, tmp_path / name / kind.__name__, bad, *overrides)
        ours, theirs = (final_state(tmp_path / name / kind) for kind in ("Unread", "Trainer"))
        assert_same(ours, theirs)


def test_skipped_steps_are_noticed_with_the_next_line_or_epoch(tmp_path, capsys):
    """By their own numbers; then all counters are those of the updates."""
    trainer = run(Unread, tmp_path / "run", {4, 7, 8}, SKIP, *QUARTERLY)
    lines = capsys.readouterr().out.splitlines()
    said = [" ".join(line.split()[:3]) for line in lines if "warning" in line or "/12 " in line]
    line, warning = "epoch {}/4 step", "warning: step {}:"
    expected = [warning.format(4), line.format(2), warning.format(7), warning.format(8)]
    assert said == [*expected, line.format(3), line.format(4)]
    assert trainer.non_finite.skipped == 3 and counts(trainer) == {STEPS - 3}
    state = final_state(tmp_path / "run")
    assert state["non_finite"] == {"missing": 3}
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(r)["train/non_finite_steps"] for r in records] == [1, 3, 3]
    updates = run(Trainer, tmp_path / "as many", set(), *QUARTERLY, f"run.max_steps={STEPS - 3}")
    assert state["optimizers"] == updates.optimizers.counters()


def test_a_run_that_must_not_skip_ends_with_the_next_line(tmp_path):
    with pytest.raises(RunFailed, match="step 5: the loss or a gradient is not finite"):
        run(Unread, tmp_path / "run", {5}, *QUARTERLY)


def test_a_signal_is_noticed_with_the_next_line_or_epoch(tmp_path):
    trainer = Unread(small_recipe(tmp_path / "run", *QUARTERLY), StopRequest(signal.SIGTERM))
    with pytest.raises(Stopped, match="SIGTERM at step 3: saved"):
        trainer.run()
    assert final_state(tmp_path / "run")["step"] == 3
    trainer = Unread(small_recipe(tmp_path / "run", *QUARTERLY), StopRequest(signal.SIGTERM))
    with pytest.raises(Stopped, match="SIGTERM at step 4: saved"):
        trainer.run()
