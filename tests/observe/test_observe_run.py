"""What a run records, when, and that it trains as if unobserved."""

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import wandb
from observed_runs import DEPTH, LAST, QUIET, checkpoint_tensors, recipe, records, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.observe.console import training_flops_per_image
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that can be recorded."""
    directory = tmp_path_factory.mktemp("watched") / "run"
    extra = ("run.peak_tflops=1", "run.profile_steps=[2,4]")
    run(directory, *extra)
    return directory


def test_every_log_interval_has_its_numbers(watched):
    logged = [record for record in records(watched) if "train/loss" in record]
    assert [record["step"] for record in logged] == list(range(1, LAST + 1))
    expected = {"mfu", "images_per_second", "data/wait_share", "memory/resident_gb"}
    expected |= {f"train/{name}" for name in ("loss", "accuracy", "lr", "epsilon", "epoch")}
    expected |= {"train/gradient_norm", "gradient/head", "drift/largest", "move/largest"}
    for kind in ("drift", "move", "gradient"):
        expected |= {f"{kind}/block_{block:02d}" for block in range(DEPTH)}
    for record in logged:
        assert expected <= record.keys()
        assert record["train/epoch"] == pytest.approx(record["step"] / 14)
        flops = training_flops_per_image(LipNeXtConfig(**MODEL))
        assert record["mfu"] == pytest.approx(record["images_per_second"] * flops / 1e12)
    assert [r["step"] for r in records(watched) if "watch/clean_accuracy" in r] == [2, 4]


MODEL = {"depth": DEPTH, "width": 16, "image_size": 8, "patch_size": 2, "in_channels": 1}


def test_tensorboard_has_all_scalars_and_the_configuration(watched):
    events = EventAccumulator(str(watched / "tensorboard")).Reload()
    names = {name for record in records(watched) for name in record} - {"step", "seconds"}
    assert names == set(events.Tags()["scalars"])
    for tag in ("drift/block_01", "watch/nominal_cra", "memory/resident_gb"):
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        written = [(r["step"], r[tag]) for r in records(watched) if tag in r]
        assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in written] != []
    (text,) = events.Tensors("config.yaml/text_summary")
    assert "log_every: 1" in text.tensor_proto.string_val[0].decode()


def test_training_is_the_same_unobserved(watched, tmp_path):
    """All weights and state, bit for bit."""
    run(tmp_path / "quiet", *QUIET)
    assert records(tmp_path / "quiet") == []
    loud, quiet = checkpoint_tensors(watched), checkpoint_tensors(tmp_path / "quiet")
    assert loud.keys() == quiet.keys()
    assert all(torch.equal(loud[name], quiet[name]) for name in loud)


def test_a_continued_run_has_every_step_once(watched, tmp_path):
    """In the file and in TensorBoard, with the values of one that was not stopped."""
    directory = tmp_path / "run"
    Trainer(recipe(directory, "run.max_steps=3")).run()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "train/loss": 0.0, "drift/largest": 1.0}) + "\n{")
    run(directory)
    logged = [record for record in records(directory) if "train/loss" in record]
    assert [record["step"] for record in logged] == list(range(1, LAST + 1))
    straight = [record for record in records(watched) if "train/loss" in record]
    keys = [key for key in straight[0] if key.startswith(("train/", "drift/", "move/", "gradient"))]
    for ours, theirs in zip(logged, straight, strict=True):
        assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("drift/largest")] == list(range(1, LAST + 1))


@pytest.fixture
def offline(monkeypatch):
    """wandb reads its variables once in a process, or after `teardown`, which ends its service."""
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    with suppress(ConnectionError, SystemExit):  # a service that was killed
        wandb.teardown()


def test_weights_and_biases_gets_the_same(tmp_path, offline):
    """Both starts of a continued run under one id, each with the steps that it trained."""
    directory = tmp_path / "run"
    for last in (3, LAST):
        Trainer(recipe(directory, f"run.max_steps={last}", "run.wandb=project")).run()
        wandb.teardown()  # as at a process's end: only then is the log complete
    name = (directory / "wandb_id").read_text()
    # Named by their second; where both start in the same one, the later name ends in -1.
    logs = sorted(directory.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb"))
    assert len(logs) == 2
    for log, steps in zip(logs, ((1, 2, 3), (4, 5)), strict=True):
        here = [record for record in records(directory) if record["step"] in steps]
        for tag in {tag for record in here for tag in record} - {"step", "seconds"}:
            assert tag.encode() in log.read_bytes()
        losses = [repr(record["train/loss"]).encode() for record in here]
        assert all(loss in log.read_bytes() for loss in losses)


def test_a_run_goes_on_without_the_process_of_weights_and_biases(
    tmp_path, offline, monkeypatch, capsys
):
    trainer = Trainer(recipe(tmp_path / "run", "run.max_steps=3", "run.wandb=project"))
    train_step = trainer.train_step

    def kill_and_train(batch):
        for child in psutil.Process().children():
            if child.name() == "wandb-core":
                child.terminate()  # it removes its socket
                child.wait()
        return train_step(batch)

    monkeypatch.setattr(trainer, "train_step", kill_and_train)
    trainer.run()
    assert trainer.step == 3 and capsys.readouterr().out.count("Weights & Biases gets no more") == 1


def test_weights_and_biases_that_cannot_start_say_why_in_a_line(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match="run.wandb = 'project': cannot start: .*'offline'"):
        Trainer(recipe(tmp_path / "run", "run.wandb=project")).run()


def test_the_watched_part_of_the_whole_set_is_the_whole_set(tmp_path):
    settings = ["run.max_steps=4", "loss.epsilon=0.2", "run.watch_samples=1000000"]
    trainer = Trainer(recipe(tmp_path / "run", *settings))
    trainer.run()
    evaluation = trainer.observer.evaluation
    whole, subset = evaluation.of_test_set(), evaluation.of_subset()
    assert subset["watch/clean_accuracy"] == whole["test/clean_accuracy"]
    assert subset["watch/nominal_cra"] == whole["test/nominal_cra"]


# ---- profiles ------------------------------------------------------------------------------------


def test_a_profile_is_there_and_only_of_its_steps(watched):
    names = sorted(path.name for path in (watched / "profile").iterdir())
    assert names == ["steps-000002-000003.rank-0.json.gz", "steps-000002-000003.rank-0.txt"]
    assert "aten::" in (watched / "profile" / names[1]).read_text()


def test_a_continued_run_profiles_what_is_left(tmp_path):
    """Inside the window the rest of it, elsewhere if so configured; after it nothing, in peace."""
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    window = ("run.profile_steps=[3,5]", f"run.profile_dir={elsewhere}")
    Trainer(recipe(directory, "run.max_steps=3", *QUIET, *window)).run()
    assert {p.name[:19] for p in elsewhere.iterdir()} == {"steps-000003-000003"}
    Trainer(recipe(directory, "run.max_steps=5", *QUIET, *window)).run()
    assert {p.name[:19] for p in elsewhere.iterdir()} == {
        *("steps-000003-000003", "steps-000004-000004")
    }
    Trainer(recipe(directory, "run.max_steps=6", *QUIET, *window)).run()
    assert len(list(elsewhere.iterdir())) == 4


def test_a_profile_that_cannot_be_written_is_said_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    window = ("run.profile_steps=[1,2]", f"run.profile_dir={tmp_path}/file/below")
    trainer = Trainer(recipe(tmp_path / "run", "run.max_steps=2", *QUIET, *window))
    trainer.run()
    assert trainer.step == 2 and "the profile was not written" in capsys.readouterr().out


def test_the_arithmetic_of_a_model_is_that_of_its_products():
    """Counted by torch in a forward and a backward pass of the plain form, less the M·Rᵀ."""
    from torch.utils.flop_counter import FlopCounterMode

    from lipnext_scale.models import LipNeXt, blocks, group_reference

    config = LipNeXtConfig(**MODEL)
    model, images = LipNeXt(config, seed=0), torch.rand(4, 1, 8, 8)
    with FlopCounterMode(display=False) as counter:
        x = blocks.space_to_depth(images - 0.5, 2, 16).requires_grad_()
        for group in model.block_groups():
            x = group_reference(x, group.bank, group.bias, group.pos, group.spec)
        logits, _ = model.head(blocks.l2_pool(x))
        logits.sum().backward()
    assert counter.get_total_flops() == 4 * training_flops_per_image(config)
