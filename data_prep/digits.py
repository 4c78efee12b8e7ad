"""The UCI handwritten digits (1,797 images, 8×8, ten classes) as shards: the demo's data.

    python -m data_prep.digits --out lipnext_scale/data/builtin/digits

The images come with scikit-learn (`pip install 'lipnext_scale[prep]'`), which carries the UCI test
file. Pixels 0..16 become 0..255. The split is by a hash of the image's number, so it never changes:
1,437 for training and 360 for testing.
"""

import lipnext_scale.utils.passive  # noqa: F401

import gzip
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.common import command_parser, number, writing
from data_prep.convert import add_file, open_tar
from data_prep.encoding import png_bytes
from lipnext_scale.utils.errors import UserError, command
from lipnext_scale.utils.files import atomic_file

TEST_SAMPLES = 360


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """(uint8 images [1797, 8, 8], labels [1797]) in the order of the UCI file."""
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install 'lipnext_scale[prep]'"
        ) from None
    raw = datasets.load_digits()
    return np.rint(raw.images * (255 / 16)).astype(np.uint8), raw.target.astype(np.int64)


def split(count: int) -> dict[str, list[int]]:
    """The sample numbers of each part, both in hash order, that is shuffled."""
    order = sorted(range(count), key=lambda i: hashlib.sha256(f"digits/{i}".encode()).digest())
    return {"test": order[:TEST_SAMPLES], "train": order[TEST_SAMPLES:]}


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, int]]) -> None:
    """Write (key, PNG, label) samples as one tar.gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        # Neither the name nor the time goes into the gzip header.
        with gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
            with open_tar(packed) as tar:
                for key, png, label in samples:
                    add_file(tar, f"{key}.cls", str(label).encode())
                    add_file(tar, f"{key}.png", png)


@command
def main(argv: list[str] | None = None) -> None:
    parser = command_parser("digits", __doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory for the shards")
    add("--shard-samples", type=number(0), default=0, help="samples in a shard (default: all)")
    arguments = parser.parse_args(argv)
    images, labels = load_digits()
    for part, numbers in split(len(images)).items():
        size = arguments.shard_samples or len(numbers)
        for first in range(0, len(numbers), size):
            shard = numbers[first : first + size]
            path = arguments.out / f"{part}-{first // size:06d}.tar.gz"
            samples = ((f"{i:06d}", png_bytes(images[i]), int(labels[i])) for i in shard)
            with writing(f"--out {arguments.out}"):
                write_shard(path, samples)
            print(f"{path}: {len(shard)} samples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
