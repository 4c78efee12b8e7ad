"""Where ZeRO puts the numbers of a parameter: pure functions, the same on every rank.

ZeRO-1, 2   the parameters of a group one after the other, padded, cut into equal parts
ZeRO-3      every parameter by itself, padded, cut into equal parts
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.checkpoint import StateShard, StateShards
from lipnext_scale.models import LipNeXt
from lipnext_scale.models.lipnext import NamedPart, named_parts
from lipnext_scale.optim import OptimConfig, Optimizers

ALIGNMENT = 2  # DeepSpeed pads a group of ZeRO-1 and 2 to a multiple of so many numbers per rank


@dataclass(frozen=True)
class Slot:
    """Entries [start, stop) of a flattened parameter, from `offset` on in a rank's partition."""

    index: int  # of the parameter in its group
    start: int
    stop: int
    offset: int

    @property
    def there(self) -> slice:
        """Its place in the partition."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def of_parameter(self) -> slice:
        return slice(self.start, self.stop)


def flat_group_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-1 and 2: (length of every rank's partition, what this rank has in it)."""
    length = -(-sum(sizes) // (ALIGNMENT * ranks)) * ALIGNMENT
    begin, end = rank * length, (rank + 1) * length
    position, slots = 0, []
    for index, size in enumerate(sizes):
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            slots.append(Slot(index, low - position, high - position, low - begin))
        position += size
    return length, slots


def parameter_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-3: the same for parameters that share a flat partition, each cut by itself."""
    offset, slots = 0, []
    for index, size in enumerate(sizes):
        length = -(-size // ranks)
        low, high = min(rank * length, size), min((rank + 1) * length, size)
        if low < high:
            slots.append(Slot(index, low, high, offset))
        offset += length
    return offset, slots


def has_whole_matrices(length: int, slots: Sequence[Slot], width: int) -> bool:
    """Whether a partition is a stack of whole matrices [width, width]."""
    edges = [length, *(edge for s in slots for edge in (s.start, s.stop, s.offset))]
    return all(edge % width**2 == 0 for edge in edges)


def padding_matrices(matrices: int, width: int, ranks: int) -> int:
    """ZeRO-1 and 2: how many to add to a group so that every partition has whole ones.

    Fewer than two for each rank. For an odd width the number of a rank must be even, for DeepSpeed
    would make its count of numbers even, and so cut all later partitions one number too late.
    """
    per_rank = -(-matrices // ranks)
    if width % ALIGNMENT:
        per_rank += per_rank % ALIGNMENT
    return per_rank * ranks - matrices


# --------------------------------------------------------------------------------------------------
# Our optimizers on the partitions of DeepSpeed.
#
# DeepSpeed moves numbers and calls one optimizer, the client, whose parameters it replaces by its
# flat float32 partitions. The client steps ManifoldAdam and LookaheadNAdam, which know nothing of
# it: their parameters are views of the partitions, [k, d, d] of those that hold matrices.


@dataclass(frozen=True)
class Partition:
    """A flat float32 tensor of this rank, and what of which parameters it holds.

    names: of the parameters by `Slot.index`; "" for matrices that are only padding.
    view: the same numbers as our optimizers see them; [k, width, width] for `orthogonal`.
    """

    flat: Tensor
    view: Tensor
    names: list[str]
    slots: list[Slot]
    orthogonal: bool

    @staticmethod
    def of(
        flat: Tensor, names: list[str], layout: tuple[int, list[Slot]], width: int | None
    ) -> "Partition":
        """width: of the matrices; None where it holds none."""
        length, slots = layout
        assert flat.dtype == torch.float32 and flat.is_contiguous()
        assert flat.numel() == length, "DeepSpeed cuts its partitions in another way"
        view = flat.detach()
        if width is not None:
            assert has_whole_matrices(length, slots, width), "a partition cuts through a matrix"
            view = view.view(-1, width, width)
        return Partition(flat, view, names, slots, width is not None)

    def held(self) -> Iterator[tuple[str, Slot]]:
        """What there is beside padding: parameters' names and where their numbers are."""
        return ((self.names[s.index], s) for s in self.slots if self.names[s.index])


class ClientOptimizer(torch.optim.Optimizer):
    """What DeepSpeed steps, with gradients in its partitions: once for each group (ZeRO-1 and 2) or
    sub-group (ZeRO-3), which are alone in `param_groups` then."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__([{"params": list(group)} for group in groups], {"lr": 0.0})
        self._attached: dict[int, tuple[Partition, torch.optim.Optimizer]] = {}
        self.idle = False  # a step then moves nothing

    def attach(self, partition: Partition, optimizer: torch.optim.Optimizer) -> None:
        """Say who moves a partition."""
        self._attached[id(partition.flat)] = partition, optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self.idle:
            return
        stepping: dict[int, torch.optim.Optimizer] = {}
        views = []
        for flat in (flat for group in self.param_groups for flat in group["params"]):
            partition, optimizer = self._attached[id(flat)]
            view = partition.view
            assert partition.flat is flat and flat.data_ptr() == view.data_ptr()
            if flat.grad is not None:
                view.grad = flat.grad.view_as(view)
                views.append(view)
                stepping[id(optimizer)] = optimizer
        for optimizer in stepping.values():  # one skips whatever has no gradient
            optimizer.step()
        for view in views:
            view.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Our optimizers' state for DeepSpeed's checkpoints: flat, by the number of a partition."""
        numbers = {flat: number for number, flat in enumerate(self._attached)}
        return {
            "state": {
                number: {kind: t.flatten() for kind, t in _state(partition, optimizer).items()}
                for number, (partition, optimizer) in enumerate(self._attached.values())
            },
            "param_groups": [
                {**group, "params": [numbers[id(flat)] for flat in group["params"]]}
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place. How many steps were taken is told by the run's own facts."""
        for number, (partition, optimizer) in enumerate(self._attached.values()):
            held, stored = _state(partition, optimizer), state_dict["state"][number]
            assert held.keys() == stored.keys()
            for kind, tensor in held.items():
                tensor.view(-1).copy_(stored[kind])


def _state(partition: Partition, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state's tensors that are laid out as the partition."""
    state = optimizer.state[partition.view]
    return {k: t for k, t in state.items() if isinstance(t, Tensor) and t.dim() > 0}


class ZeroEngine(Protocol):
    """What the optimizers ask of the engine."""

    partitions: list[Partition]
    client: ClientOptimizer

    def step(self) -> None:
        """DeepSpeed's step, which calls the client's."""
        ...

    def publish(self) -> None:
        """Bring the model's weights up to the partitions."""
        ...


class ZeroOptimizers(Optimizers):
    """Both optimizers on partitions; whatever moves these outside a step is published."""

    def __init__(self, engine: ZeroEngine, config: OptimConfig) -> None:
        self._engine = engine
        named = [(f"partition {i}", p) for i, p in enumerate(engine.partitions)]
        orthogonal = [(name, p.view) for name, p in named if p.orthogonal]
        euclidean = [(name, p.view) for name, p in named if not p.orthogonal]
        super().__init__((orthogonal, euclidean), config)
        for partition in engine.partitions:
            engine.client.attach(partition, self._owner(partition))

    def _owner(self, partition: Partition) -> torch.optim.Optimizer:
        owner = self.manifold if partition.orthogonal else self.euclidean
        assert isinstance(owner, torch.optim.Optimizer)
        return owner

    def state_of(self, partition: Partition) -> dict[str, Tensor]:
        """The state's tensors that are laid out as the partition."""
        return _state(partition, self._owner(partition))

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        pass  # DeepSpeed's step has dropped them

    def retract(self) -> None:
        super().retract()
        self._engine.publish()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        try:
            with super().slow_weights():
                self._engine.publish()
                yield
        finally:
            self._engine.publish()


# --------------------------------------------------------------------------------------------------
# The partitions of DeepSpeed to and from our checkpoints, under the names of every engine.
#
# Matrices are whole in a partition, so their pieces are views of it and of its optimizer state.
# All other parameters may be cut anywhere, which makes no rectangle; but they are small. So every
# rank gets them whole, as copies, and after loading puts back what it has of them.

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
) -> StateShards:
    """Of this rank; all ranks must call it together."""
    if optimizers is not None:
        optimizers.initialise_state()
    pieces: StateShards = {}
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


def matrix_pieces(partition: Partition, kind: str, tensor: Tensor, parts: Parts) -> StateShards:
    """kind, tensor: which numbers, and a tensor of them that is laid out as the partition."""
    width = tensor.shape[-1]
    pieces: StateShards = {}
    for name, slot in partition.held():
        first, last, position = (n // width**2 for n in (slot.start, slot.stop, slot.offset))
        matrices = tensor[position : position + last - first]
        for part, matrix in zip(parts[name][first:last], matrices, strict=True):
            pieces[f"{kind}.{part.name}"] = StateShard(matrix, (width, width), (0, 0))
    return pieces


def owned_matrix_pieces(
    partitions: Sequence[Partition], parts: Parts, optimizers: Optimizers
) -> StateShards:
    """The matrices of this rank alone, with their state: nothing is gathered."""
    pieces: StateShards = {}
    for partition in (p for p in partitions if p.orthogonal):
        for kind, tensor in tensors_of(partition, optimizers).items():
            pieces |= matrix_pieces(partition, kind, tensor, parts)
    return pieces


@torch.no_grad()
def _gathered(
    partition: Partition, kind: str, tensor: Tensor, parts: Parts, shapes: Shapes
) -> StateShards:
    """Of every parameter of the partition's group, whether or not this rank has some of it."""
    held = list(partition.held())
    pieces: StateShards = {}
    for name in partition.names:
        whole = tensor.new_zeros(math.prod(shapes[name]))
        for slot in (slot for held_name, slot in held if held_name == name):
            whole[slot.of_parameter] = tensor[slot.there]
        dist.all_reduce(whole.view(torch.int32))  # bits, to which the other ranks add zeros
        pieces |= parameter_pieces(kind, whole.view(shapes[name]), parts[name])
    return pieces


def parameter_pieces(kind: str, whole: Tensor, parts: list[NamedPart]) -> StateShards:
    """Of all numbers of a parameter, which are laid out as it is."""
    views = {f"{kind}.{part.name}": part.of(whole) for part in parts}
    return {
        name: StateShard(view, tuple(view.shape), (0,) * view.dim()) for name, view in views.items()
    }


@torch.no_grad()
def put_back(
    partitions: Sequence[Partition],
    parts: Parts,
    pieces: StateShards,
    optimizers: Optimizers | None,
) -> None:
    """Copy what was loaded into the gathered pieces to where it belongs."""
    for partition in (p for p in partitions if not p.orthogonal):
        for kind, tensor in tensors_of(partition, optimizers).items():
            for name, slot in partition.held():
                loaded = [pieces[f"{kind}.{part.name}"].tensor.flatten() for part in parts[name]]
                tensor[slot.there] = torch.cat(loaded)[slot.of_parameter]
