"""Tensors with known bits, and shards of them, for the tests of checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from lipnext_scale.checkpoint import StateShard, StateShards, load_shards, verify_checkpoint
from lipnext_scale.utils.errors import UserError

whole = StateShard.full


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, so also NaNs and denormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(256, (count,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert one.shape == other.shape and one.dtype == other.dtype
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def cut(tensor: Tensor, dimension: int, start: int, stop: int) -> StateShard:
    """The part [start, stop) along a dimension; its tensor is a view."""
    offset = tuple(start if d == dimension else 0 for d in range(tensor.dim()))
    part = tensor.narrow(dimension, start, stop - start)
    return StateShard(part, tuple(tensor.shape), offset)


def rows(tensor: Tensor, rank: int, world_size: int) -> StateShard:
    """The rank's share of the first dimension, as even as it can be."""
    length = tensor.shape[0]
    return cut(tensor, 0, length * rank // world_size, length * (rank + 1) // world_size)


def sample_tensors(step: int, length: int = 12) -> dict[str, Tensor]:
    return {
        "bank": random_bits((length, 5), torch.float32, seed=2 * step),
        "head": random_bits((3, length), torch.float32, seed=2 * step + 1),
        "count": torch.tensor(step),
    }


def sample_shards(step: int, rank: int = 0, world_size: int = 1, length: int = 12) -> StateShards:
    """A bank in row ranges; a head and a number that every rank holds."""
    tensors = sample_tensors(step, length)
    bank = rows(tensors["bank"], rank, world_size)
    return {"bank": bank, "head": whole(tensors["head"]), "count": whole(tensors["count"])}


def assert_holds(path: Path, step: int, length: int = 12) -> None:
    """The checkpoint is intact and holds the sample tensors of the step."""
    verify_checkpoint(path)
    expected = sample_tensors(step, length)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_shards(path, {name: whole(tensor) for name, tensor in loaded.items()})
    for name, tensor in expected.items():
        assert same_bits(loaded[name], tensor), name


def message_of(action, *arguments) -> str:
    """The message of a UserError; other errors are not caught, and none is an error."""
    try:
        action(*arguments)
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was raised")
