"""Real CIFAR-10 and ImageNet images, where they lie beside the checkout: converted, streamed."""

import hashlib
import json
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prep_sources import python2_pickle

from data_prep import cifar, edm, imagenet, verify
from lipnext_scale.data import AugmentConfig, DataConfig, DataSets, open_catalog, read_samples
from lipnext_scale.data.source import SampleStore

SHARED = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="no real images beside the checkout"),
]


class Pack:
    """Encoded images back to back, as they lie there."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.blob, self.offsets, self.labels = file["blob"], file["offsets"], file["label"]
            self.names = [name.decode() for name in file["filename"]]

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, number: int) -> bytes:
        return self.blob[self.offsets[number] : self.offsets[number + 1]].tobytes()


def decoded(pack: Pack) -> np.ndarray:
    return np.stack([np.asarray(Image.open(BytesIO(pack.encoded(i)))) for i in range(len(pack))])


def in_source_order(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """(images NHWC, labels) sorted by the source number that begins each key."""
    samples = read_samples(pattern, "data.test")
    order = np.argsort([int(key.split("_")[0]) for key in samples.keys])
    return samples.images.permute(0, 2, 3, 1).numpy()[order], samples.labels.numpy()[order]


@pytest.fixture(scope="module")
def pack() -> Pack:
    return Pack(SHARED / "cifar10" / "test.npz")


@pytest.fixture(scope="module")
def pixels(pack: Pack) -> np.ndarray:
    return decoded(pack)


def test_official_cifar_batch_is_pixel_exact_in_shards(tmp_path, pack, pixels):
    """10,000 images of a python batch: converted, verified, every pixel and class compared."""
    source = tmp_path / "cifar-10-batches-py"
    source.mkdir()
    batch = {
        b"data": pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1),
        b"labels": pack.labels.tolist(),
        b"filenames": [name.encode() for name in pack.names],
    }
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        part = slice(None) if name == "test_batch" else slice(0, 100)
        values = {key: value[part] for key, value in batch.items()}
        (source / name).write_bytes(python2_pickle(values))
    cifar.main(["--source", str(source), "--out", str(tmp_path / "shards")])
    verify.main([str(tmp_path / "shards"), "--decode"])
    images, labels = in_source_order(f"{tmp_path}/shards/test-*.tar")
    assert np.array_equal(images, pixels) and np.array_equal(labels, pack.labels)


def test_shards_and_beton_hold_the_same_pixels(tmp_path, pack, pixels):
    """From npz to tar to .beton: all three are the same images, and stream the same batches."""
    pytest.importorskip("ffcv", reason="FFCV is not installed: see README.md")
    from data_prep import ffcv

    np.savez(tmp_path / "edm.npz", image=pixels[:2000], label=pack.labels[:2000])
    edm.main(["--source", str(tmp_path / "edm.npz"), "--out", str(tmp_path / "shards")])
    shards, beton = f"{tmp_path}/shards/train-*.tar", f"{tmp_path}/train.beton"
    images, labels = in_source_order(shards)
    assert np.array_equal(images, pixels[:2000]) and np.array_equal(labels, pack.labels[:2000])
    ffcv.main(["--shards", shards, "--out", beton, "--write-mode", "raw", "--workers", "2"])
    config = {"batch_size": 100, "augment": AugmentConfig(crop_padding=4, flip=True)}
    batches = [
        list(islice(DataSets(DataConfig(s, s, **config), 32, 3, 10).training_loader(0), 40))
        for s in (shards, beton)
    ]
    # Shards are many and a .beton is one file, yet both are permuted as 2,000 single samples.
    for one, other in zip(*batches, strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.labels, other.labels)
        assert np.array_equal(one.images, other.images)


def test_imagenet_images_are_kept_byte_for_byte(tmp_path):
    """1,000 photographs: class folders to shards; each JPEG's bytes are those of its source."""
    pack = Pack(SHARED / "imagenet_sample_1000" / "short256_q90.npz")
    originals = Pack(SHARED / "imagenet_sample_1000" / "original_jpeg_subset.npz")
    known = {}
    for split, images in (("train", pack), ("val", originals)):
        for i in range(len(images)):
            path = tmp_path / "source" / split / f"n{int(images.labels[i]):08d}" / f"{i}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(images.encoded(i))
            known[hashlib.sha256(images.encoded(i)).hexdigest()] = int(images.labels[i])
    out = tmp_path / "shards"
    imagenet.main(["--source", str(tmp_path / "source"), "--out", str(out)])
    verify.main([str(out), "--decode"])
    for name, count in (("train", 1000), ("test", 117)):
        store = SampleStore(open_catalog(f"{out}/{name}-*.tar", "data.train"))
        found = [store.read(sample) for sample in range(len(store.catalog))]
        digests = {hashlib.sha256(encoded).hexdigest(): record.label for encoded, record in found}
        assert len(found) == len(digests) == count
        assert all(known[digest] == label for digest, label in digests.items())
    config = DataConfig(
        f"{out}/train-*.tar",
        f"{out}/test-*.tar",
        batch_size=100,
        augment=AugmentConfig(resize=(224, 288), flip=True, rand_augment=1.0),
        test_resize=256,
        workers=2,
    )
    sets = DataSets(config, 224, 3, 1000)
    seen = [int(i) for batch in islice(sets.training_loader(0), 10) for i in batch.ids]
    assert sorted(seen) == list(range(1000))
    assert sum(int(batch.counted.sum()) for batch in sets.test_set()) == 117
    assert json.loads((out / "train.index.json").read_text())["skipped"] == []
