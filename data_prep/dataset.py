"""A torch Dataset, or any iterable of (image, label), as shards."""

from collections.abc import Sequence
from operator import index
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from PIL import Image

from data_prep.convert import SetSource, conversion_parser, run_conversions
from data_prep.encoding import png_bytes
from data_prep.sources import ImageFile, PackedImages
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import file_sha256


def write_shards(
    dataset: Any, directory: str | Path, name: str = "train", classes: Sequence[str] | None = None
) -> None:
    """Write `name`-000000.tar, … and their index; samples are shuffled once for good.

    image: of PIL, or an array or tensor [H, W], [H, W, C] or [C, H, W], uint8 or floating point in
    [0, 1], which is rounded to 256 steps. classes: names by label (default: dataset.classes).
    """
    names = list(getattr(dataset, "classes", ()) if classes is None else classes)
    # No processes of its own: the caller may have threads, which a fork does not copy.
    options = conversion_parser("dataset", None).parse_args(["--workers=0", f"--out={directory}"])
    options.out.mkdir(parents=True, exist_ok=True)
    # Without __iter__, Python's own loop waits for an IndexError, which a Dataset need not raise.
    if not hasattr(dataset, "__iter__"):
        dataset = map(dataset.__getitem__, range(len(dataset)))
    files: list[ImageFile] = []
    with TemporaryFile(dir=directory) as packed:
        for number, (image, label) in enumerate(dataset):
            try:
                content, label = _png(image), index(label)
                if label < 0 or names and label >= len(names):
                    raise ValueError(f"its label is {label}, of {len(names)} named classes")
            except (TypeError, ValueError, OSError) as error:
                raise UserError(f"{name}: sample {number}: {error}") from None
            files.append(ImageFile(str(number), label, len(content), packed.tell()))
            packed.write(content)
        packed.flush()
        path = Path(f"/proc/self/fd/{packed.fileno()}")
        source = {"data": "a Dataset", "sha256": file_sha256(path)}
        run_conversions([SetSource(name, PackedImages(path, names, files), source)], options)


def _png(image: Any) -> bytes:
    """What has more than 8 bits keeps them, and the conversion refuses it."""
    if not isinstance(image, Image.Image):
        pixels = np.asarray(image)
        if pixels.dtype.kind == "f":
            low, high = pixels.min(), pixels.max()
            if not 0 <= low <= high <= 1:
                raise ValueError(f"is from {low:g} to {high:g}; must be in [0, 1], not normalised")
            pixels = np.rint(pixels * 255).astype(np.uint8)
        if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
            pixels = pixels.transpose(1, 2, 0)
        image = pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels
    return png_bytes(image)
