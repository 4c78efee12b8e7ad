"""Shards made on the fly, and the pixels of an FFCV file by every way of reading it."""

import io
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from data_prep import ffcv as command
from lipnext_scale.data.index import INSTALL, KINDS, index_paths, map_records, read_index

SAMPLES, SIDE = 24, 40
# A first line for `python -c`.
WITHOUT_FFCV = "import sys; sys.modules['ffcv'] = None\n"
# Importing FFCV alone takes seconds.
with_ffcv = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ffcv") is None, reason=f"needs FFCV: {INSTALL}"),
]


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Smooth colours, which a JPEG keeps, and different for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format={"png": "PNG", "jpg": "JPEG"}[kind])
    return buffer.getvalue()


def write_tar(path: Path, images: list[tuple[int, str, bytes]]) -> None:
    """A tar of (label, suffix, encoded image) samples."""
    with tarfile.open(path, "w") as tar:
        for number, (label, suffix, encoded) in enumerate(images):
            for name, content in (
                (f"k{number}.cls", str(label).encode()),
                (f"k{number}.{suffix}", encoded),
            ):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def write_shards(folder: Path) -> Path:
    """Two shards of PNGs, among them greyscale ones, and no index."""
    half = SAMPLES // 2
    for shard in range(2):
        pixels = [picture(shard * half + i) for i in range(half)]
        pixels[3] = pixels[3][:, :, 0]
        write_tar(
            folder / f"in-{shard:06d}.tar",
            [(100 * shard + 7 * i, "png", encode(image)) for i, image in enumerate(pixels)],
        )
    return folder


def expected(folder: Path) -> tuple[np.ndarray, list[int]]:
    """The pixels and labels of the tars by tarfile and Pillow."""
    images, labels = [], []
    for path in sorted(folder.glob("in-*.tar")):
        with tarfile.open(path) as tar:
            for entry in tar:
                content = tar.extractfile(entry).read()
                if entry.name.endswith(".cls"):
                    labels.append(int(content))
                else:
                    images.append(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    return np.stack(images), labels


def failure(capsys, *arguments: str) -> str:
    """The one line that the command says, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        command.main(list(arguments))
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def own_pixels(path: Path) -> list[np.ndarray]:
    """All samples by their records and positioned reads; JPEGs by the fast transform, as FFCV."""
    records = map_records(*indexed(path))
    images = []
    with path.open("rb") as file:
        for record in records:
            shape = (int(record["height"]), int(record["width"]), int(record["channels"]))
            stored = os.pread(file.fileno(), int(record["size"]), int(record["offset"]))
            if record["kind"] == KINDS["jpeg"]:
                pixels = simplejpeg.decode_jpeg(stored, fastdct=True)
                assert pixels.shape == shape
            else:
                pixels = np.frombuffer(stored, dtype=np.uint8).reshape(shape)
            images.append(pixels)
    return images


def indexed(path: Path) -> tuple[Path, int]:
    """(records, samples) of the index beside a file."""
    json_path, npy_path = index_paths(path.parent, path.name)
    return npy_path, read_index(json_path).samples


def ffcv_pixels(paths: list[Path]) -> list[tuple[np.ndarray, list[int]]]:
    """(all images, all labels) of each file by FFCV's own Loader, in order.

    In a process of its own: the Loader leaves threads behind, and numba complains of loaders that
    are collected while others compile.
    """
    code = """
import sys
import numpy as np
from ffcv.fields.rgb_image import SimpleRGBImageDecoder
from ffcv.loader import Loader, OrderOption

for path in sys.argv[1:]:
    loader = Loader(path, batch_size=10, num_workers=1, order=OrderOption.SEQUENTIAL,
                    drop_last=False, pipelines={"image": [SimpleRGBImageDecoder()]})
    batches = [[np.array(part) for part in batch[:2]] for batch in loader]
    images, labels = (np.concatenate(parts) for parts in zip(*batches))
    np.savez(path + ".npz", images=images, labels=labels.ravel())
"""
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], check=True, timeout=300)
    found = [np.load(f"{path}.npz") for path in paths]
    return [(file["images"], file["labels"].tolist()) for file in found]
