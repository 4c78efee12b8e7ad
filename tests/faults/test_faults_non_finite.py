"""Steps that are not finite: skipped alike on all engines, and resumed exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_processes
from torch import Tensor
from training.small import assert_same, poison, small_recipe, state_of

from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import RunFailed

# ε is large enough that Adam does not make steps of rounding errors, so engines can be compared.
# Nothing is evaluated; a quarter of the digits makes epochs of as many steps.
SETTINGS = """
data.train=builtin:digits/test-*.tar.gz data.batch_size=120 optim.eps=1e-2 run.keep_checkpoints=9
run.eval_every=0
""".split()
ENGINES = {
    "single": ["parallel.engine=single"],
    "ddp": ["parallel.engine=ddp"],
    "banks": ["parallel.engine=fsdp"],
    "replicas": ["parallel.engine=fsdp", "parallel.shard_size=1"],
    "replicas alone": ["parallel.engine=ddp", "parallel.share_step=false"],
    "rows": ["parallel.engine=fsdp", "parallel.weight_layout=row"],
    "ZeRO-1": ["parallel.engine=deepspeed", "parallel.zero_stage=1"],
    "ZeRO-2": ["parallel.engine=deepspeed", "parallel.zero_stage=2"],
    "ZeRO-3": ["parallel.engine=deepspeed", "parallel.zero_stage=3"],
    "ZeRO-2, offloaded": ["parallel.engine=deepspeed", "parallel.offload_optimizer=true"],
}
BF16 = [*ENGINES["ZeRO-2, offloaded"], "parallel.precision=bf16"]
ENGINES |= {"ZeRO-2, bf16": BF16, "ZeRO-3, bf16": [*BF16, "parallel.zero_stage=3"]}
# Those that keep weights and state in ways of their own: also stopped after the step.
THOROUGH = ["single", "ddp", "banks", "rows", "ZeRO-2", "ZeRO-3"]


def train(directory: Path, steps: set[int], *overrides: str) -> Trainer:
    """A run, or its continuation, whose epochs have three steps and which goes to step 12."""
    trainer = Trainer(small_recipe(directory, *SETTINGS, *overrides))
    with poison(trainer, steps):
        trainer.run()
    return trainer


def train_all(rank: int, world_size: int, directory: Path, engines: list[str]) -> None:
    """Every engine: undisturbed but for the poison, and stopped after it."""
    for name in engines:
        skip = [*ENGINES[name], "run.on_non_finite=skip"]
        train(directory / name / "skip", {5, 8}, *skip)
        if name in THOROUGH:
            train(directory / name / "skip, stopped", {5, 8}, *skip, "run.max_steps=5")
            train(directory / name / "skip, stopped", {5, 8}, *skip)


def train_with_a_huge_loss(rank: int, world_size: int, directory: Path) -> str:
    """What is said in the third step."""
    trainer = Trainer(small_recipe(directory, *SETTINGS, *ENGINES["ZeRO-2, offloaded"]))
    with poison(trainer, {3}, by=1e21), pytest.raises(RunFailed) as failed:
        trainer.run()
    return str(failed.value)


def stored(directory: Path, step: int) -> dict[str, Any]:
    return state_of(directory / "checkpoints" / f"step-{step:09d}")


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


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
def test_a_skipped_step_moves_nothing_and_is_resumed_exactly(runs, engine):
    """Step 5 leaves every tensor as it was; with a stop right behind it the end is the same."""
    whole, stopped = runs / engine / "skip", runs / engine / "skip, stopped"
    before, after = stored(stopped, 4), stored(stopped, 5)
    assert_same(tensors_of(after), tensors_of(before))
    assert after["optimizers"] == before["optimizers"]
    assert (before["non_finite"], after["non_finite"]) == ({"missing": 0}, {"missing": 1})
    assert after["loader"]["step"] == 5
    assert_same(stored(stopped, 12), stored(whole, 12))
    assert stored(whole, 12)["non_finite"] == {"missing": 2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in MANY if "bf16" not in name])
def test_all_engines_do_the_same(runs, engine):
    """What is left differs from one process by rounding; an update too many would be 1e-2."""
    alone = tensors_of(stored(runs / "single" / "skip", 12))
    ours = tensors_of(stored(runs / engine / "skip", 12))
    assert ours.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in MANY if "bf16" in name])
def test_the_steps_after_a_skipped_one_are_finite(runs, engine):
    """With the optimizer on the CPU DeepSpeed adds up parts in a buffer of its own, which must not
    keep what was not finite."""
    assert stored(runs / engine / "skip", 12)["non_finite"] == {"missing": 2}


@pytest.mark.slow
def test_a_norm_beyond_float32_ends_in_a_line(tmp_path):
    """Gradients are finite and would be clipped; DeepSpeed looks at them before that."""
    (said,) = run_processes(1, train_with_a_huge_loss, tmp_path)
    assert said.startswith("step 3: DeepSpeed made no step: the gradient's norm overflows; ")


def test_it_is_printed_and_counted(tmp_path, capsys):
    """A line with step and tensor, a metric, no NaN in metrics.jsonl; one too many is the end."""
    settings = ["run.on_non_finite=skip", "run.non_finite_limit=2"]
    with pytest.raises(
        RunFailed, match=r"step 9: the loss is nan; run\.non_finite_limit = 2 allow"
    ):
        train(tmp_path / "run", {1, 7, 9}, *settings)
    out = capsys.readouterr().out
    assert "warning: step 1: the loss is nan (1 of at most 2 such steps); its batch is" in out
    assert "warning: step 7: the loss is nan (2 of at most 2 such steps)" in out
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert "NaN" not in text and [r["step"] for r in records] == list(range(1, 9))
    assert [r["train/non_finite_steps"] for r in records] == [1, 1, 1, 1, 1, 1, 2, 2]
    assert [r["step"] for r in records if r["move/largest"] == 0] == [1, 7]
    with pytest.raises(RunFailed, match="step 9"):  # counted on from the checkpoint of step 8
        train(tmp_path / "run", {9}, *settings)
