"""Small sources of generated images, and what must come out of them."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from foreign_shards import encode, fails, noise
from PIL import Image

from data_prep.edm import main
from lipnext_scale.data.index import Record, index_paths, map_records, read_index, sample_key

N = 12
PIXELS = noise(N, 6, 5, 3)
LABELS = [i * 7 % 5 for i in range(N)]


def converted(out: Path, name: str = "train") -> dict[str, tuple[np.ndarray, int]]:
    """Key → (pixels, label) of every sample, by the index."""
    index = read_index(index_paths(out, name)[0])
    records = iter(map_records(index_paths(out, name)[1], index.samples))
    found = {}
    for entry in index.shards:
        content = (out / entry.file).read_bytes()
        for _ in range(entry.samples):
            record = Record(*next(records).item())
            image = Image.open(io.BytesIO(content[record.offset :][: record.size]))
            key = sample_key(out / entry.file, record)
            found[key] = (np.asarray(image), record.label)
    return found


def require_exact(out: Path, pixels=PIXELS, labels=LABELS, name: str = "train") -> None:
    """All samples are there, in some order, with the pixels and labels of their number."""
    found = converted(out, name)
    assert len(found) == len(pixels)
    for key, (image, label) in found.items():
        number = int(key.split("_")[0])
        assert np.array_equal(image, pixels[number]) and label == labels[number], key


def run(source: Path, out: Path, *options: object) -> None:
    arguments = ["--source", source, "--out", out, "--workers", 0, *options]
    main([str(argument) for argument in arguments])


def refused(source: Path, capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """The line of a source that is refused; nothing is left in --out."""
    out = source.parent / "refused"
    told = fails(main, ["--source", source, "--out", out, "--workers", "0", *options], capsys)
    assert not out.exists() or not list(out.iterdir())
    return told


def edm_zip(path: Path, labels: object = None, method: int = zipfile.ZIP_STORED) -> Path:
    """A zip as EDM's dataset_tool writes it."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for i in range(N):
            archive.writestr(f"00000/img{i:08d}.png", encode(PIXELS[i]))
        if labels is None:
            labels = [[f"00000/img{i:08d}.png", LABELS[i]] for i in reversed(range(N))]
        archive.writestr("dataset.json", json.dumps({"labels": labels}))
    return path
