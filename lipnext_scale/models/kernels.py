"""The passes of a block beside its products, one launch each: Triton kernels and their references.

Every operator `lipnext::…` is a Triton kernel on CUDA and the torch reference above it on a CPU, so
that dispatch modes see one operator per launch. Tokens are channels-last [N, H, W, C], contiguous;
rows are the same memory as [N·H·W, C]. Arithmetic and sums are in float32, whatever is stored.

The functions named `_…_kernel` are in Triton's language and become kernels at the first launch;
nothing else imports triton.
"""

from __future__ import annotations  # for tl.constexpr: tl comes later

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import custom_op

from lipnext_scale.models.blocks import SHIFTS, BlockSpec, roll_tokens

if TYPE_CHECKING:
    import triton.language as tl

DTYPES = (torch.bfloat16, torch.float32)
# Tokens of an image that one program can hold in registers: 32 in each of its 16·32 threads.
LARGEST_PLANE = 16 * 32 * 32


def why_plain(spec: BlockSpec, tokens: Tensor) -> str | None:
    """Why these tokens [N, H, W, C] take the plain path; None: the kernels take them."""
    if not tokens.is_cuda:
        return f"the tokens are on {tokens.device.type}"
    if spec.activation != "beta_abs":
        return f"activation {spec.activation} has no kernel"
    if tokens.dtype not in DTYPES:
        return f"{tokens.dtype} has no kernel"
    if tokens.shape[1] * tokens.shape[2] > LARGEST_PLANE:
        return f"{tuple(tokens.shape[1:3])} tokens are more than {LARGEST_PLANE}"
    return None if _has_triton() else "triton is not installed"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def launch(
    kernel: Callable[..., None], programs: int, *arguments: Any, num_warps: int, **constants: Any
) -> None:
    """Run `programs` programs of a kernel on the device of its first argument."""
    assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor))
    if programs:
        with torch.cuda.device_of(arguments[0]):
            _compiled(kernel)[(programs,)](
                *arguments, num_warps=num_warps, enable_fp_fusion=False, **constants
            )


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Any:
    global tl  # the kernels look it up there
    import triton
    import triton.language as tl

    # Were it known that rows of signs are aligned, a thread would load signs that others need.
    return triton.jit(kernel, do_not_specialize=["sign_bytes"])


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    """The smallest that is at least n: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


# --------------------------------------------------------------------------------------------------
# The spatial shift.


@custom_op("lipnext::shift", mutates_args=("x",), device_types="cpu")
def shift_(x: Tensor, part: int, padding: str, backward: bool) -> None:
    """`spatial_shift` of x [N, H, W, C] in place; backward: its transpose, every step reversed."""
    first = x.shape[-1] - 4 * part
    for index, (dim, step) in enumerate(SHIFTS):
        channels = x[..., first + index * part : first + (index + 1) * part]
        channels.copy_(roll_tokens(channels, dim, -step if backward else step, padding))


@shift_.register_fake
def _(x: Tensor, part: int, padding: str, backward: bool) -> None:
    return None


@shift_.register_kernel("cuda")
def launch_shift_(x: Tensor, part: int, padding: str, backward: bool) -> None:
    # It moves bits, so two narrow numbers may travel as one word.
    images, height, width, channels = x.shape
    pairs = x.element_size() == 2 and part % 2 == 0 and channels % 2 == 0
    words = x.view(torch.int32 if pairs or x.element_size() == 4 else torch.int16)
    part = part // 2 if pairs else part
    tokens = _power_of_two(height * width)
    tile = min(16, LARGEST_PLANE // tokens, _power_of_two(part))  # 16 words are 64 bytes
    blocks = _ceil_div(part, tile)
    launch(
        _shift_kernel,
        images * 4 * blocks,
        words,
        words.shape[-1],
        part,
        blocks,
        HEIGHT=height,
        WIDTH=width,
        CIRCULAR=padding == "circular",
        BACKWARD=backward,
        TOKENS=tokens,
        TILE=tile,
        num_warps=max(1, tokens * tile // 1024),
    )


def _shift_kernel(
    words: tl.tensor,
    channels: tl.tensor,
    part: tl.tensor,
    blocks: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CIRCULAR: tl.constexpr,
    BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A program owns the plane of TILE channels of one image: reads it moved, writes it back."""
    image = (tl.program_id(0) // (4 * blocks)).to(tl.int64)
    block = tl.program_id(0) % (4 * blocks)
    direction = block // blocks  # in the order of SHIFTS: down, up, right, left
    step = 1 - 2 * (direction % 2)
    if BACKWARD:
        step = -step
    down = tl.where(direction < 2, step, 0)

    token = tl.arange(0, TOKENS)
    row = token // WIDTH - down  # where a token's value comes from
    column = token % WIDTH - (step - down)
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    if CIRCULAR:
        row = (row + HEIGHT) % HEIGHT
        column = (column + WIDTH) % WIDTH
        inside = token >= 0

    channel = (block % blocks) * TILE + tl.arange(0, TILE)
    real = (token < HEIGHT * WIDTH)[:, None] & (channel < part)[None, :]
    plane = words + image * (HEIGHT * WIDTH) * channels + channels - (4 - direction) * part
    source = plane + (row * WIDTH + column)[:, None] * channels + channel[None, :]
    target = plane + token[:, None] * channels + channel[None, :]
    values = tl.load(source, mask=real & inside[:, None], other=0)
    tl.debug_barrier()  # no thread writes before all have read
    tl.store(target, values, mask=real)


# --------------------------------------------------------------------------------------------------
# Bias, β-Abs and the next block's pos.

ROWS, SIGN_BYTES = 8, 32  # of a program: 8 rows of 256 channels


@custom_op("lipnext::activate", mutates_args=("rows",), device_types="cpu")
def activate_(rows: Tensor, bias: Tensor, pos: Tensor | None, count: int) -> Tensor:
    """rows + bias, |·| of the first `count` channels, + pos [H, W, 1] of the token; in place.

    Returns the signs of those channels before |·|, eight to a byte [rows, ⌈count/8⌉], 1 = negative.
    0 counts as positive: where |·| has its kink its derivative is +1, a subgradient as good as the
    0 of torch.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    values = rows.to(wide) + bias.to(wide)
    signs = _pack(values[:, :count] < 0)
    values[:, :count].abs_()
    if pos is not None:
        values.view(-1, pos.numel(), rows.shape[-1]).add_(pos.to(wide).view(-1, 1))
    rows.copy_(values)
    return signs


def _pack(bits: Tensor) -> Tensor:
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (eights.view(len(bits), -1, 8) * weights).sum(-1, dtype=torch.uint8)


@activate_.register_fake
def _(rows: Tensor, bias: Tensor, pos: Tensor | None, count: int) -> Tensor:
    return rows.new_empty(len(rows), _ceil_div(count, 8), dtype=torch.uint8)


@activate_.register_kernel("cuda")
def launch_activate_(rows: Tensor, bias: Tensor, pos: Tensor | None, count: int) -> Tensor:
    signs = rows.new_empty(len(rows), _ceil_div(count, 8), dtype=torch.uint8)
    channels = rows.shape[-1]
    launch(
        _activate_kernel,
        _ceil_div(len(rows), ROWS) * _ceil_div(channels, 8 * SIGN_BYTES),
        rows,
        bias,
        pos,
        signs,
        len(rows),
        channels,
        count,
        signs.shape[-1],
        TOKENS=1 if pos is None else pos.numel(),
        ROWS=ROWS,
        BYTES=SIGN_BYTES,
        num_warps=4,
    )
    return signs


def _activate_kernel(
    z: tl.tensor,
    bias: tl.tensor,
    pos: tl.tensor,
    signs: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    count: tl.tensor,
    sign_bytes: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """A program owns ROWS rows of 8·BYTES channels."""
    blocks = tl.cdiv(channels, 8 * BYTES)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    channel = block * 8 * BYTES + tl.arange(0, 8 * BYTES)
    real = (row < rows)[:, None] & (channel < channels)[None, :]
    place = z + row.to(tl.int64)[:, None] * channels + channel[None, :]

    values = tl.load(place, mask=real, other=0).to(tl.float32)
    values += tl.load(bias + channel, mask=channel < channels, other=0).to(tl.float32)[None, :]
    negative = (values < 0) & (channel < count)[None, :]
    values = tl.where(negative, -values, values)
    if pos is not None:
        values += tl.load(pos + row % TOKENS).to(tl.float32)[:, None]
    tl.store(place, values, mask=real)

    bits = tl.reshape(negative.to(tl.int32), (ROWS, BYTES, 8)) << tl.arange(0, 8)[None, None, :]
    byte = block * BYTES + tl.arange(0, BYTES)
    place = signs + row.to(tl.int64)[:, None] * sign_bytes + byte[None, :]
    real = (row < rows)[:, None] & (byte < sign_bytes)[None, :]
    tl.store(place, tl.sum(bits, axis=2), mask=real)


# --------------------------------------------------------------------------------------------------
# Backward, with the gradients of bias and pos.

IMAGES = 8  # of a program, one after the other; it holds the sums of ROWS tokens of 256 channels


def bias_parts(grad: Tensor, tokens: int) -> Tensor:
    """Room for the programs' sums over rows of grad [N·tokens, C]: [parts, C]."""
    parts = _ceil_div(len(grad), tokens * IMAGES) * _ceil_div(tokens, ROWS)
    return grad.new_empty(parts, grad.shape[-1], dtype=torch.float32)


def pos_parts(grad: Tensor, tokens: int) -> Tensor:
    """The same of their sums over images and channels: [parts, tokens]."""
    parts = _ceil_div(len(grad), tokens * IMAGES) * _ceil_div(grad.shape[-1], 8 * SIGN_BYTES)
    return grad.new_empty(parts, tokens, dtype=torch.float32)


@custom_op(
    "lipnext::activate_backward",
    mutates_args=("out", "bias_parts", "pos_parts"),
    device_types="cpu",
)
def activate_backward(
    grad: Tensor,
    signs: Tensor,
    out: Tensor,
    bias_parts: Tensor | None,
    pos_parts: Tensor | None,
    tokens: int,
) -> None:
    """From the gradient of what `activate_` wrote to that of its rows; `out` may be `grad`.

    The sums of the parts are the gradients of pos [H·W = tokens] and of bias. A program writes its
    own part, which is written once, so that every run gives the same bits.
    """
    if pos_parts is not None:
        per_row = grad.sum(-1, dtype=pos_parts.dtype)
        pos_parts.zero_()[0] = per_row.view(-1, tokens).sum(0)
    minus = _unpack(signs, grad.shape[-1])
    out.copy_(torch.where(minus, -grad, grad))
    if bias_parts is not None:
        bias_parts.zero_()[0] = out.sum(0, dtype=bias_parts.dtype)


def _unpack(signs: Tensor, channels: int) -> Tensor:
    """The bits as [rows, channels]; False where there is none."""
    bits = signs.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1
    bits = bits.view(len(signs), 8 * signs.shape[-1])[:, :channels]
    return torch.nn.functional.pad(bits, (0, channels - bits.shape[-1])).bool()


@activate_backward.register_fake
def _(
    grad: Tensor,
    signs: Tensor,
    out: Tensor,
    bias_parts: Tensor | None,
    pos_parts: Tensor | None,
    tokens: int,
) -> None:
    return None


@activate_backward.register_kernel("cuda")
def launch_activate_backward(
    grad: Tensor,
    signs: Tensor,
    out: Tensor,
    bias_parts: Tensor | None,
    pos_parts: Tensor | None,
    tokens: int,
) -> None:
    images, channels = len(grad) // tokens, grad.shape[-1]
    parts = _ceil_div(images, IMAGES) * _ceil_div(tokens, ROWS)
    launch(
        _activate_backward_kernel,
        parts * _ceil_div(channels, 8 * SIGN_BYTES),
        grad,
        signs,
        out,
        bias_parts,
        pos_parts,
        images,
        tokens,
        channels,
        signs.shape[-1],
        IMAGES=IMAGES,
        TOKENS=ROWS,
        BYTES=SIGN_BYTES,
        num_warps=4,
    )


def _activate_backward_kernel(
    grad: tl.tensor,
    signs: tl.tensor,
    out: tl.tensor,
    bias_parts: tl.tensor,
    pos_parts: tl.tensor,
    images: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    sign_bytes: tl.tensor,
    IMAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """A program owns TOKENS tokens and 8·BYTES channels of IMAGES images."""
    blocks, token_blocks = tl.cdiv(channels, 8 * BYTES), tl.cdiv(tokens, TOKENS)
    block = tl.program_id(0) % blocks
    token_part = tl.program_id(0) // blocks
    first = token_part // token_blocks * IMAGES
    token = (token_part % token_blocks) * TOKENS + tl.arange(0, TOKENS)
    channel = block * 8 * BYTES + tl.arange(0, 8 * BYTES)
    byte = block * BYTES + tl.arange(0, BYTES)
    real = (token < tokens)[:, None] & (channel < channels)[None, :]
    signed = (token < tokens)[:, None] & (byte < sign_bytes)[None, :]

    bias_sum = tl.zeros((TOKENS, 8 * BYTES), tl.float32)
    pos_sum = tl.zeros((TOKENS, 8 * BYTES), tl.float32)
    row = (first.to(tl.int64) * tokens + token)[:, None]
    for _ in range(first, tl.minimum(first + IMAGES, images)):
        values = tl.load(grad + row * channels + channel[None, :], mask=real, other=0)
        packed = tl.load(signs + row * sign_bytes + byte[None, :], mask=signed, other=0)
        bits = (packed[:, :, None] >> tl.arange(0, 8).to(tl.uint8)[None, None, :]) & 1
        values = values.to(tl.float32)
        pos_sum += values
        values = tl.where(tl.reshape(bits, (TOKENS, 8 * BYTES)) != 0, -values, values)
        bias_sum += values
        tl.store(out + row * channels + channel[None, :], values, mask=real)
        row += tokens

    if bias_parts is not None:
        place = bias_parts + token_part.to(tl.int64) * channels + channel
        tl.store(place, tl.sum(bias_sum, axis=0), mask=channel < channels)
    if pos_parts is not None:
        part = token_part // token_blocks * blocks + block
        place = pos_parts + part.to(tl.int64) * tokens + token
        tl.store(place, tl.sum(pos_sum, axis=1), mask=token < tokens)
