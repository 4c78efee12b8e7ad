"""How commands start: `lipnext NAME`, `python -m`, and what they set before torch is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipnext_scale.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


def commands_of(package: str) -> list[str]:
    files = (ROOT / package).glob("*.py")
    return [f"{package}.{path.stem}" for path in files if "def main(" in path.read_text("utf-8")]


# The first import of torch ends a module: what OpenMP would read is known then.
STARTS = """
import json, os, runpy, sys

class Torch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            sys.exit("torch is loaded")

sys.meta_path.insert(0, Torch)
sys.argv, found = ["", "--help"], {}

def look(title, start):
    os.environ.pop("OMP_WAIT_POLICY", None)
    for name in [x for x in sys.modules if x.split(".")[0] in ("lipnext_scale", "data_prep")]:
        del sys.modules[name]
    try:
        start()
    except SystemExit:
        found[title] = os.environ.get("OMP_WAIT_POLICY")

for name in json.loads(sys.stdin.read()):
    look(name, lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))

def library():
    import lipnext_scale.certify

def console():
    from lipnext_scale.cli import main
    main(["certify"])

look("library", library)
look("console", console)
print(json.dumps(found))
"""


def test_commands_wait_passively_and_a_library_changes_nothing() -> None:
    names = [f"lipnext_scale.{name}" for name in COMMANDS]
    assert {*commands_of("lipnext_scale")} == {*names, "lipnext_scale.cli"}
    names += commands_of("data_prep")
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        input=json.dumps(names),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {**dict.fromkeys(names, "passive"), "library": None, "console": "passive"}


def started(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code, capsys.readouterr().err


def test_lipnext_speaks_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # stays
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lipnext"])
    main()
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    code, error = started(capsys, "trian")
    assert code == 2 and error.count("\n") == 1 and "lipnext trian: no such command" in error
    code, error = started(capsys, "export", "--run", "x")
    assert code == 2 and error.endswith("--out; see lipnext export --help\n")
    assert os.environ["OMP_WAIT_POLICY"] == "active"
