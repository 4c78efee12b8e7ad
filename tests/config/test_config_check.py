"""`train --check` finds mistakes before any process starts; `--print-config` shows the outcome."""

import json
from pathlib import Path

import pytest
from train_command import assert_refused, contents, prepare, run_train

from lipnext_scale.config.recipe import load_recipe


@pytest.mark.parametrize("ranks", ["1", "4"])
def test_a_sound_run_passes_and_nothing_is_written(tmp_path: Path, ranks: str) -> None:
    """What is printed is where the run will be, for the launcher that asked."""
    config = str(prepare(tmp_path))
    before = contents(tmp_path)
    outcome = run_train("--config", config, "--check", "--ranks", ranks, "run.device=cpu")
    memory, *rest = outcome.out.splitlines()
    assert (outcome.code, rest) == (0, [f"run.dir: {tmp_path}/run", "ok"])
    assert memory.startswith(f"ok     memory of the run: each of {ranks} process")
    assert outcome.err == ""
    assert contents(tmp_path) == before


def test_classes_without_images_are_named(tmp_path: Path) -> None:
    outcome = run_train("--config", str(prepare(tmp_path)), "--check", "model.num_classes=4")
    said = "warning: model.num_classes = 4: the data has labels 0 to 2\n"
    assert (outcome.code, outcome.err) == (0, said)


@pytest.mark.parametrize(
    "argument, said",
    [
        ("data.batch_size=6", "data.batch_size = 6: must be a multiple of 4 process"),
        ("parallel.shard_size=3", "parallel.shard_size = 3: must divide the number of processes"),
        ("data.test=none-*.tar", "data.test = 'none-*.tar': no shard"),
        ("run.init_from=none", "none: no such run directory, checkpoint or export"),
        ("--ranks-per-node=0", "argument --ranks-per-node: 0 must be a whole number"),
        ("parallel.engine=single", "parallel.engine = 'single': 4 processes were started"),
    ],
)
def test_what_would_fail_later_fails_now(tmp_path: Path, argument: str, said: str) -> None:
    config = str(prepare(tmp_path))
    argv = ["--config", config, "--check", "--ranks", "4", "--ranks-per-node", "2", argument]
    assert_refused(run_train(*argv, "run.device=cpu"), said)


def test_deepspeed_without_its_processes(tmp_path: Path) -> None:
    """One block on 3 processes; a file's part × parts × processes, though none is there."""
    pytest.importorskip("deepspeed")
    argv = ["--config", str(prepare(tmp_path)), "--check", "run.device=cpu"]
    zero3 = ["data.batch_size=6", "parallel.engine=deepspeed", "parallel.zero_stage=3"]
    said = "ZeRO-3 on 3 processes would cut through blocks"
    assert_refused(run_train(*argv, *zero3, "--ranks", "3"), said)
    file = tmp_path / "zero2.json"
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 2}}))
    argv += ["data.batch_size=8", "--deepspeed", "--deepspeed_config", str(file)]
    assert run_train(*argv, "--ranks", "4").code == 0
    said = f"data.batch_size = 8: the launcher says 4 ({file}: train_micro_batch_size_per_gpu"
    assert_refused(run_train(*argv, "--ranks", "2"), said)


def test_print_config_is_what_a_run_keeps(tmp_path: Path) -> None:
    """Saved as a file, it is the same recipe; and no run directory was made."""
    config = str(prepare(tmp_path))
    arguments = ["loss.epsilon=36/255", "optim.betas=[0.5, 0.75]", "run.max_steps=1"]
    before = contents(tmp_path)
    outcome = run_train("--config", config, "--print-config", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert contents(tmp_path) == before
    printed = tmp_path / "printed.yaml"
    printed.write_text(outcome.out, encoding="utf-8")
    assert load_recipe(str(printed)) == load_recipe(config, arguments)
    assert run_train("--config", config, *arguments).code == 0
    assert (tmp_path / "run/config.yaml").read_text(encoding="utf-8") == outcome.out
