"""Kernels between the products: against their references, in a whole group, and compiled."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_models_blocks import NAMES, draw, gradients_of, spec
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lipnext_scale.models import fused_group, group_reference, kernels
from lipnext_scale.utils import products


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """A group takes the path of CUDA; on a CPU its operators are their references."""
    monkeypatch.setattr(kernels, "why_plain", lambda spec, tokens: None)
    monkeypatch.setattr(products, "ONEDNN", False)


# --- the operators, on a CPU --------------------------------------------------------------------


@pytest.mark.parametrize("has_pos", [True, False])
@pytest.mark.parametrize("padding", ["circular", "zero"])
@pytest.mark.parametrize("part, beta", [(0, 0.75), (2, 0.4), (3, 1.0), (1, 0.0)])
def test_group_of_operators_equals_reference(kernels_everywhere, part, beta, padding, has_pos):
    """Values and gradients, and those of frozen inputs; bias and pos are summed in float32."""
    inputs = draw(3, 3, has_pos)
    the_spec = spec(shift_part=part, beta=beta, padding=padding)
    weight = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).double()
    for wanted in ((True,) * 4, (False, True, False, False), (True, False, False, False)):
        out, grads = gradients_of(fused_group, inputs, wanted, the_spec, weight)
        expected_out, expected = gradients_of(group_reference, inputs, wanted, the_spec, weight)
        torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-11)
        for name, one, other in zip(NAMES, grads, expected, strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                bound = 1e-5 if name in ("bias", "pos") else 1e-11
                torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_operators_leave_the_incoming_gradient_alone(kernels_everywhere):
    """Also where it is no dense tensor, as that of a sum; and they work where there is none."""
    inputs = [t.requires_grad_() for t in draw(2, 3, has_pos=True)]
    out = fused_group(*inputs, spec())
    incoming = torch.randn_like(out)
    before = incoming.clone()
    out.backward(incoming, retain_graph=True)
    assert torch.equal(incoming, before)
    out.sum().backward()
    with torch.inference_mode():
        assert torch.equal(fused_group(*inputs, spec()), out)


def test_signs_are_bits_and_zero_is_positive():
    """Bit c of a row's bytes says whether channel c was negative before |·|."""
    rows = torch.tensor([[-1.0, 2, -3, 0, 5, 6, 7, 8, -9, -10]])
    signs = kernels.activate_(rows, torch.zeros(10), torch.full((1, 1, 1), 0.5), 9)
    assert signs.tolist() == [[0b00000101, 0b00000001]]
    assert rows.tolist() == [[1.5, 2.5, 3.5, 0.5, 5.5, 6.5, 7.5, 8.5, 9.5, -9.5]]
    grad = torch.ones(1, 10)
    kernels.activate_backward(grad, signs, grad, None, None, 1)
    assert grad.tolist() == [[-1, 1, -1, 1, 1, 1, 1, 1, -1, 1]]


def test_operators_round_once():
    """bfloat16 in, float32 in between: 1 + 2⁻⁸ - 1 is 2⁻⁸, which two roundings would make 0."""
    rows, bias = torch.ones(1, 1).bfloat16(), torch.tensor([2.0**-8]).bfloat16()
    kernels.activate_(rows, bias, -torch.ones(1, 1, 1).bfloat16(), 1)
    assert rows.item() == 2.0**-8


# --- which path, and what it launches -----------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts the operators that would be launches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        quiet = function.is_view or function.namespace == "prim" or "empty" in function.name()
        if not quiet:
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def operators_of(blocks: int, dtype: torch.dtype) -> Counter[str]:
    """Of forward and backward, on tensors without numbers."""
    shapes = [t.shape for t in draw(blocks, 3, has_pos=True)]
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        with Operators() as seen:
            out = fused_group(*tensors, spec())
            torch.autograd.grad(out, tensors, torch.empty_like(out))
    return seen.counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_launches_of_one_block_more(kernels_everywhere, dtype):
    """6 products; shift, activation and back; two sums of parts."""
    assert operators_of(3, dtype) - operators_of(2, dtype) == {
        "aten::mm": 1,
        "aten::mm.out": 5,
        "lipnext::shift": 2,
        "lipnext::activate": 1,
        "lipnext::activate_backward": 1,
        "aten::sum.IntList_out": 2,
    }


