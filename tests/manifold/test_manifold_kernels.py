"""The passes between the products: references against the mathematics, kernels against references.

The kernels run in Triton's interpreter, in a process of its own: Triton reads TRITON_INTERPRET when
it is imported. That process is this file as a script.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lipnext_scale import manifold
from lipnext_scale.manifold import kernels, tensor_core
from lipnext_scale.optim.manifold_adam import adam_direction

ADAM = (0.9, 0.99, 1e-8, -0.02)  # β1, β2, eps, scale


def stack(k: int, d: int, seed: int = 0) -> Tensor:
    """A stack that is a view: every second matrix of a larger one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, 2, d, d, generator=generator)[:, 1]


def calls(k: int, d: int) -> Iterator[tuple[str, tuple]]:
    """Every operator with arguments of its own, in all its forms."""
    x, factor, t = stack(k, d), torch.tensor(0.3), torch.linspace(0.3, 1, k)
    yes, no, nan = torch.tensor(True), torch.tensor(False), torch.full_like(x, torch.nan)
    a, tail = (manifold.skew(stack(k, d, seed)).bfloat16() for seed in (1, 2))
    for lo in (1, 2):
        yield "split_left", (x, lo)
        yield "split_right", (x, lo)
        yield "change_right", (x, a, tail, t, lo)
    yield "scaled_cast", (x, factor, yes)
    yield "scaled_cast", (nan, factor * torch.nan, no)
    for product, buffer, usable, synchronise in (
        (x, True, yes, False),
        (x, True, yes, True),
        (x, False, yes, False),
        (nan, True, no, False),
        (nan, True, no, True),
    ):
        m, v, b = (stack(k, d, seed) for seed in (3, 4, 5))
        m.copy_(manifold.skew(m)), b.copy_(manifold.skew(b)), v.copy_(manifold.skew(v) ** 2)
        yield (
            "moments_",
            (product.bfloat16(), m, v, b if buffer else None, usable, *ADAM, synchronise),
        )
    yield "shrink", (torch.full((k, 5000), 1e-3), 0.5)
    yield "shrink", (torch.zeros(k, 3), 0.5)
    yield "shrink", (torch.full((k, 3), torch.nan), 0.5)
    yield "tail_operands", (x, a, t)


def assert_skew(*matrices: Tensor) -> None:
    for matrix in matrices:
        assert torch.equal(matrix, -matrix.mT)


# --------------------------------------------------------------------------------------------------
# References.


def test_split_product_misses_at_most_two_to_the_minus_15():
    """x - hi - lo is at most 2^-17·|x| for both, and lo·lo at most 2^-16·|a||b|."""
    a, b = stack(2, 65), stack(2, 65, seed=1)
    product = kernels.split_left(a, 2).double() @ kernels.split_right(b, 1).double()
    error = (product - a.double() @ b.double()).abs()
    assert (error <= (2**-15 + 2**-34) * (a.double().abs() @ b.double().abs())).all()


def test_split_of_the_worst_number_comes_near_that_bound():
    """x - hi is nearly half a unit of hi, and x - hi - lo nearly half a unit of lo."""
    worst = torch.full((1, 1, 1), 1 + 2**-8 - 2**-17 - 2**-23)
    product = kernels.split_left(worst, 2).double() @ kernels.split_right(worst, 1).double()
    assert (worst.double() ** 2 - product).item() > 0.97 * 2**-15


def test_split_product_with_a_transposed_stack():
    a, b = stack(2, 33), stack(2, 33, seed=1)
    for lo in (1, 2):
        parts = kernels.split_left(b, lo).mT
        assert torch.equal(parts, kernels.split_right(b.mT.contiguous(), lo))
    one = tensor_core.product(kernels.split_left(a, 2), kernels.split_left(b, 1).mT)
    two = tensor_core.product(kernels.split_left(a, 1), kernels.split_left(b, 2).mT)
    torch.testing.assert_close(one, two)


def test_moments_are_those_of_adam_but_for_the_rounding_of_the_direction():
    d, lr, betas, eps = 33, 0.02, (0.9, 0.99), 1e-8
    m, v, b, exact_m, exact_v, exact_b = (torch.zeros(2, d, d) for _ in range(6))
    for step in range(1, 5):
        product, before, synchronise = stack(2, d, seed=step).bfloat16(), b.clone(), step == 4
        delta = adam_direction(
            manifold.skew(product.float()),
            exact_m,
            exact_v,
            step=step,
            lr=lr,
            betas=betas,
            eps=eps,
            bias_correction=True,
        )
        exact_b += delta
        c1, c2 = (1 - beta**step for beta in betas)
        corrected = (eps * c2**0.5, -lr * c2**0.5 / c1)
        exponent, norms = kernels.moments_(
            product, m, v, b, torch.tensor(True), *betas, *corrected, synchronise
        )
        torch.testing.assert_close(norms.sum(1), exponent.float().square().sum((1, 2)))
        torch.testing.assert_close(m, exact_m)
        torch.testing.assert_close(v, exact_v)
        assert_skew(m, b, exponent)
        if synchronise:
            # Four roundings of Δ, each at most 2^-8 of lr·√(step), then one of the sum.
            torch.testing.assert_close(
                exponent.float(), exact_b / 2, rtol=2**-8, atol=2**-8 * lr * 4
            )
            assert not b.any()
        else:
            torch.testing.assert_close(exponent.float(), delta, rtol=2**-8 + 1e-5, atol=1e-9)
            assert torch.equal(b, before + exponent)  # what the weights really moved by


