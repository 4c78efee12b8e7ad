"""Every Triton kernel against its reference, by Triton's interpreter on a CPU.

A script, because TRITON_INTERPRET=1 must be set before triton is imported, and other tests in the
same process may have imported it. In float32, for the interpreter rounds bfloat16 differently.
"""

import itertools
import sys

import torch

from lipnext_scale.models import BlockSpec, fused_group, kernels


def check_shift(shape: tuple[int, ...], parts: tuple[int, ...], dtype: torch.dtype) -> None:
    for part, padding, backward in itertools.product(parts, ("circular", "zero"), (False, True)):
        x = torch.randn(shape).to(dtype)  # nothing is rounded: it only moves
        expected, result = x.clone(), x.clone()
        kernels.shift_(expected, part, padding, backward)
        kernels.launch_shift_(result, part, padding, backward)
        assert torch.equal(result, expected), (shape, part, padding, backward, dtype)


def check_activation(shape: tuple[int, ...]) -> None:
    images, height, width, channels = shape
    tokens = height * width
    for count, has_pos in itertools.product((0, 27, channels), (True, False)):
        case = (shape, count, has_pos)
        rows, bias = torch.randn(images * tokens, channels), torch.randn(channels)
        rows[0, :5] = -bias[:5]  # exactly 0
        pos = torch.randn(height, width, 1) if has_pos else None
        expected, result = rows.clone(), rows.clone()
        signs = kernels.activate_(expected, bias, pos, count)
        assert torch.equal(kernels.launch_activate_(result, bias, pos, count), signs), case
        assert torch.equal(result, expected), case

        grad = torch.randn_like(rows)
        expected = torch.empty_like(grad)
        parts = [
            [kernels.bias_parts(grad, tokens), kernels.pos_parts(grad, tokens) if has_pos else None]
            for _ in range(2)
        ]
        kernels.activate_backward(grad, signs, expected, *parts[0], tokens)
        kernels.launch_activate_backward(grad, signs, grad, *parts[1], tokens)  # in place
        assert torch.equal(grad, expected), case
        for one, other in zip(*parts, strict=True):
            if one is not None:
                torch.testing.assert_close(other.sum(0), one.sum(0), rtol=1e-5, atol=1e-4)


def main() -> None:
    spec = BlockSpec(2, "circular", "beta_abs", 0.75)
    fused_group(torch.randn(2, 3, 3, 8), torch.randn(1, 2, 8, 8), torch.randn(1, 8), None, spec)
    assert "triton" not in sys.modules, "nothing on a CPU needs triton"
    torch.manual_seed(0)
    check_shift((3, 5, 7, 37), (0, 2, 5), torch.float32)
    check_shift((1, 2, 3, 99), (18,), torch.float32)  # more channels than a program takes
    check_shift((2, 3, 1, 24), (3, 4), torch.bfloat16)  # one by one, and two as a word
    check_activation((3, 5, 7, 37))
    check_activation((9, 3, 3, 265))  # more images, tokens and channels than a program takes


if __name__ == "__main__":
    main()
