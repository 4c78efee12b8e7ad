"""The command: its exit codes, and a machine from which packages are missing."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from faults import DIGITS, ROOT, mounted

from lipnext_scale.doctor import environment
from lipnext_scale.doctor.__main__ import main


def doctor(*arguments: str, python: tuple[str, ...] = (), path: str = str(ROOT), **variables: str):
    return subprocess.run(
        [sys.executable, *python, "-m", "lipnext_scale.doctor", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["model.width"], "must have the form section.key=value"),
        (["--timeout", "0"], "--timeout 0: must be at least 1"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_mistakes_in_the_arguments_end_with_2(arguments, said, capsys):
    """One line, before anything is looked at."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_sound_machine_and_run(tmp_path):
    """Exit code 0 and, for programs, nothing but JSON; nothing is written."""
    done = doctor("--json", "--config", DIGITS, f"run.dir={tmp_path}/run")
    values = json.loads(done.stdout)
    assert done.returncode == 0 and not values["wrong"], done.stdout
    found = {finding["check"]: finding for finding in values["findings"]}
    for check in ("python", "package torch", "cpu", "memory", "shared memory", "libjpeg-turbo"):
        assert found[check]["state"] == "ok", found[check]
    for check in ("gloo", "batch", "data.train", "data.test", "run.dir", "disk"):
        assert found[check]["state"] == "ok", found[check]
    assert all(f["mend"] for f in values["findings"] if f["state"] != "ok")
    assert list(tmp_path.iterdir()) == []


def installation_without(tmp: Path, *left_out: str) -> Path:
    """This installation's packages by links, but some."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(left_out):
            (tmp / entry.name).symlink_to(entry)
    return tmp


@pytest.mark.slow
def test_packages_that_are_missing_or_broken(tmp_path):
    """Needed ones are wrong, optional ones only told; and all else is still looked at."""
    packages = installation_without(tmp_path, "deepspeed", "webdataset", "simplejpeg")
    for entry in Path(sysconfig.get_path("purelib")).glob("simplejpeg-*"):
        (tmp_path / entry.name).symlink_to(entry)  # it says that it is there
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('libjpeg.so: cannot open')\n")
    done = doctor("--config", DIGITS, python=("-S",), path=f"{packages}:{ROOT}")
    lines = done.stdout.splitlines()

    def line(check: str) -> str:
        (found,) = [line for line in lines if f"  {check}: " in line]
        return found

    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert line("package deepspeed").startswith("warn   package deepspeed: not installed; optional")
    assert "pip install -c constraints.txt '.[deepspeed]'" in line("package deepspeed")
    assert line("package webdataset").startswith("wrong  package webdataset: not installed")
    assert "pip install -c constraints.txt 'webdataset>=" in line("package webdataset")
    assert line("package simplejpeg").startswith("wrong") and "cannot open" in line(
        "package simplejpeg"
    )
    assert "--force-reinstall" in line("package simplejpeg")
    assert line("libjpeg-turbo").startswith("wrong") and "cannot open" in line("libjpeg-turbo")
    assert line("configuration").startswith("wrong") and "cannot be read" in line("configuration")
    assert line("gloo").startswith("ok")


def test_packages_that_end_the_process_are_told_from_others(tmp_path, monkeypatch):
    """One process imports all; where one of them ends it, each is tried by itself."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "broken.py").write_text("raise ImportError('first line\\nlib.so: cannot open')\n")
    (tmp_path / "talking.py").write_text("print('welcome', end='')\n")
    found = environment.import_failures(["yaml", "broken", "talking", "nowhere"])
    missing = "ModuleNotFoundError: No module named 'nowhere'"
    assert found == {"broken": "lib.so: cannot open", "nowhere": missing}
    (tmp_path / "crashing.py").write_text("import os\nos.abort()\n")
    found = environment.import_failures(["yaml", "crashing", "broken"])
    assert found == {"broken": "lib.so: cannot open", "crashing": "it ended with -6"}


@pytest.mark.slow
def test_without_torch_the_processes_of_a_launch_say_so(tmp_path):
    """As srun starts them: the first one tells of its node, others what it cannot know."""
    packages = installation_without(tmp_path, "torch")
    told = []
    for rank, local in ((0, 0), (1, 1), (2, 0)):
        variables = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[08-09]"}
        variables |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local)}
        told.append(doctor(python=("-S",), path=f"{packages}:{ROOT}", **variables))
    first, same_node, other_node = told
    assert "wrong  package torch: not installed" in first.stdout and first.returncode == 1
    untried = "torch cannot be imported: No module named 'torch'"
    assert f"wrong  processes: not tried by rank 0 on gpu08: {untried}" in first.stdout
    assert (first.stderr, same_node.stdout, same_node.stderr) == ("", "", "")
    assert other_node.stderr.startswith("rank 2: wrong  processes: not tried by rank 2 on gpu09: ")
    assert other_node.stderr.count("\n") == 1


# ---- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "ranks", "state", "mend"),
    [
        ("1", 1, "ok", ""),
        ("4096", 4, "warn", "export OMP_NUM_THREADS="),
        ("many", 1, "wrong", "export OMP_NUM_THREADS=1"),
    ],
)
def test_threads_of_all_processes_fit_the_cpus(threads, ranks, state, mend, monkeypatch):
    """Processes that each take all CPUs wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = environment.cpus(ranks)
    assert found.state == state and found.mend.startswith(mend)


def test_little_shared_memory_is_told(tmp_path):
    """64 MB, as containers have by default."""
    assert environment.shared_memory().check == "shared memory"
    with mounted(tmp_path / "shm", "size=64m") as small:
        found = environment.shared_memory(str(small))
    assert found.state == "warn" and "--shm-size" in found.mend


@pytest.mark.parametrize(
    ("requirement", "parsed"),
    [
        ("torch>=2.6", ("torch", "2.6", "")),
        ('deepspeed>=0.19.8; extra == "deepspeed"', ("deepspeed", "0.19.8", "deepspeed")),
        ("lipnext-scale[prep]; extra == 'all'", ("lipnext_scale", "", "all")),
    ],
)
def test_requirements_are_read_as_pip_writes_them(requirement, parsed):
    """From pyproject.toml or from the metadata of an installation."""
    assert environment._parsed(requirement) == parsed


def test_versions_are_compared_as_numbers():
    """1.10 is newer than 1.9."""
    old = environment._package("x", "1.10", "", "1.9.1+cpu", "")
    assert old.state == "wrong" and "pip install -c constraints.txt 'x>=1.10'" in old.mend
    assert environment._package("x", "1.9", "", "1.10", "").state == "ok"
