"""`train --check`: what is wrong with a run is told before any of its processes is started."""

import json
from pathlib import Path

import pytest
from train_command import assert_refused, contents, prepare, run_train


@pytest.mark.parametrize("ranks", ["1", "4"])
def test_a_sound_run_is_passed_and_nothing_is_written(tmp_path: Path, ranks: str) -> None:
    """What is printed is where the run will be, for the launcher that asked."""
    config = str(prepare(tmp_path))
    before = contents(tmp_path)
    outcome = run_train("--config", config, "--check", "--ranks", ranks, "run.device=cpu")
    assert (outcome.code, outcome.out) == (0, f"run.dir: {tmp_path}/run\n"), outcome.err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "argument, said",
    [
        ("data.batch_size=6", "data.batch_size = 6: must be a multiple of 4 process"),
        ("parallel.shard_size=3", "parallel.shard_size = 3: must divide the number of processes"),
        ("data.test=none-*.tar", "data.test = 'none-*.tar': no shard"),
        ("model.num_classes=2", "data.train"),
        ("--ranks-per-node=0", "--ranks-per-node 0: must be at least 1"),
        ("parallel.engine=single", "parallel.engine = 'single': 4 processes were started"),
    ],
)
def test_what_would_fail_later_fails_now(tmp_path: Path, argument: str, said: str) -> None:
    """One line, exit code 2, as the run itself would."""
    config = str(prepare(tmp_path))
    argv = ["--config", config, "--check", "--ranks", "4", "--ranks-per-node", "2", argument]
    assert_refused(run_train(*argv, "run.device=cpu"), said)


def test_a_partition_through_a_matrix(tmp_path: Path) -> None:
    """Without its processes: 2·depth matrices on 3 of them."""
    pytest.importorskip("deepspeed")
    argv = ["--config", str(prepare(tmp_path)), "--check", "--ranks", "3", "run.device=cpu"]
    argv += ["data.batch_size=6", "parallel.engine=deepspeed", "parallel.zero_stage=3"]
    assert_refused(run_train(*argv), "ZeRO-3 on 3 processes would cut through matrices")


def test_the_processes_of_a_deepspeed_file_are_those_of_the_run(tmp_path: Path) -> None:
    """part × parts × processes, though none of them is there."""
    pytest.importorskip("deepspeed")
    file = tmp_path / "zero2.json"
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 2}}))
    argv = ["--config", str(prepare(tmp_path)), "--check", "run.device=cpu", "data.batch_size=8"]
    argv += ["--deepspeed", "--deepspeed_config", str(file)]
    assert run_train(*argv, "--ranks", "4").code == 0
    said = f"data.batch_size = 8: the launcher says 4 ({file}: train_micro_batch_size_per_gpu"
    assert_refused(run_train(*argv, "--ranks", "2"), said)


def test_a_run_directory_of_another_run(tmp_path: Path) -> None:
    """Found before the queue is waited for a second time."""
    config = str(prepare(tmp_path))
    assert run_train("--config", config, "run.max_steps=1").code == 0
    assert_refused(run_train("--config", config, "--check", "model.width=16"), "model.width = 8")
    assert run_train("--config", config, "--check").code == 0
