"""The loop learns, guards its weights, and tells what it does."""

import json
from pathlib import Path

import pytest
import torch
from small import SETTINGS, small_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lipnext_scale import trainer as trainer_module
from lipnext_scale.config import differences
from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.recipe import load_recipe
from lipnext_scale.train import main
from lipnext_scale.trainer import Trainer


def test_the_loss_falls_and_the_matrices_stay_orthogonal(tmp_path: Path) -> None:
    trainer = Trainer(small_recipe(tmp_path / "run", "optim.epochs=12", "loss.radius_max=0.2"))
    trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    for group in trainer.model.groups:
        assert orthogonality_error(group.bank.detach()).max() < 1e-5


@pytest.mark.parametrize("loss", ["emma", "margin", "trades", "logit_annealing", "cross_entropy"])
@pytest.mark.parametrize("parametrisation", ["product", "merged"])
def test_every_loss_and_parametrisation_trains(
    tmp_path: Path, loss: str, parametrisation: str
) -> None:
    settings = (f"loss.name={loss}", f"model.parametrisation={parametrisation}", "optim.epochs=2")
    trainer = Trainer(small_recipe(tmp_path / "run", *settings))
    before = trainer.model.groups[0].bank.detach().clone()
    trainer.run()
    assert not torch.equal(before, trainer.model.groups[0].bank)


def test_a_loss_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, one line with the step; the last checkpoint is the one from before."""
    calls = {"count": 0}
    original = trainer_module.compute_loss

    def poisoned(*arguments: object) -> torch.Tensor:
        calls["count"] += 1
        return original(*arguments) * (float("nan") if calls["count"] == 6 else 1)

    monkeypatch.setattr(trainer_module, "compute_loss", poisoned)
    with pytest.raises(SystemExit) as stopped:
        main([*SETTINGS, f"run.dir={tmp_path / 'run'}"])
    assert stopped.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "failed: step 6: the loss is nan; the weights were not updated"
    ]
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-000000004.pt"]


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(tmp_path: Path) -> None:
    trainer = Trainer(small_recipe(tmp_path / "run"))
    bias = trainer.model.groups[0].bias
    bias.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(trainer_module.RunFailed, match=r"step 1: .*groups\.0\.bias"):
        trainer.run()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(state for state in trainer.optimizers.manifold.state.values())


def test_the_run_directory_tells_the_whole_story(tmp_path: Path) -> None:
    """The resolved configuration gives the same recipe; TensorBoard has what metrics.jsonl has."""
    recipe = small_recipe(tmp_path / "run", "run.eval_every=1")
    Trainer(recipe).run()
    assert differences(load_recipe(str(tmp_path / "run" / "config.yaml")), recipe) == {}
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for tag in ("train/loss", "train/lr", "test/clean_accuracy", "test/nominal_cra"):
        written = [(r["step"], r[tag]) for r in records if tag in r]
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in shown] == [step for step, _ in written] != []
        values = [value for _, value in written]
        assert [value for _, value in shown] == pytest.approx(values, rel=1e-6)


def test_evaluation_uses_the_slow_weights_and_restores_the_fast(tmp_path: Path) -> None:
    trainer = Trainer(small_recipe(tmp_path / "run", "run.max_steps=2"))
    trainer.run()
    fast = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    scores = trainer.evaluate()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, fast[name])
    # Two steps into the first period the slow weights are still the initial ones.
    fresh = Trainer(small_recipe(tmp_path / "fresh"))
    assert fresh.evaluate() == scores
