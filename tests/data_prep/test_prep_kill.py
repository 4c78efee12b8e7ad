"""SIGKILL of the real command: it continues, ends with the same bytes, leaves no worker behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prep_sources import contents, encoded, noise, run_command, samples_of, succeeds, write_files

from data_prep import imagenet
from data_prep.sources import FolderImages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """23 shards of 10 images: half a second of work."""
    images = {f"one/{i:03d}.png": encoded(noise(224, 224, 3, seed=i)) for i in range(12)}
    more = {
        f"{kind}/{i:03d}.png": content
        for kind in ("two", "three")
        for i, content in enumerate(list(images.values()) * 9)
    }
    return write_files(tmp_path_factory.mktemp("source"), images | more)


def arguments(source: Path, out: Path) -> list[str]:
    given = ("--source", source, "--split", "train", "--shard-samples", 10, "--workers", 2)
    return [str(argument) for argument in (*given, "--out", out)]


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def converted_in_child(source: Path, out: Path, deadly: int) -> int:
    """The status of a process that kills itself before its file operation number `deadly`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        left = iter(range(deadly))

        def hook(event: str, values: tuple) -> None:
            ours = event in ("os.remove", "os.rmdir") or str(values[:1]).find(str(out)) >= 0
            if event in FILE_EVENTS and ours and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        run_command(imagenet.main, *arguments(source, out)[:-2], "--workers", 0, "--out", out)
    finally:
        os._exit(0)


@pytest.mark.slow
def test_killed_before_every_file_operation(tmp_path):
    """Of a small conversion in one process; each time the same command ends with the same bytes."""
    images = {f"one/{i}.png": encoded(noise(8, 8, seed=i)) for i in range(25)}
    source = write_files(tmp_path / "source", images)
    assert converted_in_child(source, tmp_path / "clean", 10**6) == 0
    clean = contents(tmp_path / "clean")
    assert len([name for name in clean if name.endswith(".tar")]) == 3
    for deadly in range(10**6):
        out = tmp_path / f"killed{deadly}"
        status = converted_in_child(source, out, deadly)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        succeeds(imagenet.main, *arguments(source, out)[:-2], "--workers", 0, "--out", out)
        assert contents(out) == clean, deadly
    assert deadly > 20 and contents(out) == clean


@pytest.mark.slow
def test_killed_with_its_workers(source, tmp_path):
    """No process is left after the death of the command, nor anything written; the same command
    ends with the bytes of an undisturbed run."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data_prep.imagenet", *arguments(source, out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as parent:
        while not list(out.glob("train-*.tar*")):
            time.sleep(0.01)
        children = children_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
    assert len(children) == 2
    deadline = time.monotonic() + 5
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline, "a worker has outlived its parent"
        time.sleep(0.02)
    before = contents(out)
    time.sleep(0.3)
    assert contents(out) == before and not (out / "train.index.json").exists()
    assert "continues, " in succeeds(imagenet.main, *arguments(source, out))
    succeeds(imagenet.main, *arguments(source, tmp_path / "clean"))
    assert contents(out) == contents(tmp_path / "clean")


def test_a_worker_that_is_killed(source, tmp_path, monkeypatch):
    """As for lack of memory: the command fails rather than waits, with a hint; and continues."""
    load, parent = FolderImages.load, os.getpid()

    def deadly(self: FolderImages, i: int) -> bytes:
        if i == 117 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return load(self, i)

    with monkeypatch.context() as patch:
        patch.setattr(FolderImages, "load", deadly)
        outcome = run_command(imagenet.main, *arguments(source, tmp_path))
    assert outcome.code == 1 and "a worker process was killed" in outcome.err
    assert "fewer --workers" in outcome.err and not (tmp_path / "train.index.json").exists()
    assert "continues, " in succeeds(imagenet.main, *arguments(source, tmp_path))
    assert len(samples_of(tmp_path, "train")) == 228


def children_of(process: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_interrupted_by_the_user(source, tmp_path):
    """Ctrl-C reaches all processes: one line, code 130; the same command continues."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data_prep.imagenet", *arguments(source, out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as parent:
        while not list(out.glob("train.journal/0*.json")):
            time.sleep(0.01)
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=20)
    assert (parent.returncode, err) == (130, b"interrupted\n")
    assert not list(out.glob("*.partial"))
    assert "continues, " in succeeds(imagenet.main, *arguments(source, out))
