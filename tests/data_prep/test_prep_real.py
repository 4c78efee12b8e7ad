"""Real CIFAR-10 and ImageNet images, where they lie beside the checkout: converted, streamed."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from prep_sources import cifar10_files, decoded, python2_pickle

from data_prep import cifar, imagenet, verify
from lipnext_scale.data import open_catalog, read_samples
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


def test_official_cifar_batch_is_pixel_exact_in_shards(tmp_path):
    """2,000 images of a python batch: converted, verified, every pixel and class compared."""
    pack, source = Pack(SHARED / "cifar10" / "test.npz"), tmp_path / "cifar-10-batches-py"
    pixels = np.stack([decoded(pack.encoded(i)) for i in range(2000)])
    source.mkdir()
    batch = {
        b"data": pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1),
        b"labels": pack.labels[:2000].tolist(),
        b"filenames": [name.encode() for name in pack.names[:2000]],
    }
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        part = slice(None) if name == "test_batch" else slice(0, 100)
        values = {key: value[part] for key, value in batch.items()}
        (source / name).write_bytes(python2_pickle(values))
    (source / "batches.meta").write_bytes(cifar10_files()["batches.meta"])
    cifar.main(["--source", str(source), "--out", str(tmp_path / "shards")])
    verify.main([str(tmp_path / "shards"), "--decode"])
    samples = read_samples(f"{tmp_path}/shards/test-*.tar", "data.test")
    order = np.argsort([int(key.split("_")[0]) for key in samples.keys])
    assert np.array_equal(samples.images.permute(0, 2, 3, 1).numpy()[order], pixels)
    assert np.array_equal(samples.labels.numpy()[order], pack.labels[:2000])


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
    assert json.loads((out / "train.index.json").read_text())["skipped"] == []
