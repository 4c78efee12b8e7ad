"""SIGKILL at any moment of a save leaves a newest checkpoint that is intact."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_parts import assert_holds, sample_shards
from gloo import run_processes

from lipnext_scale.checkpoint import CheckpointWriter, latest_checkpoint
from lipnext_scale.checkpoint.io import HashedStream

LENGTH = 60_000  # two tensors of 1.2 and 0.7 MB
NAMING = "os.rename step-000000002.partial"
FILE_EVENTS = {
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.symlink", "os.remove"),
    *("os.rmdir", "shutil.rmtree"),
}
RELATIVE = ("os.remove", "os.rmdir", "os.symlink")


def mark_beside(directory: str) -> str:
    return f"{directory}-mark"


class FileEvents:
    """The file operations of the writer's thread, counted before they happen.

    Python's audit hooks report them; writes, our own stream. At the one numbered
    `deadly`, all processes of the job are killed; its name is left in the file `mark`.
    """

    def __init__(self, directory: str, deadly: int | None, processes: list[int]) -> None:
        self.directory, self.deadly, self.processes = directory, deadly, processes
        self.mark = open(mark_beside(directory), "a")  # now, for in a hook it would be an event too
        self.seen: list[str] = []
        sys.addaudithook(self._hook)
        write = HashedStream.write

        def counted(stream: HashedStream, data: bytes) -> int:
            self._count("write")
            return write(stream, data)

        HashedStream.write = counted

    def _hook(self, event: str, arguments: tuple) -> None:
        ours = threading.current_thread().name.startswith("checkpoint")
        if event in FILE_EVENTS and ours:
            path = str(arguments[0])
            if path.startswith(self.directory) or event in RELATIVE:
                self._count(f"{event} {Path(path).name}")

    def _count(self, event: str) -> None:
        if len(self.seen) == self.deadly:
            self.mark.write(event)
            self.mark.flush()
            own = os.getpid()
            for process in sorted(self.processes, key=lambda number: number == own):
                os.kill(process, signal.SIGKILL)
        self.seen.append(event)


def save_twice(
    rank: int, world_size: int, directory: str, victim: int = 0, deadly: int | None = None
) -> list[str]:
    """Step 1 to its end, then step 2, for which step 1 is removed; what it did, in order."""
    processes: list[int] = [0] * world_size
    dist.all_gather_object(processes, os.getpid())
    writer = CheckpointWriter(Path(directory), 1, group=dist.new_group(backend="gloo"))
    writer.save(1, sample_shards(1, rank, world_size, LENGTH), {}, asynchronous=False)
    events = FileEvents(directory, deadly if rank == victim else None, processes)
    writer.save(2, sample_shards(2, rank, world_size, LENGTH), {})
    writer.wait()
    return events.seen


@pytest.fixture(scope="module")
def moments(tmp_path_factory) -> list[list[str]]:
    """For each of two ranks, the file operations of an undisturbed save."""
    directory = tmp_path_factory.mktemp("undisturbed")
    moments = run_processes(2, save_twice, str(directory))
    assert_holds(latest_checkpoint(directory), 2, LENGTH)
    assert moments[0].count(NAMING) == 1 and min(map(len, moments)) > 30
    return moments


def kill_and_look(directory: Path, moments: list[list[str]], victim: int, deadly: int) -> None:
    """Killed at that operation: step 1, or 2 if it had its name, is intact; so is the next."""
    with pytest.raises(AssertionError, match="rank [01]"):
        run_processes(2, save_twice, str(directory), victim, deadly)
    assert (
        Path(mark_beside(str(directory))).read_text().split()[0]
        == (moments[victim][deadly].split()[0])
    )
    step = 2 if victim == 0 and deadly > moments[0].index(NAMING) else 1
    newest = latest_checkpoint(directory)
    assert newest == directory / f"step-{step:09d}"
    assert_holds(newest, step, LENGTH)
    CheckpointWriter(directory, 1).save(3, sample_shards(3), {}, asynchronous=False)
    assert {path.name for path in directory.iterdir()} == {"step-000000003", "latest"}
    assert_holds(latest_checkpoint(directory), 3)


@pytest.mark.parametrize("after", [0, 1])
def test_a_kill_around_the_name(tmp_path, moments, after):
    """Just before the rename step 1 is the newest, just after it step 2."""
    kill_and_look(tmp_path / "run", moments, 0, moments[0].index(NAMING) + after)


@pytest.mark.slow
def test_a_kill_at_any_moment(tmp_path, moments):
    """At every third kind of operation of rank 0, and at three of rank 1."""
    first = moments[0]
    changes = [i for i, event in enumerate(first) if i == 0 or event != first[i - 1]]
    in_its_data = first.index("open __0_0.distcp") + 40
    in_the_removal = first.index("shutil.rmtree step-000000001.deleting") + 4
    deadly_ones = {*changes[::3], in_its_data, in_the_removal}
    assert len(deadly_ones) >= 12
    for deadly in sorted(deadly_ones):
        kill_and_look(tmp_path / f"first-{deadly}", moments, 0, deadly)
    for deadly in (0, len(moments[1]) // 2, len(moments[1]) - 1):
        kill_and_look(tmp_path / f"second-{deadly}", moments, 1, deadly)
