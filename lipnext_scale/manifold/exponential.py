"""exp(A) of small skew matrices: FastExp of the paper (eq. 5), and a rule with a proven error.

A truncated Taylor series E of exp(A) is a polynomial in A, so with A² formed once

    order 2:  E = I + A + A²/2                            no further product
    order 3:  E = I + A + A²·(I/2 + A/6)                  one more
    order 4:  E = I + A + A²·(I/2 + A/6 + A²/24)          one more

and X·E = X + X·(E - I) is the last product. Which order a matrix gets is decided on the host from
one number each (`plan_exponentials`); matrices that need the same products are then multiplied as
one batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# Scratch memory that is used again instead of allocated anew.


class Workspace:
    """Named buffers for temporaries of one kind of loop.

    On the CPU every large allocation is fresh memory from the system, and touching it first costs
    page faults: more than the elementwise work done in it. On a GPU the caching allocator does this
    job, so there nothing is kept.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, model: Tensor, row_padding: int = 0) -> Tensor:
        """A buffer with the shape, type and device of `model`, its content undefined.

        With `row_padding` every row is followed by so many unused numbers. A matrix that is read
        along its columns needs that on the CPU: a row length that is a power of two puts a whole
        column into a few cache lines (the transposed difference in `lie_gradient`: 4.5 times faster
        at d = 1024).
        """
        if model.device.type != "cpu":
            return torch.empty(model.shape, dtype=model.dtype, device=model.device)
        *outer, columns = model.shape
        stored = (*outer, columns + row_padding)
        needed = math.prod(stored)
        kept = self._buffers.get(name)
        if kept is None or kept.dtype != model.dtype or kept.numel() < needed:
            kept = torch.empty(needed, dtype=model.dtype)
            self._buffers[name] = kept
        return kept[:needed].view(stored)[..., :columns]


# ‖A‖_F below the first number → that order (eq. 5); from 1 on the exact exponential.
PAPER_THRESHOLDS = ((0.05, 2), (0.25, 3), (1.0, 4))
EXACT = 0
RULES = ("paper", "bounded")
SMALLEST_BLOCK = 64  # of `skew_square`: products of smaller ones are slow


@dataclass(frozen=True)
class ExpPlan:
    """How to exponentiate a matrix: Taylor `order` (EXACT: matrix_exp) of A/2^s, s squarings."""

    order: int
    squarings: int = 0

    @property
    def cost_class(self) -> tuple[str, int]:
        """Matrices of one class need the same products, so they can share a batch."""
        if self.order == EXACT:
            return ("exact", 0)
        if self.squarings:
            return ("scaled", self.squarings)
        return ("square", 0) if self.order == 2 else ("tail", 0)


def exp_reference(matrix: Tensor) -> Tensor:
    """exp(A) in float64."""
    return torch.linalg.matrix_exp(matrix.double())


def taylor_exp_reference(matrix: Tensor, order: int) -> Tensor:
    """I + A + A²/2! + … + A^order/order!, term by term."""
    term = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    total = term.clone()
    for power in range(1, order + 1):
        term = term @ matrix / power
        total = total + term
    return total


def orthogonality_loss_bound(rho: float, order: int) -> float:
    """An upper bound of ‖EᵀE - I‖₂ for the Taylor polynomial E of a skew A with ‖A‖₂ ≤ rho.

    The eigenvalues of A are ±iλ, so those of EᵀE are |p(iλ)|². For example order 2 gives
    |1 + iλ - λ²/2|² = 1 + λ⁴/4 exactly; orders 3 and 4 follow in the same way.
    """
    square = rho * rho
    if order == 2:
        return square**2 / 4
    if order == 3:
        return square**2 / 12 * (1 + square / 3)
    if order == 4:
        return square**3 / 72 * (1 + square / 8)
    raise ValueError(f"order = {order}: must be 2, 3 or 4")


def default_tolerance(dtype: torch.dtype) -> float:
    """Twice the machine precision: what storing the result costs anyway."""
    return 2 * torch.finfo(dtype).eps


def plan_exponentials(sizes: Sequence[float], rule: str, tolerance: float) -> list[ExpPlan]:
    """A plan for each matrix from its size: ‖A‖_F (`paper`), ρ = ‖A²‖_F^½ ≥ ‖A‖₂ (`bounded`)."""
    if not all(math.isfinite(size) for size in sizes):
        raise FloatingPointError("the update of a matrix is not finite")
    if rule == "paper":
        return [_paper_plan(size) for size in sizes]
    if rule == "bounded":
        return [_bounded_plan(size, tolerance) for size in sizes]
    raise ValueError(f"rule = {rule!r}: must be one of {', '.join(RULES)}")


def _paper_plan(frobenius_norm: float) -> ExpPlan:
    for threshold, order in PAPER_THRESHOLDS:
        if frobenius_norm < threshold:
            return ExpPlan(order)
    return ExpPlan(EXACT)


def _bounded_plan(rho: float, tolerance: float) -> ExpPlan:
    """The cheapest order under the tolerance; above order 4, scale and square.

    Order 3 costs what order 4 costs and is never better, so it is not used. E is normal, so
    squaring it s times takes an eigenvalue 1+δ of EᵀE to (1+δ)^(2^s): that, less one, must stay
    under the tolerance.
    """
    if orthogonality_loss_bound(rho, 2) <= tolerance:
        return ExpPlan(2)
    squarings = 0
    while loss_after_squaring(rho, squarings) > tolerance:
        squarings += 1
    return ExpPlan(4, squarings)


