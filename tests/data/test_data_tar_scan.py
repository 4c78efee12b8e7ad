"""Scanning tars without an index: WebDataset's samples; damage is refused by name."""

import os
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import Runs, encode, noise, sample, tar_bytes, write_tar
from webdataset.tariterators import tarfile_samples

from lipnext_scale.data.index import KINDS, RECORD, Record, sample_key, scan_tar
from lipnext_scale.utils.errors import UserError

IMAGE = sample("a")[1][1]
every_format = pytest.mark.parametrize(
    "format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]
)


def records_of(path: str | Path) -> list[Record]:
    return [Record(*record.item()) for record in scan_tar(path)[0]]


def images_of(path: str | Path) -> list[tuple[bytes, int]]:
    """(image, label) at the places that the scan found."""
    content = Path(path).read_bytes()
    records, size = scan_tar(path)
    assert records.dtype == RECORD and size == len(content)
    return [(content[r["offset"] :][: r["size"]], int(r["label"])) for r in records]


def by_webdataset(path: str | Path) -> list[tuple[bytes, int]]:
    """The same by WebDataset's own reader."""
    found = []
    for values in tarfile_samples([{"url": str(path)}]):
        image = next(values[kind] for kind in ("png", "jpg", "jpeg") if kind in values)
        found.append((image, int(values["cls"])))
    return found


# --- what is found ----------------------------------------------------------------------------


def test_kinds_follow_the_suffix_and_sizes_are_not_known(tmp_path):
    """jpg, jpeg and png in any case; heights, widths and channels are 0, for nothing is decoded."""
    kinds = ["png", "PNG", "jpg", "JPG", "jpeg", "JPEG"]
    members = [m for i, k in enumerate(kinds) for m in sample(f"k{i}", b"not an image", 5 - i, k)]
    records, _ = scan_tar(write_tar(tmp_path / "a.tar", members))
    assert records["kind"].tolist() == [KINDS["png"]] * 2 + [KINDS["jpeg"]] * 4
    assert records["label"].tolist() == [5, 4, 3, 2, 1, 0]
    assert not any(records[field].any() for field in ("height", "width", "channels", "reserved"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_samples_are_those_of_webdataset(tmp_path_factory, data):
    """Directories with dots, other members, WebDataset's own, any order in a sample."""
    members = []
    for i in range(data.draw(st.integers(0, 5))):
        key = data.draw(st.sampled_from(["", "./", "x/", "dir.v2/", "__a/"])) + f"k{i}"
        own = sample(key, noise(i + 1).tobytes(), data.draw(st.integers(-(2**31), 2**31 - 1)))
        others = st.sampled_from(["json", "txt", "seg.png", "cls.pyd", "jpg.txt", "pickle"])
        own += [(f"{key}.{suffix}", b"x" * 700) for suffix in data.draw(st.sets(others))]
        members += data.draw(st.permutations(own))
        strange = st.sampled_from([("README", b"hi"), ("__meta__/a.png", b""), ("._k.png", b"")])
        members += data.draw(st.lists(strange))
    path = write_tar(tmp_path_factory.getbasetemp() / "drawn.tar", members)
    assert images_of(path) == by_webdataset(path)


@every_format
def test_long_and_foreign_names(tmp_path, format):
    """Names beyond 100 bytes or ASCII in GNU, pax and ustar headers are read as WebDataset does.
    Keys are those of the header before the image; where it lacks the name, the byte."""
    names = ["dir.v2/a", "short", "f" * 90, "d/" * 60 + "a"]
    if format != tarfile.USTAR_FORMAT:
        names += ["g" * 200, "ü" * 30]
    expected = [(encode(noise(4, 4, seed=i)), i) for i in range(len(names))]
    members = [m for name, one in zip(names, expected, strict=True) for m in sample(name, *one)]
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(members, format))
    assert images_of(path) == expected == by_webdataset(path)
    records = records_of(path)
    keys = [sample_key(path, record) for record in records]
    assert keys[:3] == ["dir.v2/a", "short", "f" * 90]
    for key, record, name in list(zip(keys, records, names, strict=True))[3:]:
        assert key in (name, f"at byte {record.offset}")


def test_links_and_directories_are_no_samples(tmp_path):
    """Only regular files count, whatever the others are called; a link is not followed."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo("link.png")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    links = path.read_bytes()[: 4 * tarfile.BLOCKSIZE]
    path.write_bytes(links + tar_bytes(sample("a", label=4)))
    assert images_of(path) == [(IMAGE, 4)]


def test_a_key_that_comes_again_is_a_new_sample(tmp_path):
    """As in WebDataset, which looks at neighbours only. Classes are what int() takes."""
    members = sample("a", label="007") + sample("b", label=" 2\n") + sample("a", label="+3")
    path = write_tar(tmp_path / "a.tar", members)
    assert [label for _, label in images_of(path)] == [7, 2, 3]
    assert [sample_key(path, record) for record in records_of(path)] == ["a", "b", "a"]
    empty, size = scan_tar(write_tar(tmp_path / "b.tar", []))
    assert empty.dtype == RECORD and empty.shape == (0,) and size == 10240


def test_nothing_is_unpickled_or_extracted(tmp_path, monkeypatch):
    """Pickles and members that point out of the directory leave no trace; as a label a pickle is
    refused."""
    monkeypatch.chdir(tmp_path)
    code = pickle.dumps(Runs(os.mkdir, (str(tmp_path / "made"),)))
    members = [(f"a.{suffix}", code) for suffix in ("pyd", "pkl", "pth", "npy", "cls.pyd")]
    members += sample("a") + sample("../../b") + sample("/c")
    assert len(scan_tar(write_tar(tmp_path / "a.tar", members))[0]) == 3
    with pytest.raises(UserError, match="a.tar: sample a cannot be decoded"):
        scan_tar(write_tar(tmp_path / "a.tar", [("a.cls", code), ("a.png", IMAGE)]))
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


# --- what is refused --------------------------------------------------------------------------

BROKEN = {
    "no label": ([("bad.png", IMAGE)], "needs a .cls and an image"),
    "no known image": (sample("bad", kind="webp"), "needs a .cls and an image"),
    "split": ([sample("bad")[0], *sample("x"), sample("bad")[1]], "needs a .cls and an image"),
    "label is no number": (sample("bad", label="cat"), "cannot be decoded: .*'cat'"),
    "label is empty": (sample("bad", label=""), "cannot be decoded"),
    "label is binary": ([("bad.cls", b"\x80\x04"), ("bad.png", IMAGE)], "cannot be decoded"),
    "label is long": (sample("bad", label="1" * 10_000), "beyond 32 bits"),
    "label too small": (sample("bad", label=-(2**31) - 1), "beyond 32 bits"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sample_is_named(tmp_path, name):
    """The error names the shard, the sample's key and what is wrong, in one line."""
    members, message = BROKEN[name]
    path = write_tar(tmp_path / "two.tar", sample("good") + members)
    with pytest.raises(UserError, match=f"two.tar: sample bad .*{message}") as error:
        scan_tar(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_names_of_any_bytes_can_be_printed(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("\udcff\nkey.png", IMAGE)]))
    with pytest.raises(UserError) as error:
        scan_tar(path)
    assert str(error.value).isprintable() and "key" in str(error.value)


