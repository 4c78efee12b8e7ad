"""Images/s of the loader on ImageNet JPEGs, against decoding alone and against other loaders.

    python -m benchmarks.data [--workers 2] [--rounds 24] [--seconds 0.5] [--images DIRECTORY]

Every loader runs in turn in each round, with as many worker processes, so that all see the same
noise. A ratio within a round still swings by 5 % or more on a machine that others use too: rounds
are short and many, and the mean of the middle half of them counts; the borders of that half stand
beside it. `bare` is libjpeg-turbo and OpenCV alone in as many processes: decode, crop, resize
into a batch, from images that are in memory. Images come from class folders (--images), or are
made: smooth random pictures of 256 × 341 pixels at quality 90.
"""

import argparse
import io
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import webdataset
from PIL import Image

from benchmarks import resume
from benchmarks.timing import machine
from data_prep import imagenet
from lipnext_scale.bench import bare_rate
from lipnext_scale.data import AugmentConfig, DataConfig, DataSets, StreamLoader, resolve_shards
from lipnext_scale.data.source import Source
from lipnext_scale.utils.cpu import keep_freed_memory

SIZE, BATCH, SHORT_SIDES = 224, 64, (224, 288)
PREFETCH = DataConfig.prefetch
# Seconds until the workers of the loader measured before have made their batches ahead and rest.
REST = 1.0
BARE = "bare decode, crop, resize"
OURS, RECIPE = "lipnext_scale", "lipnext_scale, RandAugment"
PILLOW = "webdataset + Pillow"
FFCV = "FFCV, RandomResizedCrop"