def test_a_step_that_is_not_usable_changes_nothing():
    for name, arguments in calls(2, 6):
        if name == "moments_" and not arguments[4]:
            before = [x.clone() for x in arguments[1:4]]
            assert not any(x.any() for x in kernels.moments_(*arguments))
            assert all(torch.equal(x, y) for x, y in zip(before, arguments[1:4], strict=True))
        if name == "scaled_cast" and not arguments[2]:
            assert not kernels.scaled_cast(*arguments).any()


def test_change_with_its_tail_is_the_exponential_less_one():
    d, t = 24, torch.tensor([1.0, 0.5, 0.25])
    a = (manifold.skew(stack(3, d)) * 0.02).bfloat16()
    square = (a.double() @ a.double()).float()
    left, right = kernels.tail_operands(square, a, t)
    tail = (left.float() @ right.float()).bfloat16()
    hi, lo, again = kernels.change_right(square, a, tail, t, 1).double().split(d, dim=1)
    exact = torch.linalg.matrix_exp(t.double()[:, None, None] * a.double()) - torch.eye(d)
    assert torch.equal(hi, again)
    # ‖A‖₂ < 0.15. The angle is off by 0.02·λ³; the tail, at most ‖A‖²/6 of the whole, is in bf16.
    error = (hi + lo - exact).norm() / exact.norm()
    assert error < 2**-16 + 0.0203 * 0.15**2 + 3 * 2**-8 * 0.15**2 / 6


def test_upper_triangle_of_the_square_stands_for_both():
    a, t = manifold.skew(stack(2, 70)).bfloat16(), torch.tensor([1.0, 0.5])
    square = a.float() @ a.float()
    spoiled = square + stack(2, 70, seed=1).tril(-1)
    for one, two in zip(
        (*kernels.tail_operands(square, a, t), kernels.change_right(square, a, a, t, 1)),
        (*kernels.tail_operands(spoiled, a, t), kernels.change_right(spoiled, a, a, t, 1)),
        strict=True,
    ):
        assert torch.equal(one, two)


def test_shrink_reaches_what_it_may_and_no_further():
    a = manifold.skew(stack(3, 6)) * torch.tensor([0.0, 0.01, 4.0])[:, None, None]
    t = kernels.shrink(a.square().sum(2), 0.5)
    rho = torch.linalg.matrix_norm(a) / 2**0.5
    assert t[:2].eq(1).all() and rho[1] < 0.5
    torch.testing.assert_close(t[2] * rho[2], torch.tensor(0.5))
    assert (torch.linalg.matrix_norm(a, ord=2) <= rho * (1 + 1e-6)).all()


# --------------------------------------------------------------------------------------------------
# Operators.


