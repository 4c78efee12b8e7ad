"""Stabilised Manifold Adam (Algorithm 2 of the paper): Adam in the Lie algebra of O(d).

A step has these phases, so that the host waits for the device twice, however many matrices it has:

    0. every gradient: that it is finite, before anything moves
    1. every matrix:  A = skew(XᵀG); moments; Δ; B += Δ; the size of what will be exponentiated
    2. one transfer:  all sizes to the host, which picks the products each matrix needs
    3. every matrix:  X ← X·exp(Δ), or the Lookahead step  Xslow ← Xslow·exp(B/2), X ← Xslow, B ← 0

Phases 1 and 3 run over chunks of a bank, as batched products. `manifold_adam_reference` is the same
algorithm for one matrix, written to be read. On tensor cores (manifold/tensor_core.py) a chunk goes
through all of it at once, and the host never waits.

A network has pairs (R, W) and computes with W. What is learned is W itself (`merged`), or M with
W = M·Rᵀ (`product`, as in the paper): then the optimizer holds M, pulls the gradients back to R and
M, moves these two, and writes W.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lipnext_scale import manifold
from lipnext_scale.manifold import ExpPlan, kernels, tensor_core
from lipnext_scale.manifold.exponential import RULES, default_tolerance, sizes_for, skew_square
from lipnext_scale.optim.lookahead_nadam import SlowWeights, local_part, swap

# How much of a bank is worked on at once. On the CPU a chunk of all operands should stay in the
# cache; on a GPU it need only be large enough to fill the device, and bounds the temporary memory.
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
# A start further from O(d) than this is a mistake of the caller, not rounding.
INITIAL_ORTHOGONALITY_LIMIT = 1e-4
SecondMomentInit = Literal["paper", "zero"]
Parametrisation = Literal["merged", "product"]
Products = Literal["auto", "fp32", "tensor_core"]


def adam_direction(
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Update both moments in place with a skew gradient and return Δ = -η·m̂/(√v̂ + ε).

    torch's fused Adam, one pass over each matrix [d, d], moves a zero by Δ. Δ is exactly skew: m is
    skew, v is symmetric, and every operation is elementwise and odd in m.
    """
    out = torch.empty_like(gradient) if out is None else out
    counted = torch.tensor(float(step) if bias_correction else 1e30)  # β^1e30 = 0: no correction
    torch._fused_adam_(
        out.zero_().unbind(0),
        gradient.unbind(0),
        exp_avg.unbind(0),
        exp_avg_sq.unbind(0),
        [],
        [counted] * out.shape[0],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    return out


def direction_of(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
) -> Tensor:
    """Δ of the moments as they are; after a step, the Δ of that step."""
    correction1, correction2 = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    return -lr / correction1 * exp_avg / ((exp_avg_sq / correction2).sqrt() + eps)


@dataclass
class Stack:
    """Matrices that move together: views [k, d, d] of X, of its gradient and of its state."""

    point: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    buffer: Tensor | None
    slow: Tensor | None
    lo: int = 2  # of its left operand on tensor cores. R has the other, so that M·Rᵀ is a product


@dataclass
class _Move:
    """What phase 3 needs to move a stack: X (or Xslow) by exp of `exponent`, in the Lie algebra."""

    stack: Stack
    exponent: Tensor
    square: Tensor | None
    sizes: Tensor
    synchronise: bool
    rule: str
    tolerance: float


class ManifoldAdam(SlowWeights):
    """Adam on O(d) for parameters [d, d], [n, d, d] or pairs [g, 2, d, d], with Lookahead and
    retraction inside.

    lookahead: synchronise with the slow weights every so many steps; 0 switches Lookahead off.
    second_moment_init: `zero` with Adam's bias correction, or `paper` (v0 = 1/d, no correction),
        which makes the first 1/(1-β2) steps tiny and suits runs of 10⁵ steps.
    exp_rule, exp_tolerance: see `lipnext_scale.manifold.fast_exp`; of fp32 products alone.
    retract_every: polar retraction every so many steps, beside the `retract()` at an epoch's end.
    parametrisation: `product` learns (R, M) of pairs (R, W = M·Rᵀ); `merged` every matrix itself.
    products: `fp32`, `tensor_core` (emulated on a CPU), or `auto`: tensor cores on CUDA.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        lookahead: int = 6,
        second_moment_init: SecondMomentInit = "zero",
        exp_rule: str = "bounded",
        exp_tolerance: float | None = None,
        retract_every: int = 0,
        parametrisation: Parametrisation = "merged",
        products: Products = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "lookahead": lookahead,
            "second_moment_init": second_moment_init,
            "exp_rule": exp_rule,
            "exp_tolerance": exp_tolerance,
            "retract_every": retract_every,
            "parametrisation": parametrisation,
            "products": products,
        }
        super().__init__(params, defaults)
        self._workspace = manifold.Workspace()
        self._operands: dict[Tensor, tuple[tuple[int, int], list[list[Tensor]]]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_hyperparameters(group)
        for index, parameter in enumerate(group["params"]):
            _check_on_manifold(_name(group, index), parameter, group["parametrisation"])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        scale: Tensor | None = None,
        usable: Tensor | None = None,
    ) -> float | None:
        """scale: of all gradients, for clipping. usable: false moves nothing; without it gradients
        that are not finite raise FloatingPointError, before anything moves."""
        self.require_fast_weights("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if usable is None:
            self.require_usable_gradients()
        on_device = [(g, p) for g, p in moving if uses_tensor_cores(g, p)]
        on_host = [(g, p) for g, p in moving if not uses_tensor_cores(g, p)]
        if on_host and usable is not None and not bool(usable):
            moving, on_host = on_device, []
        if on_host:
            self._step_in_phases(on_host, 1.0 if scale is None else float(scale))
        for group, parameter in on_device:
            self._step_on_tensor_cores(group, parameter, scale, usable)
        for group, parameter in moving:
            every = group["retract_every"]
            if every and self.state[parameter]["step"] % every == 0:
                self._retract(group, parameter, usable)
        return loss

    def require_usable_gradients(self) -> None:
        """Raise FloatingPointError before moments, buffers and weights change."""
        names: list[str] = []
        norms: list[Tensor] = []
        limits: list[float] = []
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None or local_part(parameter.grad).numel() == 0:
                    continue
                gradient = as_stack(parameter.grad)
                names.append(_name(group, index))
                norms.append(torch.linalg.vector_norm(gradient).double())
                # No entry of XᵀG is larger than that, and it is squared.
                limits.append(torch.finfo(gradient.dtype).max ** 0.5 / 2)
        found_values = torch.stack(norms).tolist() if norms else []
        for name, limit, found in zip(names, limits, found_values, strict=True):
            if not found <= limit:  # NaN is not below it either
                raise FloatingPointError(
                    f"the gradient of {name} is not finite, or its square is not: {found:g}"
                )

    # In float32, in phases

    def _step_in_phases(self, moving: list[tuple[dict[str, Any], Tensor]], scale: float) -> None:
        moves = []
        for group, parameter in moving:
            state = self._counted(group, parameter)
            pull_back_(group, parameter, state)
            step, learned = int(state["step"]), learned_stacks(group, parameter, state)
            moves += [self._measure(group, stack, step, scale) for stack in learned]
        sizes = torch.cat([move.sizes for move in moves])
        for move, plans in zip(moves, _plans(moves, sizes.tolist()), strict=True):
            _apply(move, plans, self._workspace)
        for group, parameter in moving:
            self._write_weights(group, parameter)

    def _measure(self, group: dict[str, Any], stack: Stack, step: int, scale: float) -> _Move:
        """Phase 1: moments, the direction Δ, the buffer B, the size that picks the exponential."""
        point, gradient, rule = stack.point, stack.gradient, group["exp_rule"]
        assert gradient is not None
        synchronise = is_lookahead_step(group, step)
        exponent = torch.empty_like(point)
        square = torch.empty_like(point) if rule == "bounded" else None
        sizes = torch.empty(point.shape[0], dtype=point.dtype, device=point.device)
        for part in chunks(point):
            delta = adam_direction(
                manifold.lie_gradient(point[part], gradient[part], self._workspace, scale),
                stack.exp_avg[part],
                stack.exp_avg_sq[part],
                step=step,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                bias_correction=group["second_moment_init"] == "zero",
                out=exponent[part],
            )
            if stack.buffer is not None:
                buffer = stack.buffer[part].add_(delta)
                if synchronise:
                    torch.mul(buffer, 0.5, out=delta)
            if square is not None:
                skew_square(delta, out=square[part])
            sizes[part] = sizes_for(rule, delta, None if square is None else square[part])
        tolerance = group["exp_tolerance"] or default_tolerance(point.dtype)
        return _Move(stack, exponent, square, sizes, synchronise, rule, tolerance)

    # On tensor cores

    def _step_on_tensor_cores(
        self, group: dict[str, Any], parameter: Tensor, scale: Tensor | None, usable: Tensor | None
    ) -> None:
        """The host waits for nothing: what depends on values is decided on the device."""
        state, device = self._counted(group, parameter), local_part(parameter).device
        scale = torch.ones((), device=device) if scale is None else scale.float()
        usable = torch.ones((), dtype=torch.bool, device=device) if usable is None else usable
        step, stacks = int(state["step"]), learned_stacks(group, parameter, state)
        operands = self._left_operands(parameter, state, stacks)
        for part, lefts in zip(chunks(stacks[0].point), operands, strict=True):
            gradients = [_clipped(stack, part, scale, usable) for stack in stacks]
            if group["parametrisation"] == "product":
                gradients = _pulled_back(lefts, gradients)
            for stack, left, gradient in zip(stacks, lefts, gradients, strict=True):
                _move_on_tensor_cores(group, stack, part, step, left, gradient, usable)
        self._write_weights(group, parameter)

    def _left_operands(
        self, parameter: Tensor, state: dict[str, Any], stacks: list[Stack]
    ) -> Iterator[list[Tensor]]:
        """X of all stacks as left operands of bf16x3 products, of one chunk after the other.

        Those that made W are still there, and are right unless something changed R or M since.
        """
        versions, kept = self._operands.pop(parameter, (None, []))
        if versions == _versions(parameter, state):
            while kept:
                yield kept.pop(0)
        else:
            for part in chunks(stacks[0].point):
                yield [kernels.split_left(stack.point[part], stack.lo) for stack in stacks]

    def _write_weights(self, group: dict[str, Any], parameter: Tensor) -> None:
        """W = M·Rᵀ of every pair in the product form."""
        if group["parametrisation"] == "merged":
            return
        state = self.state[parameter]
        rotations, factors = learned_stacks(group, parameter, state)
        operands, weight = [], as_pairs(parameter)[1]
        for part in chunks(weight):
            if not uses_tensor_cores(group, parameter):
                torch.bmm(factors.point[part], rotations.point[part].mT, out=weight[part])
                continue
            r, m = (kernels.split_left(s.point[part], s.lo) for s in (rotations, factors))
            tensor_core.product(m, r.mT, out=weight[part])
            operands.append([r, m])
        if operands:
            self._operands[parameter] = _versions(parameter, state), operands

    # State

    def _counted(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        state = self._state(group, parameter)
        state["step"] += 1
        return state

    def _state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Plain tensors beside this process's part of the parameter.

        Of a pair (R, W) in the product form they are those of (R, M), and `factor` is M.
        """
        state = self.state[parameter]
        if not state:
            point, paper = local_part(parameter), group["second_moment_init"] == "paper"
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["exp_avg"] = torch.zeros_like(point)
            state["exp_avg_sq"] = torch.full_like(point, 1 / point.shape[-1] if paper else 0)
            if group["lookahead"]:
                state["buffer"] = torch.zeros_like(point)
                state["slow"] = point.clone()
            if group["parametrisation"] == "product":
                rotations, weights = as_pairs(point)
                state["factor"] = weights @ rotations
                if group["lookahead"]:
                    as_pairs(state["slow"])[1].copy_(state["factor"])
                self._write_weights(group, parameter)
        return state

    @torch.no_grad()
    def initialise_state(self) -> None:
        """Create the state of the first step: something to load a checkpoint into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._complete(group, parameter, self._state(group, parameter))

    def state_dict(self) -> dict[str, Any]:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._complete(group, parameter, self.state.get(parameter, {}))
        return super().state_dict()

    @torch.no_grad()
    def _complete(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        """A step on tensor cores keeps the upper triangles of moments and B alone."""
        if uses_tensor_cores(group, parameter):
            for kind, sign in (("exp_avg", -1), ("exp_avg_sq", 1), ("buffer", -1)):
                for part in chunks(as_stack(state[kind])) if kind in state else ():
                    kernels.complete_(as_stack(state[kind])[part], sign)

    @torch.no_grad()
    def state_loaded(self) -> None:
        """After the state was loaded from a checkpoint, which has M and not W: write W."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self._write_weights(group, parameter)

    def set_step(self, step: int) -> None:
        """Set how many steps the state has seen, after it was loaded from a checkpoint."""
        for state in self.state.values():
            state["step"].fill_(step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._workspace, self._operands = manifold.Workspace(), {}

    @torch.no_grad()
    def _exchange_slow(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        for stack in learned_stacks(group, parameter, state):
            assert stack.slow is not None
            swap(stack.point, stack.slow)
        self._write_weights(group, parameter)

    @torch.no_grad()
    def retract(self) -> None:
        """X ← polar(X); Xslow ← X; B ← 0, for every matrix (the end of an epoch in Algorithm 2)."""
        self.require_fast_weights("retract()")
        for group in self.param_groups:
            for parameter in group["params"]:
                self._retract(group, parameter)

    def _retract(
        self, group: dict[str, Any], parameter: Tensor, usable: Tensor | None = None
    ) -> None:
        is_product = group["parametrisation"] == "product"
        state = self._state(group, parameter) if is_product else self.state.get(parameter, {})
        for stack in learned_stacks(group, parameter, state):
            for part in chunks(stack.point):
                point = stack.point[part]
                replace_(point, manifold.polar_retract(point), usable)
                if stack.slow is not None and stack.buffer is not None:
                    replace_(stack.slow[part], point, usable)
                    replace_(stack.buffer[part], torch.zeros_like(point), usable)
        self._write_weights(group, parameter)


def _name(group: dict[str, Any], index: int) -> str:
    names = group.get("param_names")
    return names[index] if names else f"parameter {index}"


def _plans(moves: list[_Move], sizes: list[float]) -> list[list[ExpPlan]]:
    """Phase 2: the plans of every stack, made before any matrix moves."""
    ends = accumulate(len(move.sizes) for move in moves)
    return [
        manifold.plan_exponentials(sizes[end - len(move.sizes) : end], move.rule, move.tolerance)
        for move, end in zip(moves, ends, strict=True)
    ]


def _apply(move: _Move, plans: list[ExpPlan], workspace: manifold.Workspace) -> None:
    """Phase 3: multiply by the exponentials; on a Lookahead step move the slow and follow."""
    stack = move.stack
    start = stack.slow if move.synchronise else stack.point
    assert start is not None
    for part in chunks(start):
        square = None if move.square is None else move.square[part]
        manifold.multiply_by_exp_(start[part], move.exponent[part], plans[part], square, workspace)
    if move.synchronise:
        assert stack.buffer is not None
        stack.point.copy_(start)
        stack.buffer.zero_()


def _versions(parameter: Tensor, state: dict[str, Any]) -> tuple[int, int]:
    """They change with (R, W) and with M."""
    factor = state.get("factor", parameter)
    return local_part(parameter)._version, local_part(factor)._version


def _clipped(stack: Stack, part: slice, scale: Tensor, usable: Tensor) -> Tensor:
    assert stack.gradient is not None
    return kernels.scaled_cast(stack.gradient[part], scale, usable)


def _pulled_back(lefts: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """`pull_back_` of bfloat16 gradients."""
    (r, m), (d_rotation, d_weight) = map(tensor_core.high_part, lefts), gradients
    d_rotation = tensor_core.rounded_product(d_weight.mT, m, add=d_rotation)
    return [d_rotation, tensor_core.rounded_product(d_weight, r)]


def _move_on_tensor_cores(
    group: dict[str, Any],
    stack: Stack,
    part: slice,
    step: int,
    left: Tensor,
    gradient: Tensor,
    usable: Tensor,
) -> None:
    """The step of some matrices; see manifold/tensor_core.py."""
    point, (beta1, beta2) = stack.point[part], group["betas"]
    synchronise, corrected = is_lookahead_step(group, step), group["second_moment_init"] == "zero"
    correction1, correction2 = (1 - b**step if corrected else 1.0 for b in (beta1, beta2))
    exponent, norms = kernels.moments_(
        tensor_core.rounded_product(tensor_core.high_part(left).mT, gradient),
        stack.exp_avg[part],
        stack.exp_avg_sq[part],
        None if stack.buffer is None else stack.buffer[part],
        usable,
        beta1,
        beta2,
        group["eps"] * correction2**0.5,
        -group["lr"] * correction2**0.5 / correction1,
        synchronise,
    )
    entry = group["lr"] * tensor_core.usual_entry(beta1, step)
    if synchronise:  # half the sum of so many, of which the first was the largest
        first = step - group["lookahead"] + 1
        entry = group["lr"] * tensor_core.usual_entry(beta1, first) * group["lookahead"] / 2
    forgotten = group["lookahead"] and not synchronise
    tolerance = tensor_core.FAST_TOLERANCE if forgotten else tensor_core.TOLERANCE
    squarings = tensor_core.squarings_for(entry, point.shape[-1], tolerance)
    operand, _ = tensor_core.exp_operand(exponent, norms, squarings, tolerance, 3 - stack.lo)
    if synchronise:
        assert stack.slow is not None
        slow = stack.slow[part]
        tensor_core.add_product_(slow, kernels.split_left(slow, stack.lo), operand)
        replace_(point, slow, usable)
    else:
        tensor_core.add_product_(point, left, operand)


# --------------------------------------------------------------------------------------------------
# Pairs (R, W), of which R and M are learned in the product form, W = M·Rᵀ.


def as_pairs(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Views [g, d, d] of the first and of the second matrices of pairs [g, 2, d, d]."""
    first, second = local_part(tensor).view(-1, 2, *tensor.shape[-2:]).unbind(1)
    return first, second


def learned_stacks(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> list[Stack]:
    """All matrices of the parameter as one stack; in the product form every R, and every M."""
    kinds = ("exp_avg", "exp_avg_sq", "buffer", "slow")
    tensors = [parameter, parameter.grad, *(state.get(kind) for kind in kinds)]
    if group["parametrisation"] == "merged":
        return [Stack(*(None if t is None else as_stack(t) for t in tensors))]  # type: ignore[arg-type]
    pairs = [(None, None) if t is None else as_pairs(t) for t in tensors]
    rotations, factors = Stack(*(one for one, _ in pairs)), Stack(*(two for _, two in pairs))  # type: ignore[arg-type]
    rotations.lo, factors.point = 1, state["factor"]
    return [rotations, factors]


def pull_back_(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
    """The gradients of (R, W) to those of (R, M), in place: dR += dWᵀ·M and dM = dW·R."""
    if group["parametrisation"] == "merged":
        return
    assert parameter.grad is not None
    (rotation, _), (d_rotation, d_weight) = as_pairs(parameter), as_pairs(parameter.grad)
    for part in chunks(rotation):
        d_rotation[part] += d_weight[part].mT @ state["factor"][part]
        d_weight[part] = d_weight[part] @ rotation[part]


def replace_(old: Tensor, new: Tensor, usable: Tensor | None) -> None:
    """old ← new, unless the step is not usable."""
    if usable is None:
        old.copy_(new)
    else:
        torch.where(usable, new, old, out=old)


def uses_tensor_cores(group: dict[str, Any], parameter: Tensor) -> bool:
    if group["products"] == "auto":
        return local_part(parameter).is_cuda and parameter.dtype == torch.float32
    return group["products"] == "tensor_core"


def is_lookahead_step(group: dict[str, Any], step: int) -> bool:
    return bool(group["lookahead"]) and step % group["lookahead"] == 0


def as_stack(tensor: Tensor | None) -> Tensor:
    """A view [k, d, d] of the matrices that this process has, free of autograd."""
    assert tensor is not None
    return local_part(tensor).view(-1, *tensor.shape[-2:])


def chunks(stack: Tensor) -> Iterator[slice]:
    """Slices of a stack [k, d, d] whose matrices are worked on together."""
    budget = CHUNK_BYTES["cuda" if stack.is_cuda else "cpu"]
    matrix_bytes = stack.shape[-1] * stack.shape[-2] * stack.element_size()
    length = max(1, budget // matrix_bytes)
    for start in range(0, stack.shape[0], length):
        yield slice(start, min(start + length, stack.shape[0]))


def _check_hyperparameters(group: dict[str, Any]) -> None:
    tolerance = group["exp_tolerance"]
    allowed = {
        "lr": (group["lr"] >= 0, "must be at least 0"),
        "betas": (all(0 <= beta < 1 for beta in group["betas"]), "must both be in [0, 1)"),
        "eps": (group["eps"] > 0, "must be positive"),
        "lookahead": (group["lookahead"] >= 0, "must be 0 (off) or a number of steps"),
        "retract_every": (group["retract_every"] >= 0, "must be 0 (off) or a number of steps"),
        "second_moment_init": (group["second_moment_init"] in ("paper", "zero"), "paper or zero"),
        "exp_rule": (group["exp_rule"] in RULES, f"must be one of {', '.join(RULES)}"),
        "exp_tolerance": (tolerance is None or tolerance > 0, "must be positive, or None"),
        "parametrisation": (
            group["parametrisation"] in get_args(Parametrisation),
            "must be merged or product",
        ),
        "products": (group["products"] in get_args(Products), "must be auto, fp32 or tensor_core"),
    }
    for key, (right, rule) in allowed.items():
        if not right:
            raise ValueError(f"{key} = {group[key]!r}: {rule}")


def _check_on_manifold(name: str, parameter: Tensor, parametrisation: str) -> None:
    shape = tuple(parameter.shape)
    takes = "square matrices [d, d], [n, d, d] or pairs [g, 2, d, d]"
    right = parameter.dim() in (2, 3, 4) and shape[-1] == shape[-2]
    if parametrisation == "product":
        takes = "pairs of square matrices [g, 2, d, d]"
        right = right and shape[-3:-2] == (2,)
    if not right:
        raise ValueError(f"{name} has shape {shape}: ManifoldAdam takes {takes}")
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} is {parameter.dtype}: ManifoldAdam keeps its matrices in float32 or float64"
        )
    if not parameter.is_meta:  # a meta tensor has no values yet
        require_orthogonal(name, parameter)


@torch.no_grad()
def require_orthogonal(name: str, matrices: Tensor) -> None:
    """Raise ValueError for a matrix or bank that Manifold Adam cannot start from."""
    stack = as_stack(matrices)
    worst = max(
        (manifold.orthogonality_error(stack[part]).max().item() for part in chunks(stack)),
        default=0.0,  # a rank may own none of a bank's matrices
    )
    if not worst < INITIAL_ORTHOGONALITY_LIMIT:  # NaN is not below it either
        raise ValueError(
            f"{name} is not orthogonal: ‖XᵀX-I‖_F/√d = {worst:.3g}, "
            f"above {INITIAL_ORTHOGONALITY_LIMIT:g}; "
            "start from lipnext_scale.manifold.random_orthogonal or polar_retract"
        )


def manifold_adam_reference(
    start: Tensor,
    gradients: Iterable[Tensor],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    lookahead: int = 6,
    second_moment_init: SecondMomentInit = "zero",
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 for one matrix with exact exponentials: (X, Xslow) after the given gradients.

    Steps are counted from one here: Lookahead acts on every `lookahead`-th.
    """
    x, slow = start.clone(), start.clone()
    m, buffer = torch.zeros_like(x), torch.zeros_like(x)
    v = torch.full_like(x, 1 / x.shape[-1] if second_moment_init == "paper" else 0)
    for t, gradient in enumerate(gradients, start=1):
        # Skew but for round-off, which Adam would make as large as the rest: so it is removed.
        a = manifold.skew(manifold.lie_gradient_reference(x, gradient))
        m = betas[0] * m + (1 - betas[0]) * a
        v = betas[1] * v + (1 - betas[1]) * a * a
        m_hat, v_hat = m, v
        if second_moment_init == "zero":
            m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        delta = -lr * m_hat / (v_hat.sqrt() + eps)
        buffer = buffer + delta
        if t % lookahead:
            x = x @ torch.linalg.matrix_exp(delta)
        else:
            slow = slow @ torch.linalg.matrix_exp(buffer / 2)
            x, buffer = slow, torch.zeros_like(buffer)
    return x, slow
