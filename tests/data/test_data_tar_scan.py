"""Scanning foreign tars: WebDataset's samples without reading an image; damage is told by name."""

import io
import os
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_making import encode, noise, tar_bytes, write_tar
from webdataset.tariterators import tarfile_samples

from lipnext_scale.data.index import KINDS, RECORD, Record, sample_key, scan_tar
from lipnext_scale.errors import UserError

IMAGE = encode(noise(4, 4))


def sample(key: str, image: bytes = IMAGE, label: object = 0, kind: str = "png") -> list:
    return [(f"{key}.cls", str(label).encode()), (f"{key}.{kind}", image)]


def records_of(path: str | Path) -> list[Record]:
    return [Record(*record.item()) for record in scan_tar(path)[0]]


def images_of(path: str | Path) -> list[tuple[bytes, int]]:
    """(image, label) at the places that the scan found."""
    content = Path(path).read_bytes()
    records, size = scan_tar(path)
    assert records.dtype == RECORD and size == len(content)
    return [
        (content[r["offset"] :][: r["size"]], int(r["label"])) for r in records
    ]  # slices of exactly these bytes


def by_webdataset(path: str | Path) -> list[tuple[bytes, int]]:
    """The same by WebDataset's own reader."""
    found = []
    for values in tarfile_samples([{"url": str(path)}]):
        image = next(values[kind] for kind in ("png", "jpg", "jpeg") if kind in values)
        found.append((image, int(values["cls"])))
    return found


