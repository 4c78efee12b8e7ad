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
from checkpoint_parts import message_of, sample_pieces
from gloo import run_processes

from lipnext_scale.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_pieces,
    read_facts,
    stored_shapes,
    verify_checkpoint,
)
from lipnext_scale.checkpoint.directory import SUMS, digest_on_disk, sums_of
from lipnext_scale.checkpoint.io import read_metadata
from lipnext_scale.errors import UserError

FILES = [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "facts.json"]


def save(rank: int, world_size: int, directory: str) -> None:
    writer = CheckpointWriter(Path(directory), 1, group=dist.group.WORLD)
    writer.save(1, sample_pieces(1, rank, world_size), {"x": 0.5}, asynchronous=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of two processes."""
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
    """What somebody does who means it: SHA256SUMS fits the files again."""
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


def cut_to(share: float) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        os.truncate(file, min(file.stat().st_size - 1, round(share * file.stat().st_size)))

    return damage


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


DAMAGES = {
    **{f"flip at {place}": flip(place) for place in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0)},
    **{f"cut to {share}": cut_to(share) for share in (0.0, 0.5, 1.0)},
    "extend": extend,
    "remove": Path.unlink,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_named(copy, name, damage):
    """Flipped, cut, extended, removed: the message begins with the file it is about."""
    DAMAGES[damage](copy / name)
    message = message_of(verify_checkpoint, copy)
    assert message.startswith(f"{copy / name}: ")
    if name != SUMS:
        assert ("is missing" if damage == "remove" else "is damaged") in message


def test_any_bit_of_the_sums_is_guarded(copy):
    """Each byte of SHA256SUMS, also in its last line, is found when it is another."""
    content = (copy / SUMS).read_bytes()
    assert content.count(b"\n") == len(FILES)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 7
        (copy / SUMS).write_bytes(damaged)
        assert message_of(verify_checkpoint, copy).startswith(f"{copy / SUMS}: ")
    (copy / SUMS).write_bytes(content)
    verify_checkpoint(copy)


@pytest.mark.parametrize("extra", ["__2_0.distcp", ".hidden", "directory"])
def test_what_does_not_belong_is_named(copy, extra):
    """Files and directories that SHA256SUMS does not know."""
    (copy / extra).mkdir() if extra == "directory" else (copy / extra).write_bytes(b"")
    assert message_of(verify_checkpoint, copy).startswith(f"{copy / extra}: does not belong")


def test_no_checkpoint_at_all_is_told(tmp_path):
    """A path that leads nowhere is a UserError of every function that reads."""
    for read in (verify_checkpoint, read_facts, stored_shapes):
        assert "No such file" in message_of(read, tmp_path / "step-000000001")
    assert "No such file" in message_of(load_pieces, tmp_path / "step-000000001", {})


def verify_all(rank: int, world_size: int, paths: list[str]) -> list[str]:
    messages = [message_of(verify_checkpoint, Path(path), dist.group.WORLD) for path in paths[1:]]
    verify_checkpoint(Path(paths[0]), dist.group.WORLD)
    return messages


def test_all_processes_are_told_of_damage(saved, tmp_path):
    """Whoever reads the damaged file: both ranks raise the same, and are together afterwards."""
    paths, expected = [saved], []
    for name in FILES:
        for damage in ("flip at 0.5", "cut to 1.0", "remove"):
            copy = Path(shutil.copytree(saved, tmp_path / f"{name} {damage}"))
            DAMAGES[damage](copy / name)
            paths.append(copy)
            expected.append(f"{copy / name}: ")
    first, second = run_processes(2, verify_all, [str(path) for path in paths])
    assert first == second
    for message, start in zip(first, expected, strict=True):
        assert message.startswith(start)


def test_the_files_are_shared_out_over_the_processes(saved):
    """Of two ranks each reads half of the files."""
    seen = run_processes(2, verify_and_count, str(saved))
    assert sorted(seen[0] + seen[1]) == sorted(set(FILES) - {SUMS})
    assert [len(names) for names in seen] == [2, 2]


def verify_and_count(rank: int, world_size: int, path: str) -> list[str]:
    from lipnext_scale.checkpoint import directory

    seen = []

    def digest(file: Path) -> str:
        seen.append(file.name)
        return digest_on_disk(file)

    directory.digest_on_disk = digest
    verify_checkpoint(Path(path), dist.group.WORLD)
    return seen


def test_sha256sum_itself_can_check(copy):
    """The file is in the format of the command, comment included; so it sees damage too."""
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
    hidden = []
    for place in ("planner_data", "storage_meta", "version"):
        metadata = read_metadata(path)
        setattr(metadata, place, Evil(os.mkdir, str(mark)))
        hidden.append(metadata)
    named = read_metadata(path)
    named.state_dict_metadata["bank"].size = Evil(os.mkdir, str(mark))
    program = f"__import__('os').mkdir({str(mark)!r})"
    bare = [Evil(os.mkdir, str(mark)), Evil(eval, program), Evil(exec, program)]
    # A name with dots, by way of a module of which some names are allowed.
    words = [b"torch", b"serialization.os.mkdir", str(mark).encode()]
    module, name, argument = (b"\x8c" + bytes([len(word)]) + word for word in words)
    dotted = b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R."
    return [*(pickle.dumps(each) for each in (*hidden, named, *bare)), dotted]


def test_metadata_runs_nothing(copy, tmp_path):
    """It is refused by name, though its sums fit, and nothing has happened."""
    mark = tmp_path / "mark"
    for content in evil_metadata(copy, mark):
        pickle.loads(content)
        mark.rmdir()  # so it does work where there is no care
        (copy / ".metadata").write_bytes(content)
        reseal(copy)
        for read in (stored_shapes, lambda path: load_pieces(path, sample_pieces(1))):
            message = message_of(read, copy)
            assert message.startswith(
                f"{copy / '.metadata'}: is not a readable checkpoint: it holds"
            )
        assert not mark.exists()


def load(rank: int, world_size: int, path: str) -> str:
    return message_of(load_pieces, Path(path), sample_pieces(1), dist.group.WORLD)


def test_malice_and_damage_are_told_by_all_processes(saved, copy, tmp_path):
    """Loading without verifying: metadata that cannot be read, data that is no tensor."""
    mark = tmp_path / "mark"
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(os.mkdir, str(mark))))
    first, second = run_processes(2, load, str(copy))
    assert (
        first == second and ".metadata: is not a readable checkpoint: it holds posix.mkdir" in first
    )
    assert not mark.exists()
    (copy / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    (copy / "__1_0.distcp").write_bytes(b"\0" * 9999)
    first, second = run_processes(2, load, str(copy))
    assert first == second and first.startswith(f"{copy}: is not a readable checkpoint: ")


def test_tensor_files_run_nothing(copy, tmp_path):
    """An archive with code in a tensor's place is refused by torch's own careful reader."""
    mark, metadata = tmp_path / "mark", read_metadata(copy)
    for place in metadata.storage_data.values():
        torch.save(Evil(os.mkdir, str(mark)), copy / place.relative_path)
        place.offset, place.length = 0, (copy / place.relative_path).stat().st_size
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(copy)
    with pytest.raises(UserError, match="is not a readable checkpoint: Weights only load failed"):
        load_pieces(copy, sample_pieces(1))
    assert not mark.exists()


def unsound(path: Path, change: Callable) -> None:
    metadata = read_metadata(path)
    change(metadata, next(iter(metadata.storage_data.values())))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata, place: setattr(place, "relative_path", "../../__0_0.distcp"),
        lambda metadata, place: setattr(place, "relative_path", "/etc/passwd"),
        lambda metadata, place: setattr(place, "offset", "0"),
        lambda metadata, place: setattr(place, "transform_descriptors", ["zstd"]),
        lambda metadata, place: setattr(metadata, "storage_data", None),
        lambda metadata, place: metadata.state_dict_metadata.update(bank=7),
        lambda metadata, place: setattr(metadata.state_dict_metadata["bank"], "size", (12, 5)),
        lambda metadata, place: metadata.state_dict_metadata["bank"].chunks.append(torch.Size([1])),
    ],
)
def test_metadata_that_is_not_sound_is_refused(copy, change):
    """Data outside the checkpoint, or of another kind than DCP writes."""
    unsound(copy, change)
    assert message_of(load_pieces, copy, sample_pieces(1)).startswith(f"{copy / '.metadata'}: ")


def test_a_tensor_that_is_not_all_there_is_refused(copy):
    """A description that lacks a part of a tensor would leave that part of a piece as it was."""
    unsound(copy, lambda metadata, place: metadata.state_dict_metadata["bank"].chunks.pop())
    message = message_of(load_pieces, copy, sample_pieces(1))
    assert message == f"{copy}: is not a readable checkpoint: bank is not stored as a whole"


# --- facts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b'{"format": 1}', "is not of a checkpoint of format 2"),
        (b'{"step": 1}', "is not of a checkpoint of format 2"),
        (b"[2]", "is not of a checkpoint of format 2"),
        (b'{"format": 2', "is not readable JSON"),
        (b"\xff\xfe\x00", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
    ],
)
def test_facts_of_another_kind_are_refused(copy, content, complaint):
    """Another format, or no JSON at all."""
    (copy / "facts.json").write_bytes(content)
    assert message_of(read_facts, copy).startswith(f"{copy / 'facts.json'}: {complaint}")


def test_facts_must_be_json(tmp_path):
    """No NaN, no objects, and not the writer's own keys."""
    writer = CheckpointWriter(tmp_path, 1)
    wrong = [
        ({"loss": float("nan")}, ValueError),
        ({"seed": torch.zeros(1)}, TypeError),
        ({"step": 3}, AssertionError),
    ]
    for facts, kind in wrong:
        with pytest.raises(kind):
            writer.save(1, {}, facts)
    assert latest_checkpoint(tmp_path) is None
