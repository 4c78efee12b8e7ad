"""Statistics by block: gradient, size of the step, distance from O(d).

Every number is computed where the tensor is: a rank looks at the matrices that it holds whole (with
rows, those it owns) and at its part of the gradients. Then one small vector per rank is gathered.

    gradient   norm of all of a block's gradients, before clipping; the head's comes last
    drift      ‖XᵀX - I‖_F/√d, the larger of the block's two matrices
    move       ‖Δ‖_F, the size of Manifold Adam's step, the larger of the two

The last two for model.layer = 'manifold' alone.
"""

import torch
from torch import Tensor

from lipnext_scale.distributed import Engine
from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.optim import Optimizers
from lipnext_scale.optim.manifold_adam import direction_of


class BlockStats:
    """Reads a step twice, where the trainer calls it; `gather` collects it from all ranks."""

    def __init__(self, engine: Engine, optimizers: Optimizers) -> None:
        self._engine, self._optimizers = engine, optimizers
        self._depth = engine.model.config.depth
        self._squares: Tensor | None = None
        self._sizes: Tensor | None = None

    @torch.no_grad()
    def note_gradients(self) -> None:
        """After the backward pass, before they are clipped; the step may free them.

        Sums of squares of this rank's gradients by block, and of the head's.
        """
        held: list[list[Tensor]] = [[] for _ in range(self._depth + 1)]
        for name, gradient, copies in self._engine.named_gradients():
            norm = torch.linalg.vector_norm(gradient).double() / copies**0.5
            held[self._block(name)].append(norm)
        nothing = torch.zeros((), dtype=torch.float64, device=self._engine.processes.device)
        sums = [torch.stack(norms).square().sum() if norms else nothing for norms in held]
        self._squares = torch.stack([total.to(nothing.device) for total in sums])

    @torch.no_grad()
    def note_matrices(self, step: int) -> None:
        """After the update of this number, 0 if there was none, before an epoch's retraction.

        Drift and move of the matrices that are whole here, 0 for the others. A step does not keep
        Δ, but the moments that it was made of.
        """
        shards = self._engine.whole_matrices(self._optimizers)
        devices = [shard.tensor.device for shard in shards.values()]
        device = devices[0] if devices else self._engine.processes.device
        sizes = torch.zeros(2, self._depth, dtype=torch.float64, device=device)
        group = self._optimizers.manifold.param_groups[0]
        for name in (n.removeprefix("model.") for n in shards if n.startswith("model.")):
            of_block = sizes[:, self._block(name)]
            drift = orthogonality_error(shards[f"model.{name}"].tensor)
            of_block[0] = torch.maximum(of_block[0], drift)
            if step:
                delta = direction_of(
                    shards[f"exp_avg.{name}"].tensor,
                    shards[f"exp_avg_sq.{name}"].tensor,
                    step=step,
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    bias_correction=group["second_moment_init"] == "zero",
                )
                of_block[1] = torch.maximum(of_block[1], torch.linalg.matrix_norm(delta))
        self._sizes = sizes

    def gather(self) -> dict[str, float]:
        """Scalars for `Metrics`, the same on each rank; all ranks together, after both notes."""
        assert self._squares is not None and self._sizes is not None
        processes, depth = self._engine.processes, self._depth
        own = [tensor.flatten().to(processes.device) for tensor in (self._squares, self._sizes)]
        self._squares = self._sizes = None
        everyone = processes.gather(torch.cat(own))
        gradients = everyone[:, : depth + 1].sum(0).sqrt()
        largest = everyone[:, depth + 1 :].amax(0)  # 0 for matrices that other ranks hold
        values = {"gradient/head": float(gradients[depth])}
        drift, move = largest[:depth], largest[depth:]
        by_block = {"gradient": gradients[:depth]}
        if self._engine.has_banks:
            by_block |= {"drift": drift, "move": move}
            values |= {"drift/largest": float(drift.max()), "move/largest": float(move.max())}
        for name, of_blocks in by_block.items():
            for block, value in enumerate(of_blocks.tolist()):
                values[f"{name}/block_{block:02d}"] = value
        return {name: float(f"{value:.6g}") for name, value in values.items()}  # enough to look at

    def _block(self, name: str) -> int:
        """`blocks.3.bias` → 3; the head comes after all blocks."""
        return int(name.split(".")[1]) if name.startswith("blocks.") else self._depth
