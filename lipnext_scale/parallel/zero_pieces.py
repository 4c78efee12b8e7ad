"""The partitions of DeepSpeed to and from our checkpoints, under the names of every engine.

Matrices are whole in a partition, so their pieces are views of it and of its optimizer state. All
other parameters may be cut anywhere, which makes no rectangle; but they are small. So every rank
gets them whole, as copies, and after loading puts back what it has of them.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lipnext_scale.checkpoint import Piece, Pieces
from lipnext_scale.models import LipNeXt
from lipnext_scale.models.naming import NamedPart, named_parts
from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel.zero_optimizers import Partition, ZeroOptimizers

Shapes = dict[str, tuple[int, ...]]  # of the whole parameters, by name
Parts = dict[str, list[NamedPart]]  # of each parameter, in order, by its name in the model


def parts_of(model: LipNeXt) -> Parts:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: Parts = {}
    for part in named_parts(model):
        parts.setdefault(names[id(part.parameter)], []).append(part)
    return parts


def zero_pieces(
    partitions: Sequence[Partition], parts: Parts, shapes: Shapes, optimizers: Optimizers | None
) -> Pieces:
    """Of this rank; all ranks must call it together."""
    if optimizers is not None:
        optimizers.initialise_state()
    pieces: Pieces = {}
    for partition in partitions:
        for kind, tensor in tensors_of(partition, optimizers).items():
            if partition.orthogonal:
                pieces |= matrix_pieces(partition, kind, tensor, parts)
            else:
                pieces |= _gathered(partition, kind, tensor, parts, shapes)
    return pieces


def tensors_of(partition: Partition, optimizers: Optimizers | None) -> dict[str, Tensor]:
    """The partition and, with optimizers, their state of it, by kind."""
    tensors = {"model": partition.view}
    if optimizers is not None:
        assert isinstance(optimizers, ZeroOptimizers)
        tensors |= optimizers.state_of(partition)
    return tensors


def matrix_pieces(partition: Partition, kind: str, tensor: Tensor, parts: Parts) -> Pieces:
    """kind, tensor: which numbers, and a tensor of them that is laid out as the partition."""
    width = tensor.shape[-1]
    pieces: Pieces = {}
    for name, slot in partition.held():
        first, last, position = (n // width**2 for n in (slot.start, slot.stop, slot.offset))
        matrices = tensor[position : position + last - first]
        for part, matrix in zip(parts[name][first:last], matrices, strict=True):
            pieces[f"{kind}.{part.name}"] = Piece(matrix, (width, width), (0, 0))
    return pieces


def owned_matrix_pieces(
    partitions: Sequence[Partition], parts: Parts, optimizers: Optimizers
) -> Pieces:
    """The matrices of this rank alone, with their state: nothing is gathered."""
    pieces: Pieces = {}
    for partition in (p for p in partitions if p.orthogonal):
        for kind, tensor in tensors_of(partition, optimizers).items():
            pieces |= matrix_pieces(partition, kind, tensor, parts)
    return pieces


@torch.no_grad()
def _gathered(
    partition: Partition, kind: str, tensor: Tensor, parts: Parts, shapes: Shapes
) -> Pieces:
    """Of every parameter of the partition's group, whether or not this rank has some of it."""
    held = list(partition.held())
    pieces: Pieces = {}
    for name in partition.names:
        whole = tensor.new_zeros(math.prod(shapes[name]))
        for slot in (slot for held_name, slot in held if held_name == name):
            whole[slot.of_parameter] = tensor[slot.there]
        dist.all_reduce(whole.view(torch.int32))  # bits, to which the other ranks add zeros
        pieces |= parameter_pieces(kind, whole.view(shapes[name]), parts[name])
    return pieces


def parameter_pieces(kind: str, whole: Tensor, parts: list[NamedPart]) -> Pieces:
    """Of all numbers of a parameter, which are laid out as it is."""
    views = {f"{kind}.{part.name}": part.of(whole) for part in parts}
    return {name: Piece(view, tuple(view.shape), (0,) * view.dim()) for name, view in views.items()}


@torch.no_grad()
def put_back(
    partitions: Sequence[Partition], parts: Parts, pieces: Pieces, optimizers: Optimizers | None
) -> None:
    """Copy what was loaded into the gathered pieces to where it belongs."""
    for partition in (p for p in partitions if not p.orthogonal):
        for kind, tensor in tensors_of(partition, optimizers).items():
            for name, slot in partition.held():
                loaded = [pieces[f"{kind}.{part.name}"].tensor.flatten() for part in parts[name]]
                tensor[slot.there] = torch.cat(loaded)[slot.of_parameter]
