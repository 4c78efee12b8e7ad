"""How the blocks fare, from first to last: gradient, size of the step, distance from O(d).

Every number is computed where the tensor is, whatever the engine: a rank looks at the matrices that
it holds whole (with rows, those it owns) and at its part of the gradients. One small vector of
each rank is gathered then.

    gradient   norm of all of a block's gradients, before clipping; the head's comes last
    drift      ‖XᵀX - I‖_F/√d, the larger of the block's two matrices
    move       ‖Δ‖_F, the size of Manifold Adam's step, the larger of the two
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.checkpoint import StateShards
from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.models.lipnext import named_parts
from lipnext_scale.optim import Optimizers, local_part
from lipnext_scale.optim.manifold_adam import direction_of
from lipnext_scale.parallel.engine import DDPEngine, Engine
from lipnext_scale.parallel.fsdp import REPLICATE, FSDPEngine
from lipnext_scale.parallel.pieces import local_range, training_pieces
from lipnext_scale.parallel.zero import DeepSpeedEngine
from lipnext_scale.parallel.zero_state import owned_matrix_pieces, parts_of

MATRICES = (".R", ".M", ".W")  # how the stable names of matrices end


@dataclass(frozen=True)
class DepthStatistics:
    """Of all ranks together, the same on each; lists by block."""

    gradient: list[float]
    head_gradient: float
    drift: list[float]
    move: list[float]

    def as_metrics(self) -> dict[str, float]:
        """Scalars for `Metrics`; six digits are enough to look at."""
        told = {"gradient/head": self.head_gradient}
        for name in ("gradient", "drift", "move"):
            values = getattr(self, name)
            told |= {f"{name}/block_{block:02d}": value for block, value in enumerate(values)}
        told |= {"drift/largest": max(self.drift), "move/largest": max(self.move)}
        return {name: float(f"{value:.6g}") for name, value in told.items()}


class BlockStats:
    """Looks at a step twice, where the trainer says, and tells after it.

    What it has seen is gathered last of all, so that no measurement of the step's traffic has it.
    """

    def __init__(self, engine: Engine, optimizers: Optimizers) -> None:
        self._engine, self._optimizers = engine, optimizers
        self._squares: Tensor | None = None
        self._sizes: Tensor | None = None

    @torch.no_grad()
    def note_gradients(self) -> None:
        """After the backward pass, before they are clipped; the step may free them."""
        self._squares = gradient_squares(self._engine)

    @torch.no_grad()
    def note_matrices(self, step: int) -> None:
        """After the step of this number, before an epoch's retraction."""
        self._sizes = matrix_sizes(self._engine, self._optimizers, step)

    def gather(self) -> DepthStatistics:
        """All ranks together, after both were noted."""
        assert self._squares is not None and self._sizes is not None
        processes, depth = self._engine.processes, self._engine.model.config.depth
        own = [tensor.flatten().to(processes.device) for tensor in (self._squares, self._sizes)]
        self._squares = self._sizes = None
        everyone = processes.gather(torch.cat(own))
        gradients = everyone[:, : depth + 1].sum(0).div(copies(self._engine)).sqrt()
        largest = everyone[:, depth + 1 :].amax(0)  # of those that others hold a rank says 0
        told = torch.cat([gradients, largest]).tolist()
        return DepthStatistics(
            gradient=told[:depth],
            head_gradient=told[depth],
            drift=told[depth + 1 : 2 * depth + 1],
            move=told[2 * depth + 1 :],
        )


def copies(engine: Engine) -> int:
    """Ranks that hold one and the same number of the model."""
    if isinstance(engine, FSDPEngine):
        return engine.mesh[REPLICATE].size()
    return engine.processes.world_size if isinstance(engine, DDPEngine) else 1


