"""LipNeXt written out for numpy, in 80-bit numbers or in as many decimal digits as are asked for.

It shares no line with the package: what a certificate says is compared with this.
"""

import mpmath
import numpy as np
import pytest
import torch

from lipnext_scale.models import BlockGroup, LipNeXt, LipNeXtConfig

# The reference must be 2¹¹ times as accurate as float64: x86 has such numbers, not every CPU does.
HAS_EXTENDED = np.finfo(np.longdouble).nmant >= 63
needs_extended = pytest.mark.skipif(not HAS_EXTENDED, reason="numpy has no 80-bit numbers here")


def extended(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().astype(np.longdouble)


def decimals(tensor: torch.Tensor) -> np.ndarray:
    """Numbers of mpmath, as exact as `mpmath.workdps` says."""
    return np.frompyfunc(mpmath.mpf, 1, 1)(tensor.detach().double().numpy().astype(object))


def root(values: np.ndarray) -> np.ndarray:
    return np.frompyfunc(mpmath.sqrt, 1, 1)(values) if values.dtype == object else np.sqrt(values)


def exact_features(model: LipNeXt, images: torch.Tensor, number=extended) -> np.ndarray:
    """The features [N, C] of images [N, channels, side, side] in [0, 1]."""
    config = model.config
    x = _tokens(number(images) - number(torch.tensor(0.5)), config)
    for group in model.block_groups():
        for index in range(group.count):
            if group.pos is not None:
                x = x + number(group.pos[index])
            x = _shift(_mixed(x, group, (index, 0), number), config)
            x = _mixed(x, group, (index, 1), number)
            x = _activation(x + number(group.bias[index]), config)
    if model.neck is not None:
        return _neck(x, model, number)
    return root((x * x).sum(axis=(1, 2)))


def _neck(x: np.ndarray, model: LipNeXt, number) -> np.ndarray:
    """Squares of tokens side by side, row after row; then dense layers."""
    neck, size = model.neck, model.neck.square
    count, side = x.shape[:2]
    squares = [
        x[:, i : i + size, j : j + size].reshape(count, -1) @ number(neck.squares).T
        for i in range(0, side, size)
        for j in range(0, side, size)
    ]
    x = np.concatenate(squares, axis=1)
    matrices = [neck.vector, *([] if neck.dense is None else neck.dense)]
    for matrix, bias in zip(matrices, neck.bias, strict=True):
        x = _activation(x @ number(matrix).T + number(bias), model.config)
    return x


def exact_logits(model: LipNeXt, images: torch.Tensor, number=extended) -> np.ndarray:
    rows = number(model.head.weight)
    if model.config.head == "unit":
        norms = root((rows * rows).sum(axis=1))
        rows = rows / np.where(norms == 0, 1, norms)[:, None]
    return exact_features(model, images, number) @ rows.T + number(model.head.bias)


def _tokens(pixels: np.ndarray, config: LipNeXtConfig) -> np.ndarray:
    """A patch's pixels are the first channels of its token, in the order of pixel_unshuffle."""
    count, channels, side, _ = pixels.shape
    patch = config.patch_size
    cut = pixels.reshape(count, channels, side // patch, patch, side // patch, patch)
    tokens = cut.transpose(0, 2, 4, 1, 3, 5).reshape(count, side // patch, side // patch, -1)
    empty = np.zeros((*tokens.shape[:3], config.width - tokens.shape[3]), dtype=tokens.dtype)
    return np.concatenate([tokens, empty], axis=-1)


def _mixed(x: np.ndarray, group: BlockGroup, index: tuple[int, int], number) -> np.ndarray:
    if group.family is None:
        return x @ number(group.bank[index]).T
    made = {name: number(tensor[index]) for name, tensor in group.free.items()}
    if "kernel" in made:
        return _convolved(x, made["kernel"])
    if "Q" in made and made["Q"].ndim == 4:
        inside = _convolved(x, made["Q"]) + made["c"]
        back = made["Q"].transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
        return x - 2 * _convolved(np.where(inside > 0, inside, 0), back)
    if "Q" in made:
        inside = x @ made["Q"].T + made["c"]
        return x - 2 * np.where(inside > 0, inside, 0) @ made["Q"]
    inside = x @ made["B"].T + made["c"]
    return 2 * np.where(inside > 0, inside, 0) @ made["A"]


def _convolved(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Σ_s A_s·x[p - s] on a grid that wraps round; s = 0 is in the middle of the kernel."""
    size, result = kernel.shape[-1], 0 * x
    for i in range(size):
        for j in range(size):
            moved = np.roll(x, (i - size // 2, j - size // 2), axis=(1, 2))
            result = result + moved @ kernel[:, :, i, j].T
    return result


def _shift(x: np.ndarray, config: LipNeXtConfig) -> np.ndarray:
    if config.kernel_size > 1:
        return x
    part, x = int(config.width * config.shift_ratio), x.copy()
    for index, (axis, step) in enumerate([(1, 1), (1, -1), (2, 1), (2, -1)]):
        start = config.width - (4 - index) * part
        moved = np.roll(x[..., start : start + part], step, axis)
        if config.padding == "zero":
            edge = [slice(None)] * 4
            edge[axis] = slice(0, 1) if step > 0 else slice(-1, None)
            moved[tuple(edge)] = 0
        x[..., start : start + part] = moved
    return x


def _activation(x: np.ndarray, config: LipNeXtConfig) -> np.ndarray:
    width = x.shape[-1]
    if config.activation == "minmax":
        one, two = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([np.maximum(one, two), np.minimum(one, two)], axis=-1)
    count = int(width * config.beta)
    return np.concatenate([abs(x[..., :count]), x[..., count:]], axis=-1)
