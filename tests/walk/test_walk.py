"""Budgets of a step, found by walking it on GPUs that are not there (walk.py)."""

from pathlib import Path
from typing import Any

import budget_figures
import pytest
import torch
from budget_figures import BYTES_PER_SECOND, FLOPS_PER_SECOND, seconds
from torch._subclasses.fake_tensor import FakeTensorMode

from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.manifold import kernels as kernels_of_manifold
from lipnext_scale.models import kernels as kernels_of_models
from lipnext_scale.planning import guard
from lipnext_scale.planning.ledger import Ledger, Row
from lipnext_scale.planning.walk import Walk, Walked, walk_all

ROOT = Path(__file__).parents[2]
SMALL = ["model.depth=8", "model.width=1024", "model.blocks_per_bank=4"]
ROW = "parallel.weight_layout=row"
DDP, ZERO = "parallel.engine=ddp", "parallel.engine=deepspeed"
ZERO_3 = "parallel.zero_stage=3"


def small(*settings: str, **others: Any) -> dict[str, Any]:
    return {"settings": [*SMALL, *settings], **others}


SMALL_WALKS = {
    "bank": small(),
    "row": small(ROW),
    "HSDP": small(nodes=2),
    "accumulated": small("parallel.accumulation=2"),
    "recomputed": small("parallel.recompute_activations=true"),
    "retraction": small(what="retraction"),
    "evaluation": small(what="evaluation"),
    "checkpoint": small(what="checkpoint"),
    "DDP": small(DDP),
    "merged": small("optim.parametrisation=merged"),
}
MORE_WALKS = {
    "HSDP, row": small(ROW, nodes=2),
    "resharded": small("parallel.reshard_after_forward=true"),
    "Lookahead": small(what="lookahead"),
    "logged": small(what="logged"),
    "retraction, row": small(ROW, what="retraction"),
    "evaluation, row": small(ROW, what="evaluation"),
    "checkpoint, row": small(ROW, what="checkpoint"),
    "DDP, bf16": small(DDP, "parallel.reduce_precision=bf16"),
    "DDP, L32W2048": {"settings": ["model.width=2048", DDP]},
    "one GPU": small("parallel.engine=single", per_node=1),
    "1B on 1×8": {"config": "imagenet_1b"},
    "1B on 2×8": {"config": "imagenet_1b", "nodes": 2},
    "2B on 1×8": {"config": "imagenet_2b"},
    "2B on 2×8": {"config": "imagenet_2b", "nodes": 2},
    "2B on 1×8, merged": {
        "config": "imagenet_2b",
        "settings": ["optim.parametrisation=merged"],
    },
    "2B, Lookahead": {"config": "imagenet_2b", "what": "lookahead"},
    "1B on 1×8, row": {"config": "imagenet_1b", "settings": [ROW]},
    "2B on 2×8, row": {"config": "imagenet_2b", "nodes": 2, "settings": [ROW]},
}
ZERO_WALKS = {
    "ZeRO-1": small(ZERO, "parallel.zero_stage=1"),
    "ZeRO-2": small(ZERO),
    "ZeRO-3": small(ZERO, ZERO_3, "model.blocks_per_bank=8"),
    "1B, ZeRO-2": {"config": "imagenet_1b", "settings": [ZERO]},
    "1B, ZeRO-3": {"config": "imagenet_1b", "settings": [ZERO, ZERO_3]},
}

