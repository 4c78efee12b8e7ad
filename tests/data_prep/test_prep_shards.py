"""Tars to the byte as tarfile writes them, and keys that no name can break."""

import gzip
import io
import re
import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prep_sources import tar_of
from webdataset.tariterators import base_plus_ext

from data_prep.writing.shards import TarWriter, sample_key, write_shard

names = st.text(max_size=400) | st.text(st.sampled_from("./\\ab\x00_~"), max_size=20)


@given(names, st.integers(1, 10**8), st.data())
@example("../../x", 10, None)
@example("/etc/passwd", 10, None)
@example("a.b.c.JPEG", 10, None)
@example("犬/猫.png", 10, None)
@example("x" * 300 + ".png", 10, None)
@example("\udcff\n\x1b[31m.png", 10, None)
def test_keys_are_safe_and_different(name, count, data):
    """Letters, digits, _ and - alone; short; and of another number always another."""
    number = data.draw(st.integers(0, count - 1)) if data else count - 1
    key = sample_key(number, count, name)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,95}", key)
    assert base_plus_ext(f"{key}.jpg") == (key, "jpg")
    assert int(key.split("_")[0]) == number
    assert key.split("_")[0] == f"{number:0{max(6, len(str(count - 1)))}d}"


def test_keys_tell_their_origin():
    """The name without its folder and suffix stays readable."""
    assert sample_key(7, 10, "n01/n01_12.JPEG") == "000007_n01_12"
    assert sample_key(7, 10_000_001, "a b.png") == "00000007_a_b"
    assert sample_key(7, 10, "犬.png") == "000007"


@given(st.lists(st.binary(max_size=1500), max_size=5))
def test_tars_are_those_of_tarfile(files):
    """The same bytes, so any reader of tars takes them; every place is where the content is."""
    members = {f"{i:06d}.png": content for i, content in enumerate(files)}
    buffer = io.BytesIO()
    tar = TarWriter(buffer)
    places = [tar.add(name, content) for name, content in members.items()]
    tar.end()
    written = buffer.getvalue()
    assert written == tar_of(members) and len(written) == tar.bytes
    for place, content in zip(places, files, strict=True):
        assert written[place : place + len(content)] == content


def test_names_beyond_a_header_are_refused():
    """USTAR has 100 bytes for a name: longer ones raise rather than being cut."""
    with pytest.raises(ValueError):
        TarWriter(io.BytesIO()).add("x" * 101, b"")


def test_a_compressed_shard(tmp_path):
    """The digits' form: a tar.gz whose members are the samples, label before image."""
    write_shard(tmp_path / "new" / "a.tar.gz", [("a", b"one", 1), ("b", b"two", 2)])
    packed = (tmp_path / "new" / "a.tar.gz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed))) as tar:
        found = [(entry.name, tar.extractfile(entry).read()) for entry in tar]
    assert found == [("a.cls", b"1"), ("a.png", b"one"), ("b.cls", b"2"), ("b.png", b"two")]
