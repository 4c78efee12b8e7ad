"""Steps whose loss or gradient is not finite: skipped and counted, or the end of the run.

A step of the run is a batch of its data order, also where it is skipped, so the schedule and the
epochs end where they would have. The optimizers count updates, which are then fewer than the steps.
All ranks decide by the same numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.config.recipe import RunConfig
from lipnext_scale.distributed import Engine
from lipnext_scale.models.lipnext import named_parts
from lipnext_scale.utils.errors import RunFailed


@dataclass
class NonFinitePolicy:
    """skipped: steps so far that made no update."""

    run: RunConfig
    skipped: int = 0

    def updates(self, step: int) -> int:
        """The optimizers' own count after so many steps of the run."""
        return step - self.skipped

    def skip(self, step: int, what: str) -> str:
        """Count the step that would be number `step`; returns a line to print, or ends the run."""
        limit = self.run.non_finite_limit
        if self.run.on_non_finite == "fail":
            raise RunFailed(f"step {step}: {what}; the weights were not updated")
        if self.skipped >= limit:
            raise RunFailed(
                f"step {step}: {what}; run.non_finite_limit = {limit} allows no more such steps "
                f"after {self.skipped}; the weights were not updated"
            )
        self.skipped += 1
        counted = f"{self.skipped} of at most {limit} such steps"
        return f"warning: step {step}: {what} ({counted}); its batch is skipped"

    def metrics(self) -> dict[str, int]:
        return {} if self.run.on_non_finite == "fail" else {"train/non_finite_steps": self.skipped}


def what_is_not_finite(engine: Engine, loss: Tensor, norm: Tensor) -> str | None:
    """The loss, or the first tensor whose gradient is not finite, in words; None if all is finite.

    All ranks must call it together, and get the same.
    """
    if bool(torch.isfinite(loss + norm)):  # one synchronisation with the device for both
        return None
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    here = {name for name, g, _ in engine.named_gradients() if not g.isfinite().all()}
    anywhere = set().union(*engine.processes.gather_objects(here))
    for part in named_parts(engine.model):
        if part.name in anywhere:
            return f"the gradient of {part.name} is not finite"
    return f"the gradient norm is {norm.item()}"