INTACT = tar_bytes([m for i in range(4) for m in sample(f"k{i}", encode(noise(6, 6, seed=i)), i)])


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, len(INTACT) - 1))
def test_a_shard_cut_anywhere_is_refused_or_intact(tmp_path_factory, cut):
    """No cut loses samples silently: tarfile alone takes one between two files for the end."""
    path = tmp_path_factory.getbasetemp() / "cut.tar"
    path.write_bytes(INTACT[:cut])
    try:
        records, _ = scan_tar(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: is not a readable shard: ")
        assert "\n" not in str(error)
    else:
        assert records["label"].tolist() == [0, 1, 2, 3]
        assert not any(INTACT[cut:])  # only of the padding at the end


places = st.tuples(st.integers(0, len(INTACT) - 1), st.integers(0, 255))


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(places, min_size=1, max_size=6), right_sums=st.booleans())
def test_damage_never_crashes_or_hangs(tmp_path_factory, changes, right_sums):
    """Whatever bytes a tar has, even with checksums put right, the records lie within it."""
    content = bytearray(INTACT)
    for place, value in changes:
        content[place] = value
    for start in range(0, len(content), 512) if right_sums else ():
        block = content[start : start + 512]
        if b"ustar" in block:
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            content[start + 148 : start + 156] = b"%06o\0 " % total
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    path.write_bytes(content)
    try:
        records, size = scan_tar(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert (records["offset"] + records["size"] <= size).all()


def test_a_header_that_claims_a_negative_size(tmp_path):
    """It would send tarfile back to the same header for ever."""
    entry = tarfile.TarInfo("a.png")
    block = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (-1024).to_bytes(12, "big", signed=True)
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(sample("k"))[: 512 * 4] + block + bytes(1024))
    with pytest.raises(UserError, match="is not a readable shard: the header at byte 2048"):
        scan_tar(path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty file"),
        (bytes(range(256)) * 8, "bad checksum|invalid header"),
        (b"\x1f\x8b" + bytes(600), "compressed; unpack it"),
        (INTACT + INTACT, "there is more after its end"),
        (tar_bytes([("a.cls", b"1"), *sample("a")]), "duplicate"),
    ],
)
def test_what_is_no_shard(tmp_path, content, message):
    """Any other file is named; two tars joined, or two labels of one key, are not guessed about."""
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"a.tar: is not a readable shard: .*({message})"):
        scan_tar(path)
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read: "):
        scan_tar(tmp_path)
