"""The UCI handwritten digits (1,797 images, 8×8, ten classes) as shards: the demo's data.

    python -m data_prep.digits --out lipnext_scale/data/builtin/digits

The images come with scikit-learn (`pip install 'lipnext_scale[prep]'`), which carries the UCI test
file. Pixels 0..16 become 0..255. The split is by a hash of the image's number, so it never changes:
1,437 for training and 360 for testing.
"""

import hashlib
from pathlib import Path

import numpy as np

from data_prep.writing.shards import png_bytes, write_shard
from lipnext_scale.errors import ArgumentParser, UserError, command

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


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="data_prep.digits", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the shards")
    arguments = parser.parse_args(argv)
    images, labels = load_digits()
    for part, numbers in split(len(images)).items():
        path = arguments.out / f"{part}-000000.tar.gz"
        samples = ((f"{i:06d}", png_bytes(images[i]), int(labels[i])) for i in numbers)
        try:
            write_shard(path, samples)
        except OSError as error:
            raise UserError(f"--out {arguments.out}: cannot be written: {error.strerror}") from None
        print(f"{path}: {len(numbers)} samples, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