def loss_after_squaring(rho: float, squarings: int) -> float:
    once = orthogonality_loss_bound(rho / 2**squarings, 4)
    return math.expm1(min(2**squarings * math.log1p(once), 700.0))


def sizes_for(rule: str, matrix: Tensor, square: Tensor | None = None) -> Tensor:
    """The number per matrix that `plan_exponentials` wants. No host synchronisation."""
    if rule == "paper":
        return torch.linalg.matrix_norm(matrix)
    return torch.linalg.matrix_norm(matrix @ matrix if square is None else square).sqrt()


def skew_square(matrix: Tensor, out: Tensor) -> Tensor:
    """A² of skew matrices [k, d, d].

    It is symmetric: on a CPU, where that pays, four rows of blocks are computed from the diagonal
    on, 10 of 16 blocks, and mirrored.
    """
    block = matrix.shape[-1] // 4
    if matrix.is_cuda or block < SMALLEST_BLOCK:
        return torch.bmm(matrix, matrix, out=out)
    for a, square in zip(matrix, out, strict=True):
        for start in (0, block, 2 * block, 3 * block):
            rows = slice(start, start + block if start < 3 * block else None)
            torch.mm(a[rows], a[:, start:], out=square[rows, start:])
            square[rows, :start] = square[:start, rows].mT
    return out


def fast_exp(matrix: Tensor, rule: str = "paper", tolerance: float | None = None) -> Tensor:
    """exp(A) of skew matrices [..., d, d] by the rule `paper` or `bounded`."""
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    tolerance = default_tolerance(matrix.dtype) if tolerance is None else tolerance
    square = stack @ stack
    plans = plan_exponentials(sizes_for(rule, stack, square).tolist(), rule, tolerance)
    identity = torch.eye(stack.shape[-1], dtype=stack.dtype, device=stack.device)
    result, workspace = identity.repeat(stack.shape[0], 1, 1), Workspace()
    for part, run in _runs_of_one_class(plans):
        result[part] += _exp_minus_identity(stack[part], square[part], run, workspace)
    return result.reshape(matrix.shape)


def multiply_by_exp_(
    point: Tensor,
    matrix: Tensor,
    plans: Sequence[ExpPlan],
    square: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """X ← X·exp(A) in place for stacks [k, d, d], by plan. A² may be given if it is known."""
    workspace = workspace or Workspace()
    for part, run in _runs_of_one_class(plans):
        x, a = point[part], matrix[part]
        if square is not None:
            a_square = square[part]
        else:
            a_square = skew_square(a, out=workspace.like("square", a, row_padding=16))
        change = _exp_minus_identity(a, a_square, run, workspace)
        # X + X·(E-I), not X·E: the small change is not rounded against the identity first.
        x += torch.bmm(x, change, out=workspace.like("product", x))
    return point


def _runs_of_one_class(plans: Sequence[ExpPlan]) -> Iterator[tuple[slice, list[ExpPlan]]]:
    """Neighbouring matrices of one cost class as slices: views, so batching them copies nothing."""
    start = 0
    for _, group in groupby(plans, key=lambda plan: plan.cost_class):
        run = list(group)
        yield slice(start, start + len(run)), run
        start += len(run)


def _exp_minus_identity(
    matrix: Tensor, square: Tensor, run: list[ExpPlan], workspace: Workspace
) -> Tensor:
    """exp(A) - I for matrices of one cost class."""
    kind, squarings = run[0].cost_class
    if kind == "exact":
        change = torch.linalg.matrix_exp(matrix)
        change.diagonal(dim1=-2, dim2=-1).sub_(1)
        return change
    if kind == "square":
        return torch.add(matrix, square, alpha=0.5, out=workspace.like("change", matrix))
    if kind == "tail":
        return _taylor_minus_identity(matrix, square, [plan.order for plan in run], workspace)
    scale = 0.5**squarings
    orders = [plan.order for plan in run]
    change = _taylor_minus_identity(matrix * scale, square * scale**2, orders, workspace)
    for _ in range(squarings):  # (I+F)² - I = 2F + F²
        change = (change @ change).add_(change, alpha=2)
    return change


def _taylor_minus_identity(
    matrix: Tensor, square: Tensor, orders: list[int], workspace: Workspace
) -> Tensor:
    """A + A²·(3I + A + c·A²)/6 with c = 1/4 where the order is 4 and 0 where it is 3."""
    tail = workspace.like("tail", square)
    if all(order == 4 for order in orders):
        torch.add(matrix, square, alpha=1 / 4, out=tail)
    else:
        coefficients = [1 / 4 if order == 4 else 0.0 for order in orders]
        fourth = torch.tensor(coefficients, dtype=square.dtype, device=square.device)
        torch.addcmul(matrix, square, fourth[:, None, None], out=tail)
    tail.diagonal(dim1=-2, dim2=-1).add_(3)
    change = workspace.like("change", matrix)
    return torch.baddbmm(matrix, square, tail, alpha=1 / 6, out=change)
