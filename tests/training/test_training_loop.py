"""The loop learns, keeps to its schedules, and stops before weights are spoilt."""

import json

import pytest
import torch
from small import SETTINGS, assert_same, small_recipe

from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import read_samples
from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.train import main
from lipnext_scale.training import trainer as trainer_module
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import differences
from lipnext_scale.utils.errors import RunFailed


def test_the_loss_falls_and_the_matrices_stay_orthogonal(tmp_path):
    trainer = Trainer(small_recipe(tmp_path / "run", "optim.epochs=12", "loss.radius_max=0.2"))
    trainer.run()
    recorded = load_recipe(str(tmp_path / "run" / "config.yaml"))
    assert differences(recorded, trainer.recipe) == {}
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    for group in trainer.model.groups:
        assert orthogonality_error(group.bank.detach()).max() < 1e-5


@pytest.mark.parametrize("each_epoch, retracted", [("true", [3, 6]), ("false", [])])
def test_matrices_are_retracted_after_each_epoch_or_never(tmp_path, each_epoch, retracted):
    settings = ["optim.epochs=2", f"optim.retract_each_epoch={each_epoch}"]
    trainer, steps = Trainer(small_recipe(tmp_path / "run", *settings)), []
    trainer.optimizers.retract = lambda: steps.append(trainer.step)
    trainer.run()
    assert steps == retracted


@pytest.mark.parametrize(
    "loss, parametrisation",
    [
        ("emma", "merged"),
        ("margin", "product"),
        ("trades", "merged"),
        ("logit_annealing", "product"),
        ("cross_entropy", "merged"),
    ],
)
def test_every_loss_and_parametrisation_trains(tmp_path, loss, parametrisation):
    settings = (f"loss.name={loss}", f"optim.parametrisation={parametrisation}", "optim.epochs=2")
    trainer = Trainer(small_recipe(tmp_path / "run", *settings))
    before = trainer.model.groups[0].bank.detach().clone()
    trainer.run()
    assert not torch.equal(before, trainer.model.groups[0].bank)


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path, monkeypatch, capsys):
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
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["latest", "step-000000004"]


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(tmp_path):
    trainer = Trainer(small_recipe(tmp_path / "run"))
    bias = trainer.model.head.bias
    bias.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(trainer_module.RunFailed, match=r"step 1: .*head\.bias"):
        trainer.run()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(state for state in trainer.optimizers.manifold.state.values())


def test_schedules_reach_the_steps_as_written(tmp_path):
    """Learning rate and training radius of twelve steps against numbers worked out by hand.

    Three steps an epoch, four epochs, one of warm-up: the rate rises by thirds, then half a cosine
    of eight intervals falls to 1e-5 of it. The radius grows linearly over the first six steps.
    """
    Trainer(small_recipe(tmp_path / "run", "loss.epsilon=1", "loss.radius_max=1.3")).run()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    radii = [0.1, 0.3, 0.5, 0.7, 0.9, 1.1, *[1.3] * 6]
    assert [line["train/epsilon"] for line in steps] == pytest.approx(radii)
    rates = [line["train/lr"] for line in steps]
    assert rates[:4] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])
    assert rates[7] == pytest.approx(0.005, rel=1e-4)  # half way down
    assert rates[-1] == pytest.approx(1e-7)


def test_gradients_are_clipped_to_the_configured_norm(tmp_path, monkeypatch):
    """The norm is recorded as it was; the optimizers see one of the setting."""
    trainer = Trainer(small_recipe(tmp_path / "run", "optim.clip_norm=1e-3"))
    step, seen = trainer.optimizers.step, {}

    def watched(scale, usable=None):
        seen.update({p: scale * p.grad for p in trainer.model.parameters() if p.grad is not None})
        step(scale, usable)

    monkeypatch.setattr(trainer.optimizers, "step", watched)
    values = trainer.train_step(next(iter(trainer.loader)))
    assert float(values["train/gradient_norm"]) > 1e-2
    squares = [gradient.square().sum() for gradient in seen.values()]
    assert float(sum(squares)) ** 0.5 == pytest.approx(1e-3, rel=1e-3)
    for parameter, state in trainer.optimizers.euclidean.state.items():
        torch.testing.assert_close(state["exp_avg"], 0.1 * seen[parameter])


def test_evaluation_counts_with_the_slow_weights(tmp_path):
    """Against radii computed one by one, at an ε between them so that the two figures differ."""
    trainer = Trainer(small_recipe(tmp_path / "run", "loss.epsilon=0.215"))
    test = read_samples(trainer.recipe.data.test, "data.test")
    images = test.images.float() / 255
    right, certified = 0, 0
    with torch.no_grad():
        weight, logits = trainer.model.head.rows(), trainer.model(images)
    for label, row in zip(test.labels.tolist(), logits, strict=True):
        top = int(row.argmax())
        others = [j for j in range(10) if j != top]
        radius = min(float((row[top] - row[j]) / (weight[top] - weight[j]).norm()) for j in others)
        right += top == label
        certified += top == label and radius >= 0.215
    assert 0 < certified < right
    scores = trainer.observer.evaluation.of_test_set()
    assert scores["test/clean_accuracy"] == pytest.approx(right / 360)
    assert scores["test/nominal_cra"] == pytest.approx(certified / 360)
    # Two steps into the first Lookahead period the slow weights are still the initial ones.
    for batch, _ in zip(trainer.loader, range(2), strict=False):
        trainer.train_step(batch)
    fast = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.observer.evaluation.of_test_set() == scores
    assert_same(dict(trainer.model.state_dict()), fast)


def test_an_update_that_overflows_stops_the_run(tmp_path, capsys):
    settings = [*SETTINGS, "optim.lr=1e30", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(SystemExit) as stopped:
        main(settings)
    assert stopped.value.code == 1
    assert capsys.readouterr().err.startswith(
        "failed: step 1: the update of a matrix is not finite"
    )


def test_a_lack_of_memory_is_one_line(tmp_path, monkeypatch):
    """With the step and what makes it smaller; the run can continue with that."""

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer = Trainer(small_recipe(tmp_path / "run"))
    monkeypatch.setattr(trainer, "_gradients", fill)
    said = r"^step 1: out of memory on cpu with 400 images a process; a larger parallel\.accumulat"
    with pytest.raises(trainer_module.RunFailed, match=said):
        trainer.run()
    Trainer(small_recipe(tmp_path / "run", "parallel.accumulation=2", "run.max_steps=1")).run()


def test_a_learning_rate_that_is_too_high_is_named(tmp_path, capsys):
    """Once, after some lines that are no better than a guess; and where an update overflows."""
    Trainer(small_recipe(tmp_path / "run", "optim.lr=10")).run()
    said = "loss and accuracy are those of a guess: is optim.lr = 10 too high?"
    assert capsys.readouterr().out.count(said) == 1
    with pytest.raises(RunFailed, match=r"not finite; lower optim\.lr$"):  # and no checkpoint
        Trainer(small_recipe(tmp_path / "worse", "optim.lr=1e30")).run()
