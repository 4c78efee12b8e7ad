"""A save or load that fails on one process fails on all, alike and in time; the rest stays."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_parts import assert_holds, cut, message_of, sample_shards
from gloo import run_processes

from lipnext_scale.checkpoint import CheckpointWriter, StateShard, latest_checkpoint
from lipnext_scale.checkpoint.io import HashedFiles
from lipnext_scale.utils.errors import UserError

LENGTH = 30_000  # 600 kB for each of the sample tensors but one


@contextmanager
def largest_file(size: int):
    """No file of this process may grow beyond `size` bytes: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_on_a_full_disk(rank: int, world_size: int, directory: str, victim: int, size: int) -> dict:
    path = Path(directory)
    writer = CheckpointWriter(path, 3, group=dist.group.WORLD)
    writer.save(1, sample_shards(1, rank, world_size, LENGTH), {}, asynchronous=False)
    with largest_file(size if rank == victim else resource.RLIM_INFINITY):
        writer.save(2, sample_shards(2, rank, world_size, LENGTH), {})
        message = message_of(writer.wait)
    dist.barrier()
    names = sorted(os.listdir(path)) if rank == 0 else None
    dist.barrier()
    writer.save(3, sample_shards(3, rank, world_size, LENGTH), {}, asynchronous=False)
    return {"message": message, "names": names}


@pytest.mark.parametrize("victim, size", [(1, 100_000), (0, 10)])
def test_a_full_disk_is_reported_by_all_and_costs_nothing_else(tmp_path, victim, size):
    """In one process's data, or in the first small file; then there is room, and saving goes on."""
    first, second = run_processes(2, save_on_a_full_disk, str(tmp_path), victim, size)
    assert (
        first["message"]
        == second["message"]
        == (
            f"{tmp_path / 'step-000000002'}: the checkpoint cannot be written: "
            f"{os.strerror(errno.EFBIG)}"
        )
    )
    assert first["names"] == ["latest", "step-000000001"]
    assert latest_checkpoint(tmp_path).name == "step-000000003"
    for step in (1, 3):
        assert_holds(tmp_path / f"step-{step:09d}", step, LENGTH)


def test_the_error_of_an_asynchronous_save_comes_with_the_next(tmp_path):
    """It is raised once, by wait() or save(), whichever is called."""
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints", 1)
    complaint = "file/checkpoints/step-000000001: the checkpoint cannot be written: Not a directory"
    writer.save(1, sample_shards(1), {})
    with pytest.raises(UserError, match=complaint):
        writer.save(2, sample_shards(2), {})
    writer.wait()
    with pytest.raises(UserError, match=complaint):
        writer.save(1, sample_shards(1), {}, asynchronous=False)
    writer.wait()


def test_what_does_not_read_back_is_not_named(tmp_path, monkeypatch):
    """A disk that keeps other bytes than it was given is noticed at once."""
    CheckpointWriter(tmp_path, 2).save(1, sample_shards(1), {}, asynchronous=False)
    create = HashedFiles.create_stream

    @contextmanager
    def create_on_a_bad_disk(self, path, mode):
        with create(self, path, mode) as stream:
            yield stream
        if Path(path).name == damaged:
            content = bytearray(Path(path).read_bytes())
            content[len(content) // 2] ^= 1
            Path(path).write_bytes(content)

    monkeypatch.setattr(HashedFiles, "create_stream", create_on_a_bad_disk)
    for damaged in ("__0_0.distcp", "facts.json", "SHA256SUMS"):
        with pytest.raises(UserError, match=rf"step-000000002.*{damaged}"):
            CheckpointWriter(tmp_path, 2).save(2, sample_shards(2), {}, asynchronous=False)
        assert {path.name for path in tmp_path.iterdir()} == {"step-000000001", "latest"}
    assert_holds(latest_checkpoint(tmp_path), 1)


def save_with_a_mistake_on_one(rank: int, world_size: int, directory: str) -> list[str]:
    writer = CheckpointWriter(Path(directory), 1, group=dist.group.WORLD)
    tensor, wrong = torch.zeros(8, 2), rank == 1
    attempts = [
        ({}, {"loss": 1.0 if wrong else float("nan")}),
        ({"t": cut(tensor, 0, 0, 3) if wrong else cut(tensor, 0, 4, 8)}, {}),
        ({"t": cut(tensor, 0, 2, 6) if wrong else cut(tensor, 0, 0, 4)}, {}),
    ]
    seen = []
    for shards, facts in attempts:
        with pytest.raises(RuntimeError) as error:
            writer.save(1, shards, facts, asynchronous=False)
        seen.append(str(error.value))
    writer.save(3, sample_shards(3, rank, world_size), {}, asynchronous=False)
    return seen


def test_a_mistake_of_one_process_stops_all(tmp_path):
    """Facts that are not JSON, gaps, overlaps: all raise, none waits for ever."""
    for nan, gap, overlap in run_processes(2, save_with_a_mistake_on_one, str(tmp_path)):
        assert "rank 0" in nan and "Out of range float" in nan
        assert "validate global plan" in gap and "overlapping" in overlap
    assert_holds(latest_checkpoint(tmp_path), 3)


def in_own_directory(rank: int, world_size: int, directory: str) -> str:
    writer = CheckpointWriter(Path(directory) / str(rank), 1, group=dist.group.WORLD)
    writer.save(1, {"t": StateShard(torch.zeros(4), (8,), (4 * rank,))}, {})
    return message_of(writer.wait)


def test_ranks_that_do_not_share_the_directory_are_refused(tmp_path):
    """Files on another machine's disk would be missing from the checkpoint."""
    for message in run_processes(2, in_own_directory, str(tmp_path)):
        assert "__1_0.distcp" in message and "all ranks need the same directory" in message
    assert latest_checkpoint(tmp_path / "0") is None