# What a walk may find at most on rank 0: lower a number with what lowers it. A step has no fp32
# products, none of M and R in its passes, and no waits; one that is logged, retracts, evaluates or
# writes a checkpoint has some, and DeepSpeed's. Elementwise: everything but matrix products.
#
#   products of d×d matrices in fp32 (the manifold step's), and of M and R in the passes
#   host waits
#   elementwise launches, and MB, of a block's forward and backward pass
#   elementwise bytes of the manifold step for each number of the matrices that a rank moves
#   minutes per epoch of ImageNet at batch 256
BUDGETS = {
    #                    fp32  M·R waits launch     MB  bytes minutes
    "bank":              (  0,   0,    0,   6.8,    76,   51,  0.17),
    "row":               (  0,   0,    0,   6.8,    76,   85,  0.16),
    "HSDP":              (  0,   0,    0,   6.8,    38,   63,  0.10),
    "HSDP, row":         (  0,   0,    0,   6.8,    38,   85,  0.10),
    "accumulated":       (  0,   0,    0,  13.5,    76,   51,  0.19),
    "recomputed":        (  0,   0,    0,   9.0,   116,   51,  0.20),
    "resharded":         (  0,   0,    0,   6.8,    76,   51,  0.17),
    "Lookahead":         (  0,   0,    0,   6.8,    76,   73,  0.17),
    "logged":            (  4,   0,    0,   6.8,    76,   51,  0.21),
    "retraction":        (  8,   0,    8,   6.8,    76,   51,  0.20),
    "retraction, row":   (  4,   0,    5,   6.8,    76,   85,  0.17),
    "evaluation":        (  0,   0,    4,   2.3,   314,    0,  0.39),
    "evaluation, row":   (  0,   0,    6,   2.3,   314,    0,  0.38),
    "checkpoint":        (  0,   0,    2,   0.0,     0,    0,  0.02),
    "checkpoint, row":   (  0,   0,    2,   0.0,     0,    0,  0.01),
    "merged":            (  0,   0,    0,   6.8,    76,   51,  0.16),
    "DDP":               (  0,   0,    0,   6.8,    76,  109,  0.16),
    "DDP, bf16":         (  0,   0,    0,   6.8,    76,  109,  0.17),
    "DDP, L32W2048":     (  0,   0,    0,   6.4,   143,  109,  1.91),
    "ZeRO-1":            (  0,   0,    4,   6.8,    76,   55,  0.18),
    "ZeRO-2":            (  0,   0,    7,   6.8,    76,   55,  0.17),
    "ZeRO-3":            (  0,   0,    6,   6.4,    72,   55,  0.16),
    "1B, ZeRO-2":        (  0,   0,    7,   7.5,   343,   55,  8.09),
    "1B, ZeRO-3":        (  0,   0,    6,   6.4,   285,   55,  7.88),
    "one GPU":           (  0,   0,    0,   6.8,   608,   51,  1.02),
    "1B on 1×8":         (  0,   0,    0,   6.4,   285,   51,  7.46),
    "1B on 2×8":         (  0,   0,    0,   6.4,   143,   63,  4.00),
    "2B on 1×8":         (  0,   0,    0,   6.4,   403,   51, 15.68),
    "2B on 2×8":         (  0,   0,    0,   6.4,   202,   63,  8.35),
    "2B on 1×8, merged": (  0,   0,    0,   6.4,   403,   51, 14.67),
    "2B, Lookahead":     (  0,   0,    0,   6.4,   403,  151, 18.93),
    "1B on 1×8, row":    (  0,   0,    0,   7.5,   343,   78,  7.63),
    "2B on 2×8, row":    (  0,   0,    0,   9.0,   297,   78, 10.53),
}  # fmt: skip


def figures(found: dict[str, Any]) -> tuple[float, ...]:
    return (
        found["square_products"]["fp32"],
        found["square_products"]["passes"],
        found["waits"],
        found["launches_per_block"],
        found["bytes_per_block"] / 1e6,
        found["manifold_bytes_per_entry"],
        found["minutes_per_epoch"],
    )