def gradient_squares(engine: Engine) -> Tensor:
    """[depth + 1]: sums of squares of the gradients here by block, and of the head's."""
    depth = engine.model.config.depth
    held: list[list[Tensor]] = [[] for _ in range(depth + 1)]
    for name, gradient in _gradients(engine):
        # In double precision, as `Engine.gradient_norm`: a norm of 1e20 is large, not infinite.
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        held[_block(name, depth)].append(norm)
    nothing = torch.zeros((), dtype=torch.float64, device=engine.processes.device)
    sums = [torch.stack(norms).square().sum() if norms else nothing for norms in held]
    return torch.stack([total.to(nothing.device) for total in sums])


def _block(name: str, depth: int) -> int:
    """`blocks.3.bias` → 3; the head comes after all blocks."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else depth


def _gradients(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """(stable name, what this process has of its gradient), each number once."""
    if isinstance(engine, DeepSpeedEngine):
        yield from _partition_gradients(engine)
        return
    for part in named_parts(engine.model):
        if part.parameter.grad is None:
            continue
        gradient = local_part(part.parameter.grad)
        if part.index is None:
            yield part.name, gradient
            continue
        start, stop = local_range(part.parameter)
        if start <= part.index < stop:
            yield part.name, gradient[part.index - start]


def _partition_gradients(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    parts = parts_of(engine.model)
    for partition, tensors in engine.partition_gradients():
        for name, slot in partition.held():
            # All parts of a parameter are alike. (ZeRO-3's parameters have lost their shapes.)
            size = math.prod(engine.shapes[name]) // len(parts[name])
            for index, part in enumerate(parts[name]):
                start = max(slot.start, index * size)
                stop = min(slot.stop, (index + 1) * size)
                here = slot.offset - slot.start
                for piece in between(tensors, start + here, stop + here):
                    yield part.name, piece


def between(tensors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Numbers [start, stop) of tensors that are one after the other, without copying them."""
    position = 0
    for tensor in tensors:
        low, high = max(start, position), min(stop, position + tensor.numel())
        if low < high:
            yield tensor.flatten()[low - position : high - position]
        position += tensor.numel()


def matrix_sizes(engine: Engine, optimizers: Optimizers, step: int) -> Tensor:
    """[2, depth]: drift and move of the matrices that are whole here; 0 for the others.

    Δ is not kept by a step, but the moments that it was made of are. step: the optimizer's, 0 if
    there was none.
    """
    pieces, depth = _whole_matrices(engine, optimizers), engine.model.config.depth
    device = next((piece.tensor.device for piece in pieces.values()), engine.processes.device)
    sizes = torch.zeros(2, depth, dtype=torch.float64, device=device)
    for name in (n.removeprefix("model.") for n in pieces if n.startswith("model.")):
        of_block = sizes[:, _block(name, depth)]
        drift = orthogonality_error(pieces[f"model.{name}"].tensor)
        of_block[0] = torch.maximum(of_block[0], drift)
        moments = [pieces.get(f"{kind}.{name}") for kind in ("exp_avg", "exp_avg_sq")]
        if step and all(moments):  # one that is frozen has none
            delta = _direction([m.tensor for m in moments if m], optimizers, step)
            of_block[1] = torch.maximum(of_block[1], torch.linalg.matrix_norm(delta))
    return sizes


def _direction(moments: list[Tensor], optimizers: Optimizers, step: int) -> Tensor:
    group = optimizers.manifold.param_groups[0]
    return direction_of(
        *moments,
        step=step,
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        bias_correction=group["second_moment_init"] == "zero",
    )


def _whole_matrices(engine: Engine, optimizers: Optimizers) -> StateShards:
    """Matrices that this process has whole, with their moments."""
    if isinstance(engine, DeepSpeedEngine):
        return owned_matrix_pieces(engine.partitions, parts_of(engine.model), optimizers)
    pieces = training_pieces(engine.model, optimizers, engine.owned_matrices())
    return {
        name: piece
        for name, piece in pieces.items()
        if name.endswith(MATRICES) and piece.tensor.shape == piece.shape
    }
