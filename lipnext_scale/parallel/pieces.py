"""What each process holds of a run, under names that fit every engine, layout and world size.

    model.NAME                                   the weights
    exp_avg.NAME, exp_avg_sq.NAME                the moments of either optimizer
    buffer.NAME                                  the sum of updates since the last Lookahead step
    slow.NAME                                    the slow weights

with the stable names of `models.lipnext`. A checkpoint of these can be read by any other engine.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lipnext_scale.checkpoint import StateShard, StateShards
from lipnext_scale.models import LipNeXt
from lipnext_scale.models.lipnext import NamedPart, named_parts
from lipnext_scale.optim import Optimizers, local_part
from lipnext_scale.parallel.rows import row_range


class OwnedMatrices(Protocol):
    """Whole matrices by parameter name, with their optimizer state, on the ranks that own them."""

    owned: dict[str, nn.Parameter]

    def state_of(self, name: str) -> dict[str, Any]: ...

    def rows_from_owners(self) -> None:
        """Bring the parameters' rows up to what the owners hold."""
        ...


def local_range(parameter: Tensor) -> tuple[int, int]:
    """The entries of the first dimension that this process holds: [start, stop)."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return 0, rows
    assert parameter.placements[-1] == Shard(0), "FSDP cuts along the first dimension"
    axis = parameter.device_mesh.ndim - 1
    ranks, rank = parameter.device_mesh.size(axis), parameter.device_mesh.get_local_rank(axis)
    start, stop = row_range(rows, ranks, rank)
    assert local_part(parameter).shape[0] == stop - start
    return start, stop


def training_pieces(
    model: LipNeXt, optimizers: Optimizers | None, owned: OwnedMatrices | None = None
) -> StateShards:
    """Weights and optimizer state, which is made where it does not exist; or weights alone."""
    if optimizers is not None:
        optimizers.initialise_state()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    at_owners = {
        id(parameter)
        for group in model.block_groups()
        for parameter in group.orthogonal_parameters()
        if owned is not None and parameter.requires_grad
    }
    pieces: StateShards = {}
    for part in named_parts(model):
        if id(part.parameter) not in at_owners:
            pieces |= _local(part, {"model": part.parameter, **_state(part, optimizers)})
        elif owned is not None and (name := names[id(part.parameter)]) in owned.owned:
            matrix = owned.owned[name].detach()
            state = {} if optimizers is None else owned.state_of(name)
            pieces |= _whole(part, {"model": matrix, **state})
    return pieces


def _state(part: NamedPart, optimizers: Optimizers | None) -> dict[str, Any]:
    both = () if optimizers is None else (optimizers.manifold, optimizers.euclidean)
    for optimizer in both:
        state = getattr(optimizer, "state", {})  # the row layout's is with the owners
        if part.parameter in state:
            return state[part.parameter]
    return {}  # frozen


def _whole(part: NamedPart, tensors: dict[str, Any]) -> StateShards:
    zeros = (0,) * len(part.shape)
    return {
        f"{kind}.{part.name}": StateShard(tensor, part.shape, zeros)
        for kind, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.dim() > 0
    }


def _local(part: NamedPart, tensors: dict[str, Any]) -> StateShards:
    start, stop = local_range(part.parameter)
    kept = {
        kind: local_part(tensor)
        for kind, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.dim() > 0
    }
    if part.index is not None:
        if not start <= part.index < stop:
            return {}
        return _whole(part, {kind: tensor[part.index - start] for kind, tensor in kept.items()})
    offset = (start,) + (0,) * (len(part.shape) - 1)
    return {
        f"{kind}.{part.name}": StateShard(tensor, part.shape, offset)
        for kind, tensor in kept.items()
    }


def checksums(pieces: StateShards) -> dict[str, int]:
    """A number for each piece by name and place: copies that differ have different ones, as a rule.

    Bits are summed as integers, for pieces of 4-byte numbers, as all of ours are.
    """
    with_data = {name: piece for name, piece in pieces.items() if piece.tensor.numel()}
    sums = [piece.tensor.view(torch.int32).sum(dtype=torch.int64) for piece in with_data.values()]
    values = torch.stack(sums).tolist() if sums else []
    return {
        f"{name} from {piece.offset}": value
        for (name, piece), value in zip(with_data.items(), values, strict=True)
    }
