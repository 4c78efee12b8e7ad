"""The elementwise passes between the tensor-core products of a manifold step, each one operator.

A product of two float32 matrices runs on bf16 tensor cores as one product of thrice the inner
length. With hi = bf16(x) and lo = bf16(x - hi), |x - hi - lo| ≤ 2^-17·|x| and |lo| ≤ 2^-8·|x|, so

    [hi_a | hi_a | lo_a] · [hi_b ; lo_b ; hi_b] = hi_a·hi_b + hi_a·lo_b + lo_a·hi_b ≈ a·b

misses at most 2^-15·|a||b|: half of it is lo·lo. `split_left` and `split_right` make the operands;
`lo` is the third that has lo, 2 in one of them and 1 in the other.

Stacks are [k, d, d]. Each operator is its reference on the CPU and one launch of a Triton kernel on
CUDA, which reads and writes every number once; of a skew or symmetric matrix the upper half alone,
unless a product needs both. There a stack may have any stride between its matrices, so that it can
be a view; each matrix is contiguous.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar, cast, no_type_check

import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------
# References: what the operators compute.


def split_left_reference(x: Tensor, lo: int) -> Tensor:
    """[hi | hi | lo] or [hi | lo | hi], bf16 [k, d, 3d]."""
    return torch.cat(_thirds(x, lo), dim=2)


def split_right_reference(x: Tensor, lo: int) -> Tensor:
    """[hi ; lo ; hi] or [hi ; hi ; lo], bf16 [k, 3d, d]."""
    return torch.cat(_thirds(x, lo), dim=1)


def _thirds(x: Tensor, lo: int) -> list[Tensor]:
    hi = x.bfloat16()
    rest = (x - hi).bfloat16()
    return [hi, rest, hi] if lo == 1 else [hi, hi, rest]


def scaled_cast_reference(x: Tensor, factor: Tensor, usable: Tensor) -> Tensor:
    """bf16(x·factor), or 0 where a step is not usable, whatever x and factor are."""
    return torch.where(usable, x * factor, 0).bfloat16()


def moments_reference_(
    product: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    buffer: Tensor | None,
    usable: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    synchronise: bool,
) -> tuple[Tensor, Tensor]:
    """Adam's direction from P = XᵀG: the exponent of this step in bf16, and for each matrix some
    numbers whose sum is the square of its Frobenius norm.

    A = skew(P); m ← β1·m + (1-β1)·A; v ← β2·v + (1-β2)·A²; Δ = bf16(scale·m / (√v + eps)); B += Δ.
    The exponent is Δ; on a step that synchronises it is bf16(B/2), and B ← 0. A step that is not
    usable changes nothing, and its exponent is 0.

    Δ is rounded before B adds it up, so that B is the sum of what the weights really moved by.
    Rounding to nearest is odd, so Δ stays exactly skew. m and B must be skew and v symmetric: the
    kernel reads and writes their upper tiles alone, see `complete_`. The caller puts Adam's bias
    corrections into `scale` and `eps`, as `direction_of` does.
    """
    a = (product.float() - product.mT.float()) / 2
    m = beta1 * exp_avg + (1 - beta1) * a
    v = beta2 * exp_avg_sq + (1 - beta2) * a * a
    exponent = (scale * m / (v.sqrt() + eps)).bfloat16()
    updates = [(exp_avg, m), (exp_avg_sq, v)]
    if buffer is not None:
        total = buffer + exponent
        if synchronise:
            exponent, total = (total / 2).bfloat16(), torch.zeros_like(total)
        updates.append((buffer, total))
    for old, new in updates:
        old.copy_(torch.where(usable, new, old))
    exponent = torch.where(usable, exponent, 0)
    parts = _parts_shape(product).zero_()
    parts[:, 0] = exponent.float().square().sum((1, 2))
    return exponent, parts


def complete_(stack: Tensor, sign: int) -> None:
    """Write the lower triangles of skew (sign -1) or symmetric (1) matrices from the upper ones."""
    stack.copy_(stack.triu() + sign * stack.triu(1).mT)


def shrink_reference(parts: Tensor, reach: float) -> Tensor:
    """t = min(1, reach/ρ) of each matrix, ρ = ‖A‖_F/√2, from the parts of ‖A‖_F²."""
    rho = (parts.sum(1) / 2).sqrt()
    return reach / rho.clamp(min=reach)


CUBIC = 0.1464466094067262  # (2-√2)/4


def tail_operands_reference(
    square: Tensor, exponent: Tensor, shrink: Tensor
) -> tuple[Tensor, Tensor]:
    """bf16 of S = A² and of c·t³·A + c²·t⁴·S, t the number of each matrix in `shrink`.

    A is skew, so S is symmetric but for the rounding of its sums: its upper triangle stands for
    both halves.

    Their product ends p = 1 + tA + (tA)²/2 + c·(tA)³ + c²·(tA)⁴. With Taylor's 1/6 and 1/24 its
    eigenvalues p(iλ) have |p|² = 1 - λ⁶/72 + …; with c = CUBIC they have |p|² = 1 + c⁴·λ⁸, so
    more orthogonal for the same products. It leaves exp(tA) by 0.02·λ³, in the angle alone.
    """
    t, c = shrink[:, None, None], CUBIC
    square = square.triu() + square.triu(1).mT
    return square.bfloat16(), (c * t**3 * exponent + c**2 * t**4 * square).bfloat16()


def change_right_reference(
    square: Tensor, exponent: Tensor, tail: Tensor, shrink: Tensor, lo: int
) -> Tensor:
    """`split_right` of C = t·A + t²/2·S + tail, about exp(tA) - I; bf16 [k, 3d, d]."""
    t, square = shrink[:, None, None], square.triu() + square.triu(1).mT
    return split_right_reference(t * exponent + t**2 / 2 * square + tail, lo)


# --------------------------------------------------------------------------------------------------
# Shapes: what the operators return for fake tensors. Results are contiguous.


def _split_left_shape(x: Tensor, *_: Any) -> Tensor:
    k, d = x.shape[:2]
    return x.new_empty(k, d, 3 * d, dtype=torch.bfloat16)


def _split_right_shape(x: Tensor, *_: Any) -> Tensor:
    k, d = x.shape[:2]
    return x.new_empty(k, 3 * d, d, dtype=torch.bfloat16)


def _same_shape(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


def _parts_shape(product: Tensor) -> Tensor:
    tiles = _ceil(product.shape[-1], TILE)
    return product.new_empty(len(product), tiles * (tiles + 1) // 2, dtype=torch.float32)


def _moments_shape(product: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _same_shape(product), _parts_shape(product)


# --------------------------------------------------------------------------------------------------
# Kernels. Plain functions until `_jit` makes them Triton's, which only a GPU needs.
# Triton's interpreter, which the tests use, cannot compute in bf16: values are float32 until they
# are stored.

# triton.language, once a kernel is launched; until then, what annotations need of it.
tl: Any = SimpleNamespace(constexpr="constexpr")


@no_type_check
def _split_left_kernel(
    x, out, stride, d, LO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < d) & (column < d)
    value = tl.load(x + batch * stride + row * d + column, mask=inside)
    hi = value.to(tl.bfloat16)
    lo = (value - hi.to(tl.float32)).to(tl.bfloat16)
    out += batch * (3 * d * d) + row * (3 * d) + column
    tl.store(out, hi, mask=inside)
    tl.store(out + (3 - LO) * d, hi, mask=inside)
    tl.store(out + LO * d, lo, mask=inside)


# Where halves do not matter a matrix is one run of d² numbers, and [hi ; lo ; hi] three such runs.
@no_type_check
def _split_right_kernel(x, out, stride, d, LO: tl.constexpr, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < d * d
    value = tl.load(x + batch * stride + entry, mask=inside)
    hi = value.to(tl.bfloat16)
    lo = (value - hi.to(tl.float32)).to(tl.bfloat16)
    out += batch * (3 * d * d) + entry
    tl.store(out, hi, mask=inside)
    tl.store(out + (3 - LO) * d * d, hi, mask=inside)
    tl.store(out + LO * d * d, lo, mask=inside)


@no_type_check
def _scaled_cast_kernel(x, out, factor, usable, stride, d, BLOCK: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < d * d
    value = tl.load(x + batch * stride + entry, mask=inside) * tl.load(factor)
    value = tl.where(tl.load(usable), value, 0.0)
    tl.store(out + batch * (d * d) + entry, value.to(tl.bfloat16), mask=inside)


@no_type_check
def _moments_kernel(
    product,
    exp_avg,
    exp_avg_sq,
    buffer,
    exponent,
    parts,
    usable,
    product_stride,
    exp_avg_stride,
    exp_avg_sq_stride,
    buffer_stride,
    count,
    d,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    scale,
    SYNCHRONISE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tiles (i, j), i ≤ j. The exponent, which goes into a product, has its negative transpose
    as tile (j, i). A tile on the diagonal is stored once; it is skew because every operation here
    is odd in (A, m, B) or even.
    """
    i, j = tl.program_id(1), tl.program_id(0)
    if j < i:
        return
    batch = tl.program_id(2).to(tl.int64)
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    upper, lower = row * d + column, column * d + row
    inside = (row < d) & (column < d)
    # A step that is not usable reads nothing, so no NaN gets in, and stores no moments.
    end = tl.where(tl.load(usable), d, 0)
    live = (row < end) & (column < end)

    product += batch * product_stride
    exp_avg += batch * exp_avg_stride
    exp_avg_sq += batch * exp_avg_sq_stride
    exponent += batch * (d * d)
    a = tl.load(product + upper, mask=live, other=0.0).to(tl.float32)
    a = (a - tl.load(product + lower, mask=live, other=0.0).to(tl.float32)) * 0.5
    m = beta1 * tl.load(exp_avg + upper, mask=live, other=0.0) + rest1 * a
    v = beta2 * tl.load(exp_avg_sq + upper, mask=live, other=0.0) + rest2 * a * a
    # Rounded as IEEE says: the approximate forms need not be odd.
    move = tl.div_rn(scale * m, tl.sqrt_rn(v) + eps).to(tl.bfloat16).to(tl.float32)
    if buffer is not None:
        buffer += batch * buffer_stride
        total = tl.load(buffer + upper, mask=live, other=0.0) + move
        if SYNCHRONISE:
            move = (total * 0.5).to(tl.bfloat16).to(tl.float32)
            total = tl.zeros_like(total)
        tl.store(buffer + upper, total, mask=live)
    move = tl.where(live, move, 0.0)
    tl.store(exp_avg + upper, m, mask=live)
    tl.store(exp_avg_sq + upper, v, mask=live)
    tl.store(exponent + upper, move.to(tl.bfloat16), mask=inside)
    norm = tl.sum(tl.sum(move * move, axis=1), axis=0)
    if i < j:
        tl.store(exponent + lower, (-move).to(tl.bfloat16), mask=inside)
        norm = norm * 2
    tl.store(parts + batch * count + j * (j + 1) // 2 + i, norm)


@no_type_check
def _shrink_kernel(parts, out, count, reach, BLOCK: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.load(parts + batch * count + part, mask=part < count, other=0.0)
    rho = tl.sqrt_rn(tl.sum(total, axis=0) * 0.5)
    rho = tl.where(rho <= reach, reach, rho)  # NaN stays NaN
    tl.store(out + batch, tl.div_rn(reach, rho))


@no_type_check
def _tail_operands_kernel(
    square, exponent, shrink, out, tail, square_stride, exponent_stride, d, TILE: tl.constexpr
):
    i, j = tl.program_id(1), tl.program_id(0)
    if j < i:
        return
    batch = tl.program_id(2).to(tl.int64)
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    upper, lower = row * d + column, column * d + row
    inside = (row < d) & (column < d)

    t = tl.load(shrink + batch)
    s = tl.load(square + batch * square_stride + upper, mask=inside, other=0.0)
    if i == j:
        s = tl.where(row <= column, s, tl.trans(s))
    a = tl.load(exponent + batch * exponent_stride + upper, mask=inside).to(tl.float32)
    c = 0.1464466094067262  # CUBIC
    odd, even = c * t * t * t * a, c * c * t * t * t * t * s
    out += batch * (d * d)
    tail += batch * (d * d)
    tl.store(out + upper, s.to(tl.bfloat16), mask=inside)
    tl.store(tail + upper, (odd + even).to(tl.bfloat16), mask=inside)
    if i < j:
        tl.store(out + lower, s.to(tl.bfloat16), mask=inside)
        tl.store(tail + lower, (even - odd).to(tl.bfloat16), mask=inside)


@no_type_check
def _change_right_kernel(
    square,
    exponent,
    tail,
    shrink,
    out,
    square_stride,
    exponent_stride,
    tail_stride,
    d,
    LO: tl.constexpr,
    TILE: tl.constexpr,
):
    i, j = tl.program_id(1), tl.program_id(0)
    if j < i:
        return
    batch = tl.program_id(2).to(tl.int64)
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    upper, lower = row * d + column, column * d + row
    inside = (row < d) & (column < d)

    t = tl.load(shrink + batch)
    s = tl.load(square + batch * square_stride + upper, mask=inside, other=0.0)
    if i == j:
        s = tl.where(row <= column, s, tl.trans(s))
    a = tl.load(exponent + batch * exponent_stride + upper, mask=inside).to(tl.float32)
    odd, even = t * a, t * t * 0.5 * s
    out += batch * (3 * d * d)
    tail += batch * tail_stride
    value = odd + even + tl.load(tail + upper, mask=inside).to(tl.float32)
    hi = value.to(tl.bfloat16)
    lo = (value - hi.to(tl.float32)).to(tl.bfloat16)
    tl.store(out + upper, hi, mask=inside)
    tl.store(out + (3 - LO) * d * d + upper, hi, mask=inside)
    tl.store(out + LO * d * d + upper, lo, mask=inside)
    if i < j:
        value = even - odd + tl.load(tail + lower, mask=inside).to(tl.float32)
        hi = value.to(tl.bfloat16)
        lo = (value - hi.to(tl.float32)).to(tl.bfloat16)
        tl.store(out + lower, hi, mask=inside)
        tl.store(out + (3 - LO) * d * d + lower, hi, mask=inside)
        tl.store(out + LO * d * d + lower, lo, mask=inside)


# --------------------------------------------------------------------------------------------------
# Launches. Offsets within a matrix are 32 bits wide: 3d² < 2³¹, so d ≤ 26754.

# Blocks: four to eight numbers a thread, in symmetric tiles sixteen, which leaves enough registers
# for many threads at once.

BLOCK, ROWS, COLUMNS, TILE = 1024, 4, 256, 32
SYMMETRIC_TILE = 64  # a row of it in bf16 is 128 bytes
PARTS = 4096  # of a norm, at once


@functools.cache
def _triton() -> Any:
    """Triton, or None where it cannot be imported: then the references run on a GPU too."""
    global tl
    try:
        tl = importlib.import_module("triton.language")
        return importlib.import_module("triton")
    except ImportError:
        return None


@functools.cache
def _jit(kernel: Callable[..., Any]) -> Any:
    return _triton().jit(kernel)


def _launch(kernel: Callable[..., Any], grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    with torch.cuda.device_of(args[0]):  # Triton launches on the current device
        # Memory is the limit here, so no fused multiply-add: rounded as the reference rounds.
        _jit(kernel)[grid](*args, enable_fp_fusion=False, **options)


def _stride(stack: Tensor) -> int:
    """From one matrix of a stack to the next."""
    d = stack.shape[-1]
    if d > 1 and stack.stride()[1:] != (d, 1):
        raise ValueError(f"matrices of strides {stack.stride()[1:]}: each must be contiguous")
    return stack.stride(0)


def _run(k: int, d: int) -> tuple[int, int]:
    """The grid over the d² numbers of k matrices."""
    return (_ceil(d * d, BLOCK), k)


def _ceil(length: int, part: int) -> int:
    return -(-length // part)


def _tiles(k: int, d: int) -> tuple[int, int, int]:
    """The grid over the tiles of k symmetric or skew matrices."""
    tiles = _ceil(d, SYMMETRIC_TILE)
    return (tiles, tiles, k)


def _split_left_cuda(x: Tensor, lo: int) -> Tensor:
    out, (k, d, _) = _split_left_shape(x), x.shape
    grid = (_ceil(d, COLUMNS), _ceil(d, ROWS), k)
    _launch(_split_left_kernel, grid, x, out, _stride(x), d, LO=lo, ROWS=ROWS, COLUMNS=COLUMNS)
    return out


def _split_right_cuda(x: Tensor, lo: int) -> Tensor:
    out, (k, d, _) = _split_right_shape(x), x.shape
    _launch(_split_right_kernel, _run(k, d), x, out, _stride(x), d, LO=lo, BLOCK=BLOCK)
    return out


def _scaled_cast_cuda(x: Tensor, factor: Tensor, usable: Tensor) -> Tensor:
    out, (k, d, _) = _same_shape(x), x.shape
    _launch(_scaled_cast_kernel, _run(k, d), x, out, factor, usable, _stride(x), d, BLOCK=BLOCK)
    return out


def _moments_cuda_(
    product: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    buffer: Tensor | None,
    usable: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    synchronise: bool,
) -> tuple[Tensor, Tensor]:
    (out, parts), (k, d, _) = _moments_shape(product), product.shape
    tiles = _ceil(d, TILE)
    _launch(
        _moments_kernel,
        (tiles, tiles, k),
        *(product, exp_avg, exp_avg_sq, buffer, out, parts, usable),
        *map(_stride, (product, exp_avg, exp_avg_sq)),
        0 if buffer is None else _stride(buffer),
        *(parts.shape[1], d, beta1, 1 - beta1, beta2, 1 - beta2, eps, scale),
        SYNCHRONISE=synchronise,
        TILE=TILE,
        num_warps=8,
    )
    return out, parts


def _shrink_cuda(parts: Tensor, reach: float) -> Tensor:
    (k, count), out = parts.shape, parts.new_empty(len(parts))
    _launch(_shrink_kernel, (k,), parts, out, count, reach, BLOCK=PARTS, num_warps=8)
    return out


def _tail_operands_cuda(square: Tensor, exponent: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor]:
    out, tail, (k, d, _) = _same_shape(square), _same_shape(square), square.shape
    _launch(
        _tail_operands_kernel,
        _tiles(k, d),
        *(square, exponent, shrink, out, tail, _stride(square), _stride(exponent), d),
        TILE=SYMMETRIC_TILE,
        num_warps=8,
    )
    return out, tail


def _change_right_cuda(
    square: Tensor, exponent: Tensor, tail: Tensor, shrink: Tensor, lo: int
) -> Tensor:
    out, (k, d, _) = _split_right_shape(square), square.shape
    _launch(
        _change_right_kernel,
        _tiles(k, d),
        *(square, exponent, tail, shrink, out),
        *(*map(_stride, (square, exponent, tail)), d),
        LO=lo,
        TILE=SYMMETRIC_TILE,
        num_warps=8,
    )
    return out


# --------------------------------------------------------------------------------------------------
# Operators.

F = TypeVar("F", bound=Callable[..., Any])


def _operator(
    name: str,
    reference: F,
    cuda: F,
    shape: Callable[..., Any],
    mutates: Iterable[str] = (),
) -> F:
    """lipnext::name. Tracers and dispatch modes see one operator, whatever it runs."""
    operator = torch.library.custom_op(
        f"lipnext::{name}", reference, mutates_args=mutates, device_types="cpu"
    )

    @operator.register_fake
    def _(*args: Any) -> Any:
        for stack in args:
            if isinstance(stack, Tensor) and stack.ndim == 3 and stack.is_cuda:
                _stride(stack)  # what a launch refuses, refuse without a GPU too
        return shape(*args)

    @operator.register_kernel("cuda")
    def _(*args: Any) -> Any:
        return (cuda if _triton() else reference)(*args)

    return cast(F, operator)


split_left = _operator("split_left", split_left_reference, _split_left_cuda, _split_left_shape)
split_right = _operator("split_right", split_right_reference, _split_right_cuda, _split_right_shape)
scaled_cast = _operator("scaled_cast", scaled_cast_reference, _scaled_cast_cuda, _same_shape)
moments_ = _operator(
    "moments_",
    moments_reference_,
    _moments_cuda_,
    _moments_shape,
    mutates=("exp_avg", "exp_avg_sq", "buffer"),
)
shrink = _operator(
    "shrink", shrink_reference, _shrink_cuda, lambda parts, _: parts.new_empty(len(parts))
)
tail_operands = _operator(
    "tail_operands",
    tail_operands_reference,
    _tail_operands_cuda,
    lambda square, *_: (_same_shape(square), _same_shape(square)),
)
change_right = _operator(
    "change_right",
    change_right_reference,
    _change_right_cuda,
    lambda square, *_: _split_right_shape(square),
)
