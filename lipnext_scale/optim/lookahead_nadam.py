"""NAdam with Lookahead, for the parameters that are not orthogonal (biases, positions, head)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lipnext_scale.optim.manifold_adam import swap_


class LookaheadNAdam(torch.optim.NAdam):
    """torch's NAdam; every `lookahead` steps slow ← (slow + fast)/2 and fast ← slow. 0: never."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        lookahead: int = 6,
    ) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead = {lookahead}: must be 0 (off) or a number of steps")
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.lookahead = lookahead
        self._showing_slow_weights = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert not self._showing_slow_weights, "step() inside slow_weights()"
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        starts = {
            p: p.detach().clone()
            for p in moving
            if self.lookahead and "slow" not in self.state.get(p, {})
        }
        super().step()
        for parameter in moving if self.lookahead else []:
            state = self.state[parameter]
            if parameter in starts:
                state["slow"] = starts[parameter]
            if int(state["step"]) % self.lookahead == 0:
                parameter.copy_(state["slow"].lerp_(parameter, 0.5))
        return loss

    @torch.no_grad()
    def synchronise(self) -> None:
        """slow ← fast: beside a retraction of the matrices, which does the same to theirs."""
        for parameter, state in self.state.items():
            if "slow" in state:
                state["slow"].copy_(parameter)

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the slow weights; the fast ones return after."""
        assert not self._showing_slow_weights, "slow_weights() is already open"
        held = [
            (parameter, state["slow"]) for parameter, state in self.state.items() if "slow" in state
        ]
        self._showing_slow_weights = True
        try:
            for parameter, slow in held:
                swap_(parameter, slow)
            yield
        finally:
            for parameter, slow in held:
                swap_(parameter, slow)
            self._showing_slow_weights = False
