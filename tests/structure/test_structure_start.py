"""Commands start without looking for garbage among what they import; nobody else is changed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipnext_scale.errors import command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("start", "collects"),
    [
        (["-m", "lipnext_scale.errors"], "False"),  # stands for a command that has not begun
        (["-c", "import lipnext_scale.errors"], "True"),
        (["-m", "theirs"], "True"),
    ],
)
def test_importing_as_a_command_and_as_a_library(
    start: list[str], collects: str, tmp_path: Path
) -> None:
    """Also as the library of a package that is started in the same way."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import lipnext_scale.errors\n")
    (tmp_path / "theirs" / "__main__.py").touch()
    done = subprocess.run(
        [sys.executable, "-i", *start],
        input="import gc; print(gc.isenabled())\n",
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == collects, done.stderr


def test_a_command_that_has_begun_collects_its_own_garbage() -> None:
    met: list[tuple[bool, bool]] = []
    begin = command(lambda: met.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    gc.disable()
    try:
        begin()
    finally:
        gc.enable()
        gc.unfreeze()
    begin()  # as a function of a library it leaves collecting as it is
    assert met == [(True, True), (True, False)]