def test_operators_say_what_they_change_and_return():
    for name, arguments in calls(3, 5):
        torch.library.opcheck(
            getattr(kernels, name), arguments, test_utils=("test_schema", "test_faketensor")
        )


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_launch_on_fake_cuda_tensors_is_one_operator():
    def on_cuda(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    with FakeTensorMode():
        for name, arguments in calls(3, 5):
            arguments = tree_map_only(Tensor, on_cuda, arguments)
            with Operators() as seen:
                result = getattr(kernels, name)(*arguments)
            assert seen.names == [f"lipnext.{name}.default"]
            assert all(x.device.type == "cuda" for x in tree_flatten(result)[0])


def test_what_a_launch_refuses_is_refused_without_a_gpu():
    with FakeTensorMode():
        x = torch.empty(2, 5, 5, device="cuda")
        with pytest.raises(ValueError, match="contiguous"):
            kernels.split_right(x.mT, 1)


# --------------------------------------------------------------------------------------------------
# Kernels.


def kernel_of(name: str) -> Callable:
    """The CUDA implementation of an operator."""
    return getattr(kernels, {"moments_": "_moments_cuda_"}.get(name, f"_{name}_cuda"))


@pytest.mark.slow
def test_kernels_compute_what_the_references_compute():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


def compare_in_interpreter() -> None:
    assert "triton" not in sys.modules  # importing the package does not import it
    # The interpreter cuts float32 off to bf16 where a GPU rounds. So do the references here.
    Tensor.bfloat16 = cut_off  # type: ignore[method-assign]
    for k, d in ((3, 37), (1, 64), (2, 130), (2, 1), (0, 8)):
        for (name, arguments), (_, same) in zip(calls(k, d), calls(k, d), strict=True):
            state = [x for x in arguments[1:4] if x is not None] if name == "moments_" else []
            for x in state:
                x.masked_fill_(below_tiles(d), torch.nan)
            found = kernel_of(name)(*arguments)
            for x, sign in zip(state, (-1, 1, -1), strict=False):
                kernels.complete_(x, sign)
            wanted = getattr(kernels, re.sub(r"(_?)$", r"_reference\1", name, count=1))(*same)
            for x, y in zip(tensors(arguments, found), tensors(same, wanted), strict=True):
                compare(name, x, y)
            if name == "moments_":
                assert_skew(*tensors(arguments[1], arguments[3], found[0]))


def below_tiles(d: int) -> Tensor:
    """The part of the state that `moments_` neither reads nor writes."""
    tile = torch.arange(d) // kernels.TILE
    return tile[:, None] > tile


def cut_off(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def tensors(*tree: object) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def compare(name: str, found: Tensor, wanted: Tensor) -> None:
    """Equal, but for sums, and for powers of t, which may be rounded otherwise: then the last bit
    differs."""
    found, wanted = found.float(), wanted.float()
    if name == "moments_" and wanted.ndim == 2:  # parts of a sum
        torch.testing.assert_close(found.sum(1), wanted.sum(1))
    elif name == "shrink":
        torch.testing.assert_close(found, wanted, equal_nan=True)
    elif name == "tail_operands":
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    elif name == "change_right" and wanted.ndim == 3 and wanted.shape[1] == 3 * wanted.shape[2]:
        thirds, thirds_wanted = (x.chunk(3, dim=1) for x in (found, wanted))
        torch.testing.assert_close(thirds[0], thirds_wanted[0], rtol=2**-7, atol=1e-6)
        # Either of the others is hi, and with it the sum is known to the last bit of lo.
        for x, y in zip(thirds[1:], thirds_wanted[1:], strict=True):
            torch.testing.assert_close(thirds[0] + x, thirds_wanted[0] + y, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(
            sum(thirds) - thirds[0], sum(thirds_wanted) - thirds_wanted[0], rtol=2**-14, atol=1e-6
        )
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch, d", [(90, 64), (80, 64), (90, 37), (80, 1)])
def test_kernels_compile_without_spills(arch, d, monkeypatch, tmp_path):
    """For a GPU that need not be there: what the launches ask for, registers read from the code."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    jit, launches = kernels._jit, []

    class Recorder:
        def __init__(self, kernel: Callable) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            return lambda *args, **options: launches.append((self.kernel, args, options))

    kernels._triton()
    monkeypatch.setattr(kernels, "_jit", Recorder)
    for name, arguments in calls(2, d):
        kernel_of(name)(*arguments)
    for kernel, args, options in launches:
        code = compiled(triton, jit(kernel), args, options, arch)
        usage = registers(triton, code.asm["cubin"], tmp_path / "code.cubin")
        print(kernel.__name__, f"sm_{arch}", f"d = {d}", usage)
        assert usage["STACK"] == usage["LOCAL"] == 0  # where spilled registers would be
        if kernel is kernels._shrink_kernel:
            continue  # a program stores one number
        assert "cvt.rn.bf16" in code.asm["ptx"]  # rounded to nearest
        if d % 16 == 0:
            # Stored in vectors, but for a tile's part of a norm.
            single = re.findall(r"st\.global\.b", code.asm["ptx"])
            assert len(single) == (kernel is kernels._moments_kernel)


def compiled(triton, kernel, args, options, arch):
    """The kernel as `kernel[grid](*args, **options)` would compile it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(zip(kernel.arg_names, args, strict=False))
    constants = {name: x for name, x in named.items() if x is None or (type(x) is int and x == 1)}
    constants |= {name: options.pop(name) for name in kernel.arg_names if name in options}
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.bool: "*i1", int: "i32"}
    signature = {
        name: types.get(getattr(x, "dtype", type(x)), "fp32") for name, x in named.items()
    } | dict.fromkeys(constants, "constexpr")
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {
        places[name]: [["tt.divisibility", 16]]
        for name, x in named.items()
        if isinstance(x, Tensor) or (isinstance(x, int) and x % 16 == 0)
    }
    source = ASTSource(kernel, signature, {places[x]: constants[x] for x in constants}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def registers(triton, cubin: bytes, path) -> dict[str, int]:
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}


if __name__ == "__main__":
    compare_in_interpreter()
