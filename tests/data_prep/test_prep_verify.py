"""data_prep.verify: every fault is named, and nothing that is sound."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prep_sources import (
    encoded,
    flip,
    is_refused,
    noise,
    run_command,
    succeeds,
    write_shards,
    write_tar,
)

from data_prep import index
from data_prep.verify import main
from lipnext_scale.data.index import map_records, scan_tar

pytestmark = pytest.mark.slow  # all of them together take half a minute

LABELS = [[0, 1, 2], [1, 1], [2, 0]]


@pytest.fixture
def shards(tmp_path):
    """A sound set of three shards with its index."""
    paths = write_shards(tmp_path, LABELS)
    succeeds(index.main, f"{tmp_path}/train-*.tar")
    return paths


def faults(*arguments) -> list[str]:
    """The faults that a command names before it ends with exit code 1."""
    outcome = run_command(main, *arguments)
    lines = [line for line in outcome.out.splitlines() if line.startswith("fault: ")]
    number = f"{len(lines)} fault{'s' if len(lines) > 1 else ''} in "
    assert outcome.code == 1 and outcome.err.startswith(f"failed: {number}"), outcome
    assert outcome.err.count("\n") == 1
    return lines


@pytest.mark.parametrize("named", ["", "/train.index.json", "/train-*.tar"])
def test_a_sound_set(tmp_path, shards, named):
    """However it is named: exit code 0 and one line, with how much was checked."""
    size = sum(path.stat().st_size for path in shards)
    sound = f"sound: 3 shards, 7 samples, {size:,} bytes"
    assert succeeds(main, f"{tmp_path}{named}", "--workers", 1) == f"{sound}\n"
    assert succeeds(main, f"{tmp_path}{named}", "--decode") == f"{sound}, every image decoded\n"


def test_missing_cut_and_changed_shards_are_each_named(tmp_path, shards):
    """Three faults of three kinds at once: none hides another."""
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:1536])
    flip(shards[2], int(scan_tar(shards[2])[0][1]["offset"]) + 60)
    found = faults(tmp_path)
    assert f"fault: {shards[0]}: is missing" in found
    cut = [line for line in found if line.startswith(f"fault: {shards[1]}: ")]
    assert any("has 1536 bytes, the index says 10240: it is cut off" in line for line in cut)
    assert any("is not a readable shard" in line for line in cut)
    changed = [line for line in found if line.startswith(f"fault: {shards[2]}: ")]
    assert changed == [
        f"fault: {shards[2]}: its sha256 is not that of the index: bytes have changed"
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_bit_anywhere_is_noticed(tmp_path_factory, data):
    """In any byte of any file of the set: verify fails, and names that file or the index."""
    whole = tmp_path_factory.getbasetemp() / "whole"
    if not whole.exists():
        whole.mkdir()
        write_shards(whole, LABELS[:2])
        index.main([f"{whole}/train-*.tar"])
    copy = tmp_path_factory.mktemp("flipped")
    shutil.copytree(whole, copy, dirs_exist_ok=True)
    path = data.draw(st.sampled_from(sorted(p for p in copy.iterdir() if p.suffix != ".json")))
    flip(
        path, data.draw(st.integers(0, path.stat().st_size - 1)), 1 << data.draw(st.integers(0, 7))
    )
    with pytest.raises(SystemExit) as ended:
        main([str(copy)])
    assert ended.value.code == 1


def test_a_jpeg_that_was_cut_inside_is_named(tmp_path):
    """Sound as a tar, and with the right sha256: only decoding shows it."""
    image = encoded(noise(32, 32, 3), "JPEG")
    broken = image[: len(image) // 2]
    members = [("a.cls", b"0"), ("a.jpg", image), ("b.cls", b"0"), ("b.jpg", broken)]
    path = write_tar(tmp_path / "x.tar", members)
    index.main([str(path)])
    main([str(tmp_path)])
    [fault] = faults(tmp_path, "--decode")
    assert fault.startswith(f"fault: {path}: sample b is a damaged JPEG")


def test_a_changed_label_is_named(tmp_path, shards):
    """The tar's own labels are compared with the records, whatever the sha256 says."""
    content = shards[0].read_bytes()
    flip(shards[0], content.index(b"s0_2.cls") + 512)  # the class 2 becomes 3
    wrong = "sample s0_2 has another place, size or label than the index says"
    assert f"fault: {shards[0]}: {wrong}" in faults(tmp_path)
    with shards[1].open("ab") as file:
        file.write(bytes(512))
    assert "has 10752 bytes, the index says 10240: it has grown" in faults(shards[1])[0]


