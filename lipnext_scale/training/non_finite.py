"""Steps whose loss or gradient is not finite: counted over the run, and skipped or refused.

A step of the run is a batch of its data order. With either policy the step, the schedule and the
epochs follow the data, so that they end where they would have:

    fail  the run ends before the update
    skip  the batch makes no update

The optimizers count the updates in the weights, which are then fewer than the steps. All ranks
decide by the same numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipnext_scale.config.recipe import RunConfig
from lipnext_scale.distributed import Engine
from lipnext_scale.utils.errors import RunFailed


@dataclass
class NonFinitePolicy:
    """count: such steps so far; missing: steps that left no update in the weights."""

    run: RunConfig
    count: int = 0
    missing: int = 0

    def updates(self, step: int) -> int:
        """The optimizers' own count after so many steps of the run."""
        return step - self.missing

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count, "missing": self.missing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.missing = state["count"], state["missing"]

    def skip(self, step: int, what: str) -> str:
        """Count the step that would be number `step`; returns a line to print, or ends the run."""
        limit = self.run.non_finite_limit
        if self.run.on_non_finite == "fail":
            raise RunFailed(f"step {step}: {what}; the weights were not updated")
        if self.count >= limit:
            raise RunFailed(
                f"step {step}: {what}; run.non_finite_limit = {limit} allows no more such steps "
                f"after {self.count}; the weights were not updated"
            )
        self.count += 1
        self.missing += 1
        counted = f"{self.count} of at most {limit} such steps"
        return f"warning: step {step}: {what} ({counted}); its batch is skipped"

    def metrics(self) -> dict[str, int]:
        return {} if self.run.on_non_finite == "fail" else {"train/non_finite_steps": self.count}


def what_is_not_finite(engine: Engine, loss: Tensor, norm: Tensor) -> str | None:
    """The loss, or the first tensor whose gradient is not finite, in words; None if all is finite.

    All ranks must call it together, and get the same.
    """
    if bool(torch.isfinite(loss + norm)):  # one synchronisation with the device for both
        return None
    if not torch.isfinite(loss):
        return f"the loss is {loss.item()}"
    reports = engine.processes.gather_objects(engine.not_finite())
    anywhere = {name for names in reports for name in names}
    for name, _ in engine.model.named_parameters():
        if name in anywhere:
            return f"the gradient of {name} is not finite"
    return f"the gradient norm is {norm.item()}"
