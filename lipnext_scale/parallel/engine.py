"""The protocol between the trainer and whatever runs the model."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from lipnext_scale.checkpoint import Pieces
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import OptimConfig, Optimizers
from lipnext_scale.parallel.config import ParallelConfig
from lipnext_scale.parallel.pieces import OwnedMatrices
from lipnext_scale.parallel.processes import Processes


class Engine(Protocol):
    """Places a model on the processes of a run, differentiates and clips it."""

    name: str
    config: ParallelConfig
    processes: Processes
    model: LipNeXt

    def describe(self) -> str:
        """The engine and its choices in a few words."""
        ...

    def place(self, config: LipNeXtConfig) -> LipNeXt:
        """The model as this engine spreads it, on the meta device: shapes without memory."""
        ...

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        """A model over the processes with its initial weights, the same for every world size.

        No process ever holds weights that it does not keep.
        """
        ...

    def optimizers(self, config: OptimConfig) -> Optimizers:
        """Both optimizers of the model as this engine lays its weights out. Once, after `build`."""
        ...

    def parameter_count(self) -> int:
        """The numbers of the whole model, wherever they are."""
        ...

    def held_weights(self) -> Iterable[Tensor]:
        """All tensors of weights that this process keeps from step to step."""
        ...

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        """(logits, the head's normalised rows). All processes must call it together.

        last: of the parts that a batch is cut into.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients; after the last part they are summed parts, averaged over ranks."""
        ...

    def gradient_norm(self) -> Tensor:
        """The global norm of all gradients, the same number on every rank."""
        ...

    def clip_gradients(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients, whose global norm is `norm`, to one of at most `max_norm`."""
        ...

    def not_finite(self) -> list[str]:
        """Parameters whose gradient has a number here that is not finite, by name."""
        ...

    def discard_gradients(self) -> None:
        """Forget them: there is no step with them."""
        ...

    def weights_changed(self) -> None:
        """Drop gathered copies of the weights: they were changed by other means than a step."""
        ...

    def owned_matrices(self) -> OwnedMatrices | None:
        """Matrices that live whole on one rank while the parameters hold rows (layout row)."""
        ...

    def pieces(self, optimizers: Optimizers | None) -> Pieces:
        """What this process puts into a checkpoint, or fills from one; None: the weights alone.

        All processes must call it together.
        """
        ...

    def pieces_loaded(self, pieces: Pieces, optimizers: Optimizers | None) -> None:
        """Make the model that of the pieces, which have been filled. All processes together."""
        ...