def odd_tar(path: Path, names: list[str], format: int = tarfile.GNU_FORMAT) -> Path:
    """A tar in which each name has a .cls of its number and a .png of noise."""
    with tarfile.open(path, "w", format=format) as tar:
        for number, name in enumerate(names):
            for suffix, content in (
                ("cls", b"%d" % number),
                ("png", encode(noise(4, 4, seed=number))),
            ):
                entry = tarfile.TarInfo(f"{name}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return path


# --- what is found ----------------------------------------------------------------------------


def test_kinds_follow_the_suffix_and_sizes_are_not_known(tmp_path):
    """jpg, jpeg and png in any case; heights, widths and channels are 0, for nothing is decoded."""
    kinds = ["png", "PNG", "jpg", "JPG", "jpeg", "JPEG"]
    members = [m for i, k in enumerate(kinds) for m in sample(f"k{i}", b"not an image", 5 - i, k)]
    records, _ = scan_tar(write_tar(tmp_path / "a.tar", members))
    assert records["kind"].tolist() == [KINDS["png"]] * 2 + [KINDS["jpeg"]] * 4
    assert records["label"].tolist() == [5, 4, 3, 2, 1, 0]
    assert not any(records[field].any() for field in ("height", "width", "channels", "reserved"))


@settings(max_examples=100, deadline=None)
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
        members += data.draw(
            st.lists(
                st.sampled_from([("README", b"hi"), ("__meta__/a.png", b""), ("._k.png", b"")])
            )
        )
    path = write_tar(tmp_path_factory.getbasetemp() / "drawn.tar", members)
    assert images_of(path) == by_webdataset(path)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names(tmp_path, format):
    """Names beyond 100 bytes or ASCII in GNU, pax and ustar headers are read as WebDataset does."""
    names = ["d/" * 60 + "a", "short", "e/" * 80 + "b"]
    if format != tarfile.USTAR_FORMAT:
        names += ["ü" * 30, "f" * 300]
    path = odd_tar(tmp_path / "a.tar", names, format)
    expected = [(encode(noise(4, 4, seed=i)), i) for i in range(len(names))]
    assert images_of(path) == expected == by_webdataset(path)


def test_links_and_directories_are_no_samples(tmp_path):
    """Only regular files count, whatever the others are called; a link is not followed."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo("link.png")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
        for name, content in sample("a", label=4):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    assert images_of(path) == [(IMAGE, 4)]


def test_a_key_that_comes_again_is_a_new_sample(tmp_path):
    """As in WebDataset, which looks at neighbours only: two samples of the key a, one of b."""
    members = sample("a", label=1) + sample("b", label=2) + sample("a", label=3)
    path = write_tar(tmp_path / "a.tar", members)
    assert [label for _, label in images_of(path)] == [1, 2, 3]
    assert [sample_key(path, record) for record in records_of(path)] == ["a", "b", "a"]


def test_an_empty_tar_has_no_samples(tmp_path):
    """Zero records of the right type, not an error: another shard may have samples."""
    records, size = scan_tar(write_tar(tmp_path / "a.tar", []))
    assert records.dtype == RECORD and records.shape == (0,) and size == 10240


@pytest.mark.parametrize("text", ["7", " 7\n", "007", "+7"])
def test_spellings_of_a_class(tmp_path, text):
    """What int() takes is a class, as for shards read into memory."""
    path = write_tar(tmp_path / "a.tar", sample("a", label=text))
    assert scan_tar(path)[0]["label"].tolist() == [7]


class MakesDirectory:
    """Unpickled, it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_is_unpickled_or_extracted(tmp_path, monkeypatch):
    """Pickles and members that point out of the directory leave no trace."""
    monkeypatch.chdir(tmp_path)
    code = pickle.dumps(MakesDirectory(str(tmp_path / "made")))
    members = [(f"a.{suffix}", code) for suffix in ("pyd", "pkl", "pth")]
    members += sample("a") + sample("../../b") + sample("/c")
    assert len(scan_tar(write_tar(tmp_path / "a.tar", members))[0]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


# --- what is refused --------------------------------------------------------------------------

BROKEN = {
    "no label": ([("bad.png", IMAGE)], "needs a .cls and an image"),
    "no image": ([("bad.cls", b"1")], "needs a .cls and an image"),
    "no known image": (sample("bad", kind="webp"), "needs a .cls and an image"),
    "split": ([sample("bad")[0], *sample("x"), sample("bad")[1]], "needs a .cls and an image"),
    "label is no number": (sample("bad", label="cat"), "cannot be decoded: .*'cat'"),
    "label is a fraction": (sample("bad", label="1.5"), "cannot be decoded"),
    "label is empty": (sample("bad", label=""), "cannot be decoded"),
    "label is binary": ([("bad.cls", b"\x80\x04"), ("bad.png", IMAGE)], "cannot be decoded"),
    "label is long": (sample("bad", label="1" * 10_000), "cannot be decoded"),
    "label too large": (sample("bad", label=2**31), "beyond 32 bits"),
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


def test_names_of_any_bytes_can_be_told(tmp_path):
    """A key with a line's end and bytes that are no text stays one line that can be printed."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("\udcff\nkey.png", IMAGE)]))
    with pytest.raises(UserError) as error:
        scan_tar(path)
    assert str(error.value).isprintable() and "key" in str(error.value)


def test_a_file_given_twice_in_a_sample(tmp_path):
    """Two labels for one key are no choice to make silently: WebDataset's error."""
    path = write_tar(tmp_path / "a.tar", [("a.cls", b"1"), *sample("a")])
    with pytest.raises(UserError, match="a.tar: is not a readable shard: .*duplicate"):
        scan_tar(path)


def test_a_sparse_image_is_refused(tmp_path):
    """Its bytes are not those that lie in the tar."""
    header = bytearray(tar_bytes(sample("a")))
    start = header.index(b"a.png")
    block = tarfile.TarInfo.frombuf(bytes(header[start : start + 512]), "utf-8", "strict")
    block.type = tarfile.GNUTYPE_SPARSE
    header[start : start + 512] = block.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(header)
    with pytest.raises(UserError, match="a.tar: sample a has a sparse member"):
        scan_tar(tmp_path / "a.tar")


# --- shards that are not whole ----------------------------------------------------------------

WHOLE = tar_bytes([m for i in range(4) for m in sample(f"k{i}", encode(noise(6, 6, seed=i)), i)])


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_a_shard_cut_anywhere_is_refused_or_whole(tmp_path_factory, cut):
    """No cut loses samples silently: tarfile alone takes one between two files for the end."""
    path = tmp_path_factory.getbasetemp() / "cut.tar"
    path.write_bytes(WHOLE[:cut])
    try:
        records, _ = scan_tar(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: is not a readable shard: ")
        assert "\n" not in str(error)
    else:
        assert records["label"].tolist() == [0, 1, 2, 3]
        assert not any(WHOLE[cut:])  # only of the padding at the end


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    mend=st.booleans(),
)
def test_damage_never_crashes_or_hangs(tmp_path_factory, changes, mend):
    """Whatever bytes a tar has, even with checksums put right, the records lie within it."""
    content = bytearray(WHOLE)
    for place, value in changes:
        content[place] = value
    if mend:
        for start in range(0, len(content), 512):
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


@pytest.mark.parametrize("start", range(0, 512 * 12, 512))
def test_a_changed_header_is_noticed(tmp_path, start):
    """One bit anywhere in a header or the first empty blocks: refused, not taken for the end."""
    members = [m for i in range(2) for m in sample(f"k{i}", b"", i)]  # headers and labels only
    content = bytearray(tar_bytes(members))
    content[start + 20] ^= 4
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    labels = (512, 512 * 4)  # k0.cls and k1.cls, past whose text the bytes are padding
    if start in labels:
        assert scan_tar(path)[0]["label"].tolist() == [0, 1]
    else:
        with pytest.raises(UserError, match="a.tar: is not a readable shard: "):
            scan_tar(path)


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


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    """A long name of 2 GiB, in a sparse file that has them, is refused before it is in memory."""
    entry = tarfile.TarInfo("././@LongLink")
    entry.type, entry.size = tarfile.GNUTYPE_LONGNAME, 2**31
    path = tmp_path / "a.tar"
    path.write_bytes(entry.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 2**31 + 4096)
    with pytest.raises(
        UserError, match="is not a readable shard: a header claims to be 2147483648"
    ):
        scan_tar(path)


def test_two_tars_joined_are_refused(tmp_path):
    """Readers stop at the first end; the samples after it would be lost silently."""
    path = tmp_path / "a.tar"
    path.write_bytes(WHOLE + WHOLE)
    with pytest.raises(UserError, match="is not a readable shard: there is more after its end"):
        scan_tar(path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty file"),
        (b"hello", "truncated header"),
        (bytes(range(256)) * 8, "bad checksum|invalid header"),
        (b"\x1f\x8b" + bytes(600), "compressed by gzip; unpack it"),
    ],
)
def test_what_is_no_tar(tmp_path, content, message):
    """Any other file is named, and a compressed tar with what to do."""
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"a.tar: is not a readable shard: .*({message})"):
        scan_tar(path)


def test_a_file_that_is_not_there(tmp_path):
    """Or a directory: told with the system's reason."""
    for path in (tmp_path / "none.tar", tmp_path):
        with pytest.raises(UserError, match=f"{path}: cannot be read: "):
            scan_tar(path)


# --- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_keys_by_the_header_before_the_image(tmp_path, format):
    """The key up to the first dot of the file name; where the header lacks it, the byte."""
    names = ["a", "dir.v2/b", "f" * 90]
    if format != tarfile.USTAR_FORMAT:
        names += ["g" * 200, "ü"]
    path = odd_tar(tmp_path / "a.tar", names, format)
    records = records_of(path)
    keys = [sample_key(path, record) for record in records]
    assert keys[:3] == ["a", "dir.v2/b", "f" * 90]
    if format != tarfile.USTAR_FORMAT:
        assert keys[3] == f"at byte {records[3].offset}"
        assert keys[4] in ("ü", f"at byte {records[4].offset}")


def test_keys_of_places_that_have_no_header(tmp_path):
    """A byte number is always told: at the file's start, past its end, in an image, no file."""
    path = write_tar(tmp_path / "a.tar", sample("a"))
    for offset in (0, 100, 513, 10**9):
        record = Record(offset, 10, 0, 0, 0, 0, 2, 0)
        assert sample_key(path, record) == f"at byte {offset}"
        assert sample_key(tmp_path / "none.tar", record) == f"at byte {offset}"