def make_images(directory: Path, count: int = 1000) -> None:
    """Smooth pictures in class folders, about as large in bytes as photographs of this size."""
    draw = np.random.default_rng(0)
    for number in range(count):
        coarse = draw.integers(0, 256, (64, 85, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((341, 256), Image.Resampling.BICUBIC)
        path = directory / "train" / f"n{number % 100:08d}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, quality=90)


def make_loader(shards: str, workers: int, rand_augment: float) -> StreamLoader:
    augment = AugmentConfig(SHORT_SIDES, flip=True, rand_augment=rand_augment)
    config = DataConfig(
        shards,
        shards,
        BATCH,
        augment,
        test_resize=256,
        workers=workers,
        prefetch=PREFETCH,
        verify=False,
    )
    return DataSets(config, SIZE, 3, 1000).training_loader(seed=0)


# --- the others -------------------------------------------------------------------------------


def with_pillow(encoded: bytes) -> torch.Tensor:
    """The recipe as one would write it with Pillow, without RandAugment."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    scale = random.randint(*SHORT_SIDES) / min(image.size)
    width, height = (max(SIZE, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = random.randint(0, width - SIZE), random.randint(0, height - SIZE)
    image = image.crop((left, top, left + SIZE, top + SIZE))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image))


def pillow_batches(shards: str, workers: int) -> Iterator[int]:
    def decode(sample: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
        return with_pillow(sample[0]), int(sample[1])

    dataset = (
        webdataset.WebDataset(resolve_shards(shards, "shards"), shardshuffle=100)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map(decode)
        .repeat()
        .batched(BATCH)
    )
    for images, _ in webdataset.WebLoader(dataset, batch_size=None, num_workers=workers):
        yield len(images)


def our_batches(loader: StreamLoader) -> Iterator[int]:
    for batch in loader:
        yield len(batch.labels)


def ffcv_batches(path: Path, workers: int) -> Iterator[int]:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
    loader = Loader(
        str(path),
        batch_size=BATCH,
        num_workers=workers,
        order=OrderOption.QUASI_RANDOM,
        drop_last=True,
        pipelines={
            "image": [crop, RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    while True:
        for images, _ in loader:
            yield len(images)


# --- the measurement --------------------------------------------------------------------------


def rate_of(batches: Iterator[int], workers: int) -> Callable[[float], float]:
    def rate(seconds: float) -> float:
        for _ in range((PREFETCH + 1) * workers + 2):  # made ahead while others were measured
            next(batches)
        images, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            images += next(batches)
        return images / (time.perf_counter() - began)

    return rate


def competitors(
    shards: str, beton: Path | None, workers: int
) -> dict[str, Callable[[float], float]]:
    source = make_loader(shards, 0, 0.0).sources[0]
    found: dict[str, Callable[[float], float]] = {
        BARE: lambda seconds: bare_rate(source, workers, seconds),
        OURS: rate_of(our_batches(make_loader(shards, workers, 0.0)), workers),
        PILLOW: rate_of(pillow_batches(shards, workers), workers),
        RECIPE: rate_of(our_batches(make_loader(shards, workers, 1.0)), workers),
    }
    if beton is not None:
        found[FFCV] = rate_of(ffcv_batches(beton, workers), workers)
    return found


def write_beton(shards: str, path: Path) -> Path | None:
    try:
        import ffcv  # noqa: F401

        from data_prep import ffcv as command
    except ImportError:
        print("without FFCV, which is not installed")
        return None
    command.main(["--shards", shards, "--out", str(path), "--write-mode", "jpg"])
    return path


def middle_half(values: Iterable[float]) -> tuple[float, float, float]:
    """(mean of the middle half of the values, its lowest, its highest)"""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return mean(middle), middle[0], middle[-1]


def report(rates: dict[str, list[float]]) -> None:
    def ratio(name: str, unit: str) -> str:
        pairs = zip(rates[name], rates[unit], strict=True)
        found, low, high = middle_half(one / other for one, other in pairs)
        return f"{found:.2f} ({low:.2f} to {high:.2f})"

    print(f"  {'':<36}{'images/s':>10}{'of bare':>22}")
    for name, found in rates.items():
        print(f"  {name:<36}{middle_half(found)[0]:>10.0f}{ratio(name, BARE):>22}")
    print(f"  {OURS} over {PILLOW}: {ratio(OURS, PILLOW)}")
    if FFCV in rates:
        print(f"  {OURS} over {FFCV}: {ratio(OURS, FFCV)}")


def class_entropy(labels: np.ndarray) -> float:
    """Of the classes of a batch, in bits."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return float(-(shares * np.log2(shares)).sum())


def mixing(source: Source, batches: int = 200) -> tuple[float, float]:
    """(mean class entropy of the first batches of an epoch, that of batches drawn at random)."""
    labels = np.concatenate([shard.records["label"] for shard in source.catalog.shards])
    size, random = source.options.batch_size, np.random.default_rng(0)
    steps = range(min(batches, source.order.steps_per_epoch))
    found = [class_entropy(labels[source.order.ids(0, step)]) for step in steps]
    ideal = [class_entropy(labels[random.choice(len(labels), size, replace=False)]) for _ in steps]
    return float(np.mean(found)), float(np.mean(ideal))


def resume_seconds(make_loader: Callable[[], StreamLoader], step: int) -> tuple[float, float]:
    """(until a new loader is put to a step, until it hands out its first batch from there)."""
    began = time.perf_counter()
    loader = make_loader()
    loader.load_state_dict(loader.state_dict() | {"step": step})
    placed = time.perf_counter()
    next(iter(loader))
    return placed - began, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--images", type=Path, help="a directory with train/CLASS/*.JPEG")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        source = arguments.images or Path(temporary) / "images"
        if arguments.images is None:
            make_images(source)
        split = ["--split", "train", "--shard-samples", "64"]
        imagenet.main(["--source", str(source), "--out", f"{temporary}/shards", *split])
        shards = f"{temporary}/shards/train-*.tar"
        beton = write_beton(shards, Path(temporary) / "train.beton")

        runs = competitors(shards, beton, arguments.workers)
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(arguments.rounds):
            # There and back, lest a machine that slows down favours the first.
            for name in list(runs)[:: -1 if number % 2 else 1]:
                time.sleep(REST)
                rates[name].append(runs[name](arguments.seconds))
        print(f"{machine()}; {arguments.workers} workers, batches of {BATCH}, {SIZE} px")
        report(rates)
        loader = make_loader(shards, arguments.workers, 0.0)
        found, ideal = mixing(loader.sources[0])
        print(f"  class entropy of a batch: {found:.3f} bits, drawn at random {ideal:.3f}")
        placed, first = resume_seconds(lambda: make_loader(shards, arguments.workers, 0.0), 10**5)
        print(f"  a new loader at step 100,000: {placed:.3f} s, its first batch {first:.3f} s")
        resume.measure()


if __name__ == "__main__":
    main()
