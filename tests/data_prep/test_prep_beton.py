"""FFCV files that others wrote: which fields are taken, and what damage is found."""

from pathlib import Path

import numpy as np
import pytest
from beton_making import failure, picture, with_ffcv
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.data.index import KINDS, beton_records
from lipnext_scale.errors import UserError

pytestmark = with_ffcv


class Pairs:
    """An indexed set of the given values."""

    def __init__(self, *values: tuple) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> tuple:
        return self.values[number]


def written_by_ffcv(path: Path, fields: dict, *values: tuple) -> Path:
    from ffcv.writer import DatasetWriter

    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Pairs(*values))
    return path


def test_fields_go_by_their_types(tmp_path):
    """Names and order of image and label are the writer's own choice."""
    from ffcv.fields import IntField, RGBImageField

    path = written_by_ffcv(
        tmp_path / "a.beton",
        {"y": IntField(), "x": RGBImageField()},
        *((-3 + i, picture(i, 10 + i, 20)) for i in range(4)),
    )
    records, content = beton_records(path), path.read_bytes()
    assert records["label"].tolist() == [-3, -2, -1, 0]
    for number, record in enumerate(records):
        image = picture(number, 10 + number, 20)
        assert (record["height"], record["width"], record["channels"]) == image.shape
        assert content[record["offset"] :][: record["size"]] == image.tobytes()


def test_other_fields_are_refused_by_name(tmp_path):
    """An array for an image, two numbers, a number that is no integer: none is guessed about."""
    from ffcv.fields import FloatField, IntField, NDArrayField, RGBImageField

    image = picture(0)
    array = NDArrayField(dtype=np.dtype("uint8"), shape=image.shape)
    for fields, values, said in (
        ({"image": array, "label": IntField()}, (image, 1), r"image \(NDArrayField\), label"),
        ({"image": RGBImageField(), "label": FloatField()}, (image, 1.0), r"label \(FloatField\)"),
        (
            {"image": RGBImageField(), "label": IntField(), "number": IntField()},
            (image, 1, 2),
            r"number \(IntField\); training reads files with one RGBImageField",
        ),
    ):
        with pytest.raises(UserError, match=f"a.beton: has the fields .*{said}"):
            beton_records(written_by_ffcv(tmp_path / "a.beton", fields, values))


def test_a_label_beyond_32_bits(tmp_path):
    """What the index cannot hold is refused, not cut off."""
    from ffcv.fields import IntField, RGBImageField

    fields = {"image": RGBImageField(), "label": IntField()}
    path = written_by_ffcv(tmp_path / "a.beton", fields, (picture(0), 1), (picture(1), 2**31))
    with pytest.raises(UserError, match="sample 1 has a class beyond 32 bits: 2147483648"):
        beton_records(path)


@pytest.fixture(scope="module")
def small_beton(tmp_path_factory) -> bytes:
    from ffcv.fields import IntField, RGBImageField

    path = tmp_path_factory.mktemp("small") / "a.beton"
    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    values = ((picture(i), i) for i in range(3))
    return written_by_ffcv(path, fields, *values).read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(small_beton, tmp_path_factory, data):
    """Whatever stands in header, fields and tables: records of this very file, or a UserError."""
    path = tmp_path_factory.getbasetemp() / "damaged.beton"
    content = bytearray(small_beton)
    header, table = 24 + 2 * 1044, 3 * 24  # with the fields; before and after come the samples
    places = st.one_of(
        st.integers(0, 40),
        st.integers(header - 1044, header + table),
        st.integers(len(content) - table, len(content) - 1),
    )
    for place in data.draw(st.lists(places, min_size=1, max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        records = beton_records(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert (records["offset"] + records["size"].astype(int) <= len(content)).all()
        assert set(records["kind"]) <= {KINDS["raw"], KINDS["jpeg"]}


def test_a_file_cut_anywhere_is_refused(small_beton, tmp_path):
    """Also within its last page, where only the table shows it."""
    path = tmp_path / "cut.beton"
    size = len(small_beton)
    for kept in (0, 1, 30, 1000, size // 2, size - 73, size - 72, size - 30, size - 24, size - 1):
        path.write_bytes(small_beton[:kept])
        with pytest.raises(UserError, match="cut.beton: is "):
            beton_records(path)


def test_a_file_that_is_not_there(tmp_path, capsys):
    """Said in one line by --index too."""
    with pytest.raises(UserError, match="no.beton: cannot be read: No such file"):
        beton_records(tmp_path / "no.beton")
    assert "no.beton: cannot be read" in failure(capsys, "--index", f"{tmp_path}/no.beton")