def walk_each(walks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """In one process: starting it takes longer than a walk."""
    if reason := guard.missing():
        pytest.skip(reason)
    return dict(
        zip(walks, map(found, walks.values(), walk_all(map(walk, walks.values()))), strict=True)
    )


def walk(given: dict[str, Any]) -> Walk:
    given = {"config": "imagenet_1b", **given, "what": (given.get("what", "step"),)}
    return Walk(**given | {"config": str(ROOT / "configs" / f"{given['config']}.yaml")})


def found(given: dict[str, Any], walked: Any) -> dict[str, Any]:
    assert isinstance(walked, Walked), walked
    recipe = load_recipe(walk(given).config, walk(given).settings)
    (rows,) = walked.rows.values()
    sizes = recipe.model.width, recipe.model.depth, recipe.data.batch_size
    return budget_figures.figures(rows, *sizes, walked.entries)


@pytest.fixture(scope="module")
def small_walks() -> dict[str, dict[str, Any]]:
    return walk_each(SMALL_WALKS)


@pytest.fixture(scope="module")
def more_walks() -> dict[str, dict[str, Any]]:
    return walk_each(MORE_WALKS)


@pytest.fixture(scope="module")
def zero_walks() -> dict[str, dict[str, Any]]:
    pytest.importorskip("deepspeed")
    return walk_each(ZERO_WALKS)


def require_within_budget(name: str, found: dict[str, Any]) -> None:
    assert not found["unpriced"]
    over = [have > most for have, most in zip(figures(found), BUDGETS[name], strict=True)]
    assert not any(over), f"{figures(found)} of {BUDGETS[name]}; {found['wait_places']}"


@pytest.mark.parametrize("name", SMALL_WALKS)
def test_a_small_step_stays_within_its_budget(name, small_walks):
    require_within_budget(name, small_walks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_WALKS)
def test_more_and_full_steps_stay_within_their_budgets(name, more_walks):
    require_within_budget(name, more_walks[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_WALKS)
def test_steps_of_zero_stay_within_their_budgets(name, zero_walks):
    require_within_budget(name, zero_walks[name])


# The ledger itself. Without gradients fake tensors need no guard.


def noted(function: Any) -> list[Row]:
    with FakeTensorMode(), Ledger() as ledger:
        function()
    return ledger.rows


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def test_flops_of_products_in_the_precision_of_their_operands():
    a, b = (3, 5), (5, 7)

    def products() -> None:
        half = torch.bfloat16
        torch.mm(on_gpu(*a), on_gpu(*b))
        torch.addmm(on_gpu(7, dtype=half), on_gpu(*a, dtype=half), on_gpu(*b, dtype=half))
        torch.bmm(on_gpu(2, *a, dtype=half), on_gpu(2, *b, dtype=half), out_dtype=torch.float32)
        torch.mm(on_gpu(*a, dtype=half), on_gpu(*b, dtype=half), out_dtype=torch.float32)
        added = torch.baddbmm(
            on_gpu(2, 3, 7),
            on_gpu(2, *a, dtype=half),
            on_gpu(2, *b, dtype=half),
            out_dtype=torch.float32,
        )
        assert added.shape == (2, 3, 7) and added.dtype == torch.float32
        torch.baddbmm(added, on_gpu(2, *a), on_gpu(2, *b), beta=0, out=added)

    rows, one = noted(products), 2 * 3 * 5 * 7
    expected = ["fp32", "bf16", "bf16", "bf16", "bf16", "fp32"]
    assert [row.precision for row in rows] == expected
    assert [row.flops for row in rows] == [one, one, 2 * one, one, 2 * one, 2 * one]
    assert rows[4].read == 2 * 2 * (15 + 35) + 2 * 21 * 4 and rows[4].written == 2 * 21 * 4
    assert rows[5].read == 2 * 4 * (15 + 35)  # nothing is added


def test_bytes_of_kernels_ours_too():
    @torch.library.custom_op("lipnext::walked", mutates_args=("changed",))
    def walked(read: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(read)

    @walked.register_fake
    def _(read: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(read)

    def kernels() -> None:
        x, y = on_gpu(4, 8), on_gpu(8)
        x.add_(y)  # y is expanded, and read once
        torch.neg(x.clone(), out=torch.empty_like(x))
        x.narrow(0, 0, 2).zero_()
        walked(y, x)

    rows = [(row.name, row.read, row.written) for row in noted(kernels)]
    assert rows == [
        ("add_", 128 + 32, 128),
        ("clone", 128, 128),
        ("neg", 128, 128),
        ("zero_", 0, 64),
        ("lipnext::walked", 32 + 128, 128 + 32),
    ]


def test_bytes_of_kernels_that_touch_a_part():
    k, d, half = 2, 80, torch.bfloat16  # the last tiles are cut off

    def kernels() -> None:
        x, grad = on_gpu(1, 2, 2, 64, dtype=half), on_gpu(4, 64, dtype=half)
        kernels_of_models.shift_(x, 4, "zero", False)
        signs, bias_parts = on_gpu(4, 6, dtype=torch.uint8), on_gpu(1, 64)
        kernels_of_models.activate_backward(grad, signs, grad, bias_parts, None, 4)
        product, m, v = (on_gpu(k, d, d) for _ in range(3))
        usable = on_gpu(dtype=torch.bool)
        a, t = product.to(half), on_gpu(k)
        kernels_of_manifold.moments_(a, m, v, None, usable, 0.9, 0.99, 0.0, 1.0, False)
        kernels_of_manifold.tail_operands(product, a, t)
        kernels_of_manifold.change_right(product, a, a, t, 1)

    matrices, upper = k * d * d, k * (32 * 80 + 32 * 48 + 16 * 16)
    wide = k * (64 * 80 + 16 * 16)
    rows = [(row.name, row.read, row.written) for row in noted(kernels)]
    assert rows == [
        ("lipnext::shift", 4 * 16 * 2, 4 * 16 * 2),
        ("lipnext::activate_backward", 4 * 64 * 2 + 24, 4 * 64 * 2 + 64 * 4),
        ("_to_copy", 4 * matrices, 2 * matrices),
        ("lipnext::moments_", 2 * matrices + 8 * upper, 2 * matrices + 8 * upper + 4 * k * 6),
        ("lipnext::tail_operands", 6 * wide, 4 * matrices),
        ("lipnext::change_right", 6 * wide + 2 * matrices, 6 * matrices),
    ]


def test_waits_of_the_host():
    def reads() -> None:
        x = on_gpu(3)
        bool(torch.isfinite(x).all())
        x.cpu()
        x.to("cpu", non_blocking=True)
        torch.empty(3).to("cuda:0")
        x.sum().item()

    kinds = [(row.kind, row.name) for row in noted(reads) if row.kind in ("wait", "copy")]
    assert kinds == [
        ("wait", "item"),
        ("wait", "copy to host"),
        ("copy", "copy to host"),
        ("wait", "copy to device"),
        ("wait", "item"),
    ]


def test_a_time_is_that_of_arithmetic_or_of_memory():
    product = Row("product", "", "mm", "", False, flops=10**15, precision="bf16", read=8)
    kernel = Row("kernel", "", "add", "", False, read=10**9, written=10**9)
    wait = Row("wait", "", "item", "", False, read=10**9)
    expected = 1e15 / FLOPS_PER_SECOND["bf16"] + 2e9 / BYTES_PER_SECOND
    assert seconds([product, kernel, wait]) == pytest.approx(expected)
