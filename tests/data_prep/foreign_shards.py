"""Tars as others make them, and commands run in this process."""

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode(pixels: np.ndarray, kind: str = "png", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG" if kind != "png" else "PNG", **options)
    return buffer.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def write_shards(
    directory: Path,
    labels: Sequence[Sequence[int]],
    name: str = "train",
    kind: str = "png",
    side: int = 8,
) -> list[Path]:
    """NAME-000000.tar, … with the labels of each; sample i of shard s has the key s<s>_<i>."""
    paths = []
    for shard, own in enumerate(labels):
        members: list[tuple[str, bytes]] = []
        for i, label in enumerate(own):
            image = encode(noise(side, side + shard, 3, seed=100 * shard + i), kind)
            members += [(f"s{shard}_{i}.cls", b"%d" % label), (f"s{shard}_{i}.{kind}", image)]
        paths.append(write_tar(directory / f"{name}-{shard:06d}.tar", members))
    return paths


def flip(path: Path, place: int, bit: int = 1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def fails(
    main: Callable[[list[str]], None],
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    code: int = 2,
) -> str:
    """The one line on stderr with which a command ends that must not go well."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err
    assert ended.value.code == code, told
    assert told.count("\n") == 1 and told.startswith("error: " if code == 2 else "failed: "), told
    return told.strip()
