"""NAdam with Lookahead, for the parameters that are not orthogonal (biases, positions, head)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# --------------------------------------------------------------------------------------------------
# What both optimizers share of Lookahead: showing the slow weights in place of the fast.


class SlowWeights(torch.optim.Optimizer):
    """An optimizer that keeps each parameter's slow weights as `slow` in its state."""

    # On the class, so that a copied or unpickled optimizer has it too.
    _showing_slow_weights = False

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Inside, the parameters hold the slow weights, the algorithm's output; the fast return."""
        self.require_fast_weights("slow_weights()")
        held = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if "slow" in self.state.get(parameter, {})
        ]
        self._showing_slow_weights = True
        try:
            for group, parameter in held:
                self._exchange_slow(group, parameter)
            yield
        finally:
            for group, parameter in held:
                self._exchange_slow(group, parameter)
            self._showing_slow_weights = False

    @torch.no_grad()
    def _exchange_slow(self, group: dict[str, Any], parameter: Tensor) -> None:
        swap(local_part(parameter), local_part(self.state[parameter]["slow"]))

    def require_fast_weights(self, what: str) -> None:
        """Nothing that reads or moves the weights may run while slow and fast are exchanged."""
        assert not self._showing_slow_weights, f"{what} inside slow_weights()"

    def state_dict(self) -> dict[str, Any]:
        self.require_fast_weights("state_dict()")
        return super().state_dict()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: a sharded one's own part, any other whole."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def swap(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


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
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        scale: Tensor | None = None,
        usable: Tensor | None = None,
    ) -> float | None:
        """scale: of all gradients, for clipping. usable: false moves nothing; it is not read
        from a device."""
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
        if usable is not None and usable.device.type == "cpu" and bool(usable):
            usable = None  # the host knows, and copies nothing
        before = None if usable is None else self._copies()
        starts = {p: p.detach().clone() for p, _ in moving if "slow" not in self.state.get(p, {})}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None and scale is not None:
                local_part(parameter.grad).mul_(scale)
        torch.optim.NAdam.step(self)
        for parameter, lookahead in moving:
            state = self.state[parameter]
            if parameter in starts:
                state["slow"] = starts[parameter]
            if int(state["step"]) % lookahead == 0:
                fast, slow = local_part(parameter), local_part(state["slow"])
                fast.copy_(slow.lerp_(fast, 0.5))
        if usable is not None and before is not None:
            for tensor, old in before:
                torch.where(usable, tensor, old, out=tensor)
        return loss

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        """(tensor, copy) of weights and state: what a step that is not usable returns to.

        They are small, and the host need not know whether it was one. Its counters do move on,
        until `set_step`.
        """
        self.initialise_state()
        tensors = []
        for parameter, state in self.state.items():
            kept = [parameter, *(state[k] for k in ("exp_avg", "exp_avg_sq", "slow") if k in state)]
            tensors += [local_part(tensor) for tensor in kept]
        return [(tensor, tensor.clone()) for tensor in tensors]

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Give torch's NAdam this rank's local tensors, which it updates element by element.

        On DTensors each of its dozen operations would look up a sharding strategy, which takes
        longer than the arithmetic on biases.
        """
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local_part, tensors)
        return has_complex

    @torch.no_grad()
    def initialise_state(self) -> None:
        """Create the state of the first step: something to load a checkpoint into."""
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
    def set_step(self, step: int) -> None:
        """How many updates the state has seen."""
        for group in self.param_groups:
            product = torch.ones(())  # torch's, in its precision
            for t in range(1, step + 1):
                decay = 0.96 ** (t * group["momentum_decay"])
                product *= group["betas"][0] * (1.0 - 0.5 * decay)
                if not product:
                    break
            for state in (self.state[p] for p in group["params"] if p in self.state):
                state["step"].fill_(step)
                state["mu_product"].copy_(product)

    @torch.no_grad()
    def synchronise(self) -> None:
        """slow ← fast: beside a retraction of the matrices, which does the same to theirs."""
        self.require_fast_weights("synchronise()")
        for parameter, state in self.state.items():
            if "slow" in state:
                local_part(state["slow"]).copy_(local_part(parameter))
