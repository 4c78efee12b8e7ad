"""NAdam with Lookahead, for the parameters that are not orthogonal (biases, positions, head)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lipnext_scale.optim.slow_weights import SlowWeights, local_part


class LookaheadNAdam(SlowWeights, torch.optim.NAdam):
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
        torch.optim.NAdam.__init__(self, params, lr=lr, betas=betas, eps=eps)
        self.defaults["lookahead"] = lookahead
        for group in self.param_groups:
            group.setdefault("lookahead", lookahead)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.require_fast_weights("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (parameter, group["lookahead"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and group["lookahead"]
        ]
        starts = {p: p.detach().clone() for p, _ in moving if "slow" not in self.state.get(p, {})}
        torch.optim.NAdam.step(self)
        for parameter, lookahead in moving:
            state = self.state[parameter]
            if parameter in starts:
                state["slow"] = starts[parameter]
            if int(state["step"]) % lookahead == 0:
                fast, slow = local_part(parameter), local_part(state["slow"])
                fast.copy_(slow.lerp_(fast, 0.5))
        return loss

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """What torch's NAdam then updates element by element: this rank's part of everything.

        On DTensors each of its dozen operations would look for a sharding strategy, which takes
        longer than the arithmetic on biases.
        """
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex

    @torch.no_grad()
    def initialise_state(self) -> None:
        """Make the state that the first step would make: something to load a checkpoint into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state:
                    continue
                state["step"] = torch.tensor(0.0)
                state["mu_product"] = torch.ones(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if group["lookahead"]:
                    state["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def synchronise(self) -> None:
        """slow ← fast: beside a retraction of the matrices, which does the same to theirs."""
        self.require_fast_weights("synchronise()")
        for parameter, state in self.state.items():
            if "slow" in state:
                local_part(state["slow"]).copy_(local_part(parameter))
