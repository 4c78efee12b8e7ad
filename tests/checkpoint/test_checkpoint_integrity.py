"""Every damage to a checkpoint is found and named, and none of its files can run anything."""

import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_parts import message_of, sample_shards
from gloo import run_processes
from torch.distributed.checkpoint import metadata

from lipnext_scale.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_shards,
    read_facts,
    stored_shapes,
    verify_checkpoint,
)
from lipnext_scale.checkpoint import directory as checkpoint_directory
from lipnext_scale.checkpoint.directory import SUMS, digest_on_disk, sums_of
from lipnext_scale.checkpoint.io import read_metadata
from lipnext_scale.utils.errors import UserError

FILES = [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "facts.json"]


def save(rank: int, world_size: int, directory: str) -> None:
    writer = CheckpointWriter(Path(directory), 1, group=dist.group.WORLD)
    writer.save(1, sample_shards(1, rank, world_size), {"x": 0.5}, asynchronous=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of two ranks."""
    directory = tmp_path_factory.mktemp("saved")
    run_processes(2, save, str(directory))
    path = latest_checkpoint(directory)
    assert sorted(os.listdir(path)) == FILES
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def reseal(path: Path) -> None:
    """What an attacker does: SHA256SUMS fits the files again."""
    names = sorted(set(os.listdir(path)) - {SUMS})
    (path / SUMS).write_bytes(sums_of({name: digest_on_disk(path / name) for name in names}))
    verify_checkpoint(path)


# --- damage -----------------------------------------------------------------------------------


def flip(position: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[round(position * (len(content) - 1))] ^= 0x10
        file.write_bytes(content)

    return damage


DAMAGES = {
    **{f"flip at {place}": flip(place) for place in (0.0, 0.5, 1.0)},
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "extend": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "remove": Path.unlink,
}


def test_damage_to_any_file_is_found_and_named(saved, tmp_path):
    """The message begins with the file it is about; both ranks raise the same, and are in step
    afterwards."""
    paths, expected = [saved], []
    for name in FILES:
        for damage, inflict in DAMAGES.items():
            copy = Path(shutil.copytree(saved, tmp_path / f"{name} {damage}"))
            inflict(copy / name)
            message = message_of(verify_checkpoint, copy)
            assert message.startswith(f"{copy / name}: ")
            if name != SUMS:
                assert ("is missing" if damage == "remove" else "is damaged") in message
            paths.append(copy)
            expected.append(message)
    messages, read = zip(*run_processes(2, verify_all, [str(path) for path in paths]), strict=True)
    assert list(messages) == [expected, expected]
    assert sorted(read[0] + read[1]) == sorted(set(FILES) - {SUMS})
    assert [len(names) for names in read] == [2, 2]  # the files are shared out


def verify_all(rank: int, world_size: int, paths: list[str]) -> tuple[list[str], list[str]]:
    """The messages of damaged ones; which files this rank reads of an intact one."""
    messages = [message_of(verify_checkpoint, Path(path), dist.group.WORLD) for path in paths[1:]]
    seen = []

    def digest(file: Path) -> str:
        seen.append(file.name)
        return digest_on_disk(file)

    checkpoint_directory.digest_on_disk = digest
    verify_checkpoint(Path(paths[0]), dist.group.WORLD)
    return messages, seen


def test_any_bit_of_the_sums_is_guarded(copy):
    """Each byte of SHA256SUMS, also in its last line."""
    content = (copy / SUMS).read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 7
        (copy / SUMS).write_bytes(damaged)
        assert message_of(verify_checkpoint, copy).startswith(f"{copy / SUMS}: ")


def test_a_path_that_leads_nowhere_is_a_user_error(tmp_path):
    for read in (verify_checkpoint, read_facts, stored_shapes, lambda path: load_shards(path, {})):
        assert "No such file" in message_of(read, tmp_path / "step-000000001")


def test_sha256sum_itself_can_check(copy):
    command = ["sha256sum", "--strict", "--check", SUMS]
    assert subprocess.run(command, cwd=copy, capture_output=True).returncode == 0
    flip(0.5)(copy / "__1_0.distcp")
    checked = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert checked.returncode == 1 and "__1_0.distcp: FAILED" in checked.stdout


# --- malice -----------------------------------------------------------------------------------


class Evil:
    """Unpickled without care, it leaves a mark."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def evil_metadata(path: Path, mark: Path) -> list[bytes]:
    """Pickles that run something, bare or hidden in what DCP's own metadata would hold."""
    hidden = read_metadata(path)
    hidden.planner_data = Evil(os.mkdir, str(mark))
    named = read_metadata(path)
    named.state_dict_metadata["bank"].size = Evil(os.mkdir, str(mark))
    bare = [Evil(os.mkdir, str(mark)), Evil(eval, f"__import__('os').mkdir({str(mark)!r})")]
    # A name with dots, by way of a module of which some names are allowed.
    words = [b"torch", b"serialization.os.mkdir", str(mark).encode()]
    module, name, argument = (b"\x8c" + bytes([len(word)]) + word for word in words)
    dotted = b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R."
    return [*(pickle.dumps(each) for each in (hidden, named, *bare)), dotted]


def test_metadata_runs_nothing(copy, tmp_path):
    """It is refused by name, though its sums fit, and nothing has happened."""
    mark = tmp_path / "mark"
    for content in evil_metadata(copy, mark):
        pickle.loads(content)
        mark.rmdir()  # so it does work where there is no care
        (copy / ".metadata").write_bytes(content)
        reseal(copy)
        for read in (stored_shapes, lambda path: load_shards(path, sample_shards(1))):
            start = f"{copy / '.metadata'}: is not a readable checkpoint: it holds"
            assert message_of(read, copy).startswith(start)
        assert not mark.exists()


def load(rank: int, world_size: int, paths: list[str]) -> list[str]:
    group = dist.group.WORLD
    return [message_of(load_shards, Path(path), sample_shards(1), group) for path in paths]


def test_all_ranks_refuse_malice_and_damage(saved, copy, tmp_path):
    """Loading without verifying: metadata that cannot be read, data that is no tensor."""
    mark, other = tmp_path / "mark", Path(shutil.copytree(saved, tmp_path / "other"))
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(os.mkdir, str(mark))))
    (other / "__1_0.distcp").write_bytes(b"\0" * 9999)
    first, second = run_processes(2, load, [str(copy), str(other)])
    assert first == second and not mark.exists()
    assert ".metadata: is not a readable checkpoint: it holds posix.mkdir" in first[0]
    assert first[1].startswith(f"{other}: is not a readable checkpoint: ")