@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_damaged_records(tmp_path, shards, how):
    """The index.npy has its own sha256; without it the shards are still looked at."""
    records = tmp_path / "train.index.npy"
    if how == "changed":
        flip(records, records.stat().st_size - 24 + 12)
    elif how == "cut":
        records.write_bytes(records.read_bytes()[:-30])
    else:
        records.unlink()
    flip(shards[1], 600)
    first, second, *others = faults(tmp_path)
    assert first.startswith(f"fault: {records}: ") and second.startswith(f"fault: {shards[1]}: ")
    assert not others


@pytest.mark.parametrize("content", [b"", b"[]", b'{"shards": 3}', b"[" * 99999])
def test_an_index_that_is_none(tmp_path, shards, content):
    """Damage of the index is a fault as any other, and the other sets are still checked."""
    (tmp_path / "other").mkdir()
    [other] = write_shards(tmp_path / "other", [[0]])
    index.main([str(other)])
    other.unlink()
    (tmp_path / "train.index.json").write_bytes(content)
    first, second = faults(tmp_path, tmp_path / "other")
    assert first.startswith(f"fault: {tmp_path}/train.index.json: is not an index of shards")
    assert second == f"fault: {other}: is missing"


def test_shards_that_the_index_does_not_know(tmp_path, shards):
    """In the directory, as an older conversion leaves them, a warning; named by the user, a fault.
    Of a set only the shards that were asked for are checked."""
    extra = tmp_path / "train-000007.tar"
    shutil.copy(shards[0], extra)
    lines = succeeds(main, tmp_path).splitlines()
    assert lines[0].startswith(f"warning: {extra}: is not in {tmp_path}/train.index.json")
    assert lines[-1].startswith("sound: 3 shards")
    shards[0].unlink()
    assert succeeds(main, shards[1], shards[2]).startswith("sound: 2 shards, 4 samples")
    assert faults(extra, shards[1]) == [f"fault: {extra}: is not in {tmp_path}/train.index.json"]


def test_shards_without_an_index(tmp_path):
    """They are checked on their own, with a warning; of many faults twenty are named."""
    paths = write_shards(tmp_path, LABELS)
    printed = succeeds(main, tmp_path, "--decode")
    assert printed.startswith(f"warning: {tmp_path}/train: has no index")
    assert "sound: 3 shards, 7 samples" in printed
    flip(paths[1], int(scan_tar(paths[1])[0][0]["offset"]) + 40)
    [fault] = faults(tmp_path, "--decode")
    assert fault.startswith(f"fault: {paths[1]}: sample s1_0 is a damaged PNG")
    members = [(f"k{i}.{s}", c) for i in range(30) for s, c in (("cls", b"0"), ("png", b"none"))]
    found = faults(write_tar(tmp_path / "a.tar", members), "--decode")
    assert len(found) == 21 and "sample k0 is neither a JPEG nor a PNG" in found[0]
    assert "10 more of its samples have such faults" in found[-1]


def test_a_size_that_is_not_the_records(tmp_path, shards):
    """Decoded images are compared with the height and width of the index."""
    records = tmp_path / "train.index.npy"
    changed = np.array(map_records(records, len(np.load(records))))
    changed["height"][3] = 9
    np.save(records, changed)
    path, digest = tmp_path / "train.index.json", index.file_sha256(records)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"records": digest}))
    succeeds(main, tmp_path)
    [fault] = faults(tmp_path, "--decode")
    assert fault == f"fault: {shards[1]}: sample s1_0 is 8×9, the index says 9×9"


def test_wrong_arguments(tmp_path):
    """What is not there was not damaged: exit code 2."""
    assert "there is no such index" in is_refused(main, tmp_path / "no.index.json")
    assert "no shard" in is_refused(main, tmp_path / "none.tar")
    assert "holds neither an index" in is_refused(main, tmp_path)
    assert "is not on this machine" in is_refused(main, "pipe:cat a.tar")
    (tmp_path / "a.beton").write_bytes(b"")
    assert "data_prep.ffcv --index" in is_refused(main, tmp_path)
