"""The command, its findings, and a machine from which packages are missing."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from faults import DIGITS, ROOT, mounted

from lipnext_scale.checks import environment, look, wrong
from lipnext_scale.checks.network import Launch, expand_nodes, launch_of
from lipnext_scale.doctor import main
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError


def doctor(*arguments: str, python: tuple[str, ...] = (), path: str = str(ROOT)):
    return subprocess.run(
        [sys.executable, *python, "-m", "lipnext_scale.doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


# ---- findings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "given", "text", "fix"),
    [
        (ConfigError("data.workers", -1, "must be 0"), "", "data.workers = -1", "must be 0"),
        (ConfigError("a", 1, "no shard"), "convert it", "a = 1: no shard", "convert it"),
        (UserError("x.tar: is short"), "convert it", "x.tar: is short", "convert it"),
        (ZeroDivisionError("of\na check"), "b", "ZeroDivisionError: of a check", "b"),
    ],
)
def test_an_error_is_a_finding_with_a_fix(error, given, text, fix):
    """A check that fails or crashes does not end the others."""

    def fail():
        raise error

    assert look("disk", fail, given) == [wrong("disk", text, fix)]
    assert wrong("disk", text, fix).line() == f"wrong  disk: {text}  →  {fix}"


# ---- the command ---------------------------------------------------------------------------------


def test_a_mistake_in_the_arguments_ends_with_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--timeout", "0"])
    assert exit_.value.code == 2
    assert "argument --timeout: 0 must be a whole number from 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sound_machine_and_run(tmp_path):
    """Exit code 0 and, for programs, nothing but JSON; nothing is written."""
    done = doctor("--json", "--config", DIGITS, f"run.dir={tmp_path}/run")
    values = json.loads(done.stdout)
    assert done.returncode == 0 and not values["wrong"], done.stdout
    found = {finding["check"]: finding for finding in values["findings"]}
    for check in ("python", "package torch", "cpu", "memory", "shared memory", "gloo"):
        assert found[check]["state"] == "ok", found[check]
    for check in ("configuration", "batch", "device", "memory of the run", "data", "run.dir"):
        assert found[check]["state"] == "ok", found[check]
    assert all(f["fix"] for f in values["findings"] if f["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_packages_that_are_missing_or_broken(tmp_path):
    """A needed one is wrong, an optional one a warning; all else is still checked."""
    site = Path(sysconfig.get_path("purelib"))
    for entry in site.iterdir():  # this installation's packages by links, but some
        if not entry.name.lower().startswith(("deepspeed", "webdataset", "simplejpeg.")):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "simplejpeg").unlink()
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('libjpeg.so: cannot open')\n")
    done = doctor("--config", DIGITS, python=("-S",), path=f"{tmp_path}:{ROOT}")
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 1, done.stderr
    deepspeed = lines["warn   package deepspeed"]
    assert "not installed; optional" in deepspeed and "'lipnext_scale[deepspeed]'" in deepspeed
    assert "not installed" in lines["wrong  package webdataset"]
    broken = lines["wrong  imports of needed packages"]
    assert "cannot open" in broken and "--force-reinstall" in broken
    assert "install the packages above" in lines["wrong  configuration"]
    assert "ok     gloo" in lines and done.stdout.splitlines()[-1].startswith("3 wrong, ")


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "ranks", "state"), [("1", 1, "ok"), ("4096", 4, "warn"), ("many", 1, "ok")]
)
def test_threads_of_all_processes_fit_the_cpus(threads, ranks, state, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert environment.cpus(ranks).state == state


def test_little_shared_memory_is_a_warning(tmp_path):
    """64 MB, as containers have by default."""
    with mounted(tmp_path / "shm", "size=64m") as small:
        found = environment.shared_memory(str(small))
    assert found.state == "warn" and "--shm-size" in found.fix


def test_versions_and_requirements_are_read_as_pip_writes_them():
    """1.10 is newer than 1.9."""
    extra = 'deepspeed>=0.19.8; extra == "deepspeed"'
    assert environment.parsed(extra) == ("deepspeed", "0.19.8", "deepspeed")
    assert environment.parsed("lipnext-scale[prep]; extra == 'all'") == ("lipnext_scale", "", "all")
    old = environment.package("x", "1.10", "", "1.9.1+cpu")
    assert old.state == "wrong" and "pip install 'x>=1.10'" in old.fix
    assert environment.package("x", "1.9", "", "1.10").state == "ok"


@pytest.mark.parametrize(
    ("cuda", "version", "works", "state"),
    [
        ("13.0", "580.65.06", True, "ok"),
        ("13.0", "575.57.08", False, "wrong"),
        ("12.8", "570.26", False, "ok"),  # then it is not the driver
        ("13.0", "535.86", True, "ok"),  # by cuda-compat
        ("14.0", "600.1", False, "ok"),  # not known here
    ],
)
def test_the_driver_is_new_enough_for_the_cuda_of_torch(cuda, version, works, state):
    found = environment.driver_for(cuda, version, works)
    assert found.state == state
    assert state == "ok" or f"CUDA {cuda} needs" in found.text and " or newer" in found.fix


# ---- the launch ----------------------------------------------------------------------------------

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "20007",
}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a1,b[9-10]-ib,c", ["a1", "b9-ib", "b10-ib", "c"]),
    ],
)
def test_names_of_nodes_are_written_out(listed, names):
    assert expand_nodes(listed) == names


def test_srun_and_torchrun_are_launchers():
    """With srun alone rank 0's node is where they meet, and the port is the job's own; torchrun,
    which srun may start, goes first; a batch script itself is one process."""
    launch = launch_of(SRUN)
    assert launch == Launch(3, 4, 1, 2, "gpu08", 20007, False, ("gpu08", "gpu09"))
    assert launch.name_of(2) == "rank 2 on gpu09"
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    own |= {"MASTER_ADDR": "gpu08", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    nodes = ("gpu08", "gpu09")
    assert launch_of({**SRUN, **own}) == Launch(5, 8, 1, 4, "gpu08", 29400, True, nodes)
    assert launch_of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Launch()