def test_tensor_files_run_nothing(copy, tmp_path):
    """torch's own careful reader refuses an archive with code in a tensor's place."""
    mark, metadata = tmp_path / "mark", read_metadata(copy)
    for place in metadata.storage_data.values():
        torch.save(Evil(os.mkdir, str(mark)), copy / place.relative_path)
        place.offset, place.length = 0, (copy / place.relative_path).stat().st_size
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(copy)
    with pytest.raises(UserError, match="is not a readable checkpoint: Weights only load failed"):
        load_shards(copy, sample_shards(1))
    assert not mark.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata, place: setattr(place, "relative_path", "../../__0_0.distcp"),
        lambda metadata, place: setattr(place, "relative_path", "/etc/passwd"),
        lambda metadata, place: setattr(place, "transform_descriptors", ["zstd"]),
        lambda metadata, place: setattr(metadata, "storage_data", None),
        lambda metadata, place: metadata.state_dict_metadata.update(bank=7),
        lambda metadata, place: metadata.state_dict_metadata["bank"].chunks.pop(),
        lambda metadata, place: metadata.state_dict_metadata["bank"].chunks.append(torch.Size([1])),
    ],
)
def test_metadata_that_is_not_sound_is_refused(copy, change):
    """Data outside the checkpoint, another kind than DCP writes, a tensor that is not complete."""
    metadata = read_metadata(copy)
    change(metadata, next(iter(metadata.storage_data.values())))
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ": is not a readable checkpoint: " in message_of(load_shards, copy, sample_shards(1))


def test_an_enum_as_python_3_11_2_pickles_it(copy, monkeypatch):
    """By getattr, of which no other use is accepted."""
    kind, shapes = metadata._MEM_FORMAT_ENCODING, stored_shapes(copy)
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
    content = pickle.dumps(read_metadata(copy))
    assert b"getattr" in content
    (copy / ".metadata").write_bytes(content)
    reseal(copy)
    assert stored_shapes(copy) == shapes
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(getattr, metadata.Metadata, "__init__")))
    reseal(copy)
    assert "it holds '__init__' of" in message_of(stored_shapes, copy)