def test_operators_on_a_gpu_that_is_not_there():
    """One operator each, whose results have the right sizes."""
    with FakeTensorMode(), Operators() as seen:
        x = torch.empty(9, 3, 5, 37, device="cuda", dtype=torch.bfloat16)
        rows = torch.empty(9 * 15, 37, device="cuda", dtype=torch.bfloat16)
        kernels.shift_(x, 5, "zero", True)
        signs = kernels.activate_(rows, rows, None, 27)
        parts = kernels.bias_parts(rows, 15), kernels.pos_parts(rows, 15)
        kernels.activate_backward(rows, signs, rows, *parts, 15)
    assert seen.counts == dict.fromkeys(
        ("lipnext::shift", "lipnext::activate", "lipnext::activate_backward"), 1
    )
    assert signs.shape == (135, 4) and signs.dtype == torch.uint8 and signs.is_cuda
    assert [tuple(part.shape) for part in parts] == [(4, 37), (2, 15)]


def test_operators_do_what_their_schemas_say():
    """What they write is declared, and what they return is what fake tensors promise."""
    x, rows, pos = torch.randn(2, 3, 5, 13), torch.randn(30, 13), torch.randn(3, 5, 1)
    signs = torch.zeros(30, 2, dtype=torch.uint8)
    parts = kernels.bias_parts(rows, 15), kernels.pos_parts(rows, 15)
    for operator, arguments in (
        (kernels.shift_, (x, 3, "circular", False)),
        (kernels.activate_, (rows, rows[0].clone(), pos, 9)),
        (kernels.activate_backward, (rows, signs, torch.empty_like(rows), *parts, 15)),
    ):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, arguments, test_utils=checks)


def test_why_plain():
    """The reason is a sentence about the tokens; None is for the kernels."""

    def why(device="cuda", dtype=torch.bfloat16, side=14, **changes):
        with FakeTensorMode():
            tokens = torch.empty(2, side, side, 8, device=device, dtype=dtype)
            return kernels.why_plain(spec(**changes), tokens)

    assert why() is None and why(dtype=torch.float32) is None and why(side=128) is None
    assert why(device="cpu") == "the tokens are on cpu"
    assert why(dtype=torch.float64) == "torch.float64 has no kernel"
    assert why(activation="minmax") == "activation minmax has no kernel"
    assert why(side=129) == "(129, 129) tokens are more than 16384"


# --- the kernels themselves ---------------------------------------------------------------------


@pytest.mark.slow
def test_kernels_equal_their_references():
    """Also: triton is not imported before it is needed."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("kernels_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def launches_of(images: int, side: int, channels: int, monkeypatch) -> list[tuple]:
    """What would be launched for a block: (kernel, arguments, constants, warps)."""
    launches: list[tuple] = []

    def record(kernel, programs, *arguments, num_warps, **constants):
        launches.append((kernel, arguments, constants, num_warps))

    monkeypatch.setattr(kernels, "launch", record)
    with torch.device("meta"):
        x = torch.empty(images, side, side, channels, dtype=torch.bfloat16)
        rows, tokens = x.view(-1, channels), side * side
        kernels.launch_shift_(x, channels // 16, "zero", False)
        signs = kernels.launch_activate_(rows, rows[0], x[0, ..., :1], channels * 3 // 4)
        parts = kernels.bias_parts(rows, tokens), kernels.pos_parts(rows, tokens)
        kernels.launch_activate_backward(rows, signs, rows, *parts, tokens)
    return launches


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


def compiled_for(arch: int, kernel, arguments, constants, warps):
    """The kernel as the first launch with these arguments would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernels._compiled(kernel)
    signature, aligned = {}, {}
    for index, (name, value) in enumerate(zip(function.arg_names, arguments, strict=False)):
        is_pointer = isinstance(value, torch.Tensor)
        signature[name] = POINTERS[value.dtype] if is_pointer else "i32"
        if is_pointer or (value % 16 == 0 and not function.params[index].do_not_specialize):
            aligned[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, signature, constants, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled, directory: Path) -> dict[str, int]:
    """What the cubin says it needs of each thread; what spills is in STACK or LOCAL."""
    from triton import knobs

    file = directory / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "images, side, channels", [(256, 16, 2048), (128, 14, 5792), (128, 32, 1024)]
)
def test_kernels_compile_without_spills(images, side, channels, monkeypatch, tmp_path):
    """For A100 and H100. At most 128 registers let 512 threads of a multiprocessor run."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for launch in launches_of(images, side, channels, monkeypatch):
        for arch in (90, 80):
            compiled = compiled_for(arch, *launch)
            used, name = resources(compiled, tmp_path), launch[0].__name__
            print(f"{side}×{side}×{channels} sm_{arch} {name}: {used['REG']} registers")
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128
            if name == "_shift_kernel":  # in place: all is read before anything is written
                order = re.findall(r"LDG|BAR|STG", compiled.asm["sass"])
                assert order == sorted(order, key=["LDG", "BAR", "STG"].index)
                assert set(order) == {"LDG", "BAR", "STG"}
