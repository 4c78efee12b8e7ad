"""What both optimizers share of Lookahead: showing the slow weights in place of the fast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class SlowWeights(torch.optim.Optimizer):
    """An optimizer that keeps each parameter's slow weights as `slow` in its state."""

    # On the class, so that a copied or unpickled optimizer has it too.
    _showing_slow_weights = False

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the slow weights, the algorithm's output; the fast return."""
        self.require_fast_weights("slow_weights()")
        held = [
            (parameter, state["slow"]) for parameter, state in self.state.items() if "slow" in state
        ]
        self._showing_slow_weights = True
        try:
            for parameter, slow in held:
                _swap(parameter, slow)
            yield
        finally:
            for parameter, slow in held:
                _swap(parameter, slow)
            self._showing_slow_weights = False

    def require_fast_weights(self, what: str) -> None:
        """Nothing that reads or moves the weights may run while slow and fast are exchanged."""
        assert not self._showing_slow_weights, f"{what} inside slow_weights()"

    def state_dict(self) -> dict[str, Any]:
        self.require_fast_weights("state_dict()")
        return super().state_dict()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: a sharded one's own part, any other whole."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def _swap(one: Tensor, other: Tensor) -> None:
    one, other = local_part(one), local_part(other)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
