"""Every collective that anybody issues is counted once, with the bytes that it really sends."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gloo import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lipnext_scale.parallel.traffic import _RULES, _SILENT, Collective, CountTraffic

WORLDS = [1, 2, 4]
ROWS, WIDTH = 8, 3  # of float32: 4 bytes
BYTES = ROWS * WIDTH * 4

Counted = dict[str, Collective]


def counted(region: Callable[[], Any]) -> Counted:
    with CountTraffic() as traffic:
        region()
    return traffic.collectives


@cache
def results_of(worker: Callable[..., Any], world: int) -> list[dict[str, Any]]:
    """A world of processes is started once for all the tests that look at it."""
    return run_processes(world, worker)


# ---- each collective by itself -------------------------------------------------------------------


def collectives(rank: int, world: int) -> dict[str, Any]:
    return {
        "each": call_each(rank, world),
        "uneven": exchange_unevenly(rank, world),
        "functional": call_functional(rank, world),
        "groups": reduce_in_pairs(rank, world),
        "nested": count_two_regions(rank, world),
    }


def call_each(rank: int, world: int) -> dict[str, Counted]:
    x = torch.ones(ROWS, WIDTH)
    part, whole = torch.ones(ROWS // world, WIDTH), torch.ones(world * ROWS, WIDTH)
    per_rank = [torch.ones(ROWS, WIDTH) for _ in range(world)]
    at_root = per_rank if rank == 0 else None

    def to_neighbour() -> None:
        """An even rank sends, its odd neighbour receives."""
        if rank % 2 == 0 and rank + 1 < world:
            dist.send(x, rank + 1)
        elif rank % 2:
            dist.recv(x, rank - 1)

    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather(per_rank, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, per_rank),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, x),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce_async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all_to_all": lambda: dist.all_to_all(
            [torch.empty(ROWS, WIDTH) for _ in range(world)], per_rank
        ),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "scatter": lambda: dist.scatter(x, at_root),
        "gather": lambda: dist.gather(x, at_root),
        "barrier": lambda: dist.barrier(),
        "send": to_neighbour,
    }
    return {name: counted(call) for name, call in calls.items()}


@pytest.mark.parametrize("world", WORLDS)
def test_each_collective_sends_what_its_shapes_say(world: int) -> None:
    """One call each, with the bytes of the table in the module's docstring."""
    others = world - 1
    for rank, results in enumerate(results_of(collectives, world)):
        expected = {
            "all_gather": {"all_gather": BYTES * others},
            "all_gather_into_tensor": {"all_gather": BYTES * others},
            "reduce_scatter": {"reduce_scatter": BYTES * others},
            "reduce_scatter_tensor": {"reduce_scatter": BYTES // world * others},
            "all_reduce": {"all_reduce": 2 * BYTES // world * others},
            "all_reduce_async": {"all_reduce": 2 * BYTES // world * others},
            "all_to_all_single": {"all_to_all": BYTES // world * others},
            "all_to_all": {"all_to_all": BYTES * others},
            "broadcast": {"broadcast": BYTES // world * others},
            "reduce": {"reduce": BYTES // world * others},
            "scatter": {"scatter": BYTES * others if rank == 0 else 0},
            "gather": {"gather": 0 if rank == 0 else BYTES},
            "barrier": {"barrier": 0},
            "send": {} if world == 1 else {"recv": 0} if rank % 2 else {"send": BYTES},
        }
        assert results["each"] == {
            call: {name: Collective(1, sent) for name, sent in collectives.items()}
            for call, collectives in expected.items()
        }


def rows_sent(rank: int, to: int) -> int:
    return (3 * rank + 2 * to) % 4


def exchange_unevenly(rank: int, world: int) -> list[Counted]:
    ours = [rows_sent(rank, other) for other in range(world)]
    theirs = [rows_sent(other, rank) for other in range(world)]
    x = torch.ones(sum(ours), 5, dtype=torch.float64)
    received = x.new_empty(sum(theirs), 5)
    return [
        counted(lambda: dist.all_to_all_single(received, x, theirs, ours)),
        counted(lambda: functional.all_to_all_single(x, theirs, ours, dist.group.WORLD) + 0),
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_an_uneven_exchange_counts_the_rows_that_are_for_others(world: int) -> None:
    """What a rank keeps for itself is not sent; some send nothing to some."""
    for rank, results in enumerate(results_of(collectives, world)):
        rows = sum(rows_sent(rank, other) for other in range(world) if other != rank)
        assert results["uneven"] == [{"all_to_all": Collective(1, rows * 5 * 8)}] * 2


# ---- functional collectives, DTensor, groups smaller than the world ------------------------------


def call_functional(rank: int, world: int) -> dict[str, Counted]:
    x, group = torch.ones(ROWS, WIDTH), dist.group.WORLD
    mesh = init_device_mesh("cpu", (world,))
    uneven = distribute_tensor(torch.ones(world + 1, WIDTH), mesh, [Shard(0)])
    leaf = x.clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: functional.all_reduce(x, "sum", group) + 1,
        "all_gather": lambda: functional.all_gather_tensor(x, 0, group) + 1,
        "reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
        "broadcast": lambda: functional.broadcast(x, 0, group) + 1,
        "with_gradient": lambda: (
            functional.all_gather_tensor_autograd(leaf, 0, group).sum().backward()
        ),
        "full_tensor": lambda: uneven.full_tensor(),
        "sum": lambda: uneven.sum().full_tensor(),
    }
    return {name: counted(call) for name, call in calls.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_functional_collectives_are_counted_once(world: int) -> None:
    """They are made of plain ones; DTensor issues them inside its own operators."""
    others = world - 1
    gathered = Collective(1, BYTES * others)
    for results in results_of(collectives, world):
        assert results["functional"] == {
            "all_reduce": {"all_reduce": Collective(1, 2 * BYTES // world * others)},
            "all_gather": {"all_gather": gathered},
            "reduce_scatter": {"reduce_scatter": Collective(1, BYTES // world * others)},
            "broadcast": {"broadcast": Collective(1, BYTES // world * others)},
            "with_gradient": {"all_gather": gathered, "reduce_scatter": gathered},
            # world + 1 rows: every rank sends two, the second of most is padding
            "full_tensor": {"all_gather": Collective(1, 2 * WIDTH * 4 * others)},
            "sum": {"all_reduce": Collective(1, 2 * 4 * others // world)},
        }


def reduce_in_pairs(rank: int, world: int) -> Counted:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    x = torch.ones(ROWS, WIDTH)

    def reduce() -> None:
        for pair in pairs[rank // 2 : rank // 2 + 1]:
            dist.all_reduce(x, group=pair)
            functional.all_reduce(x, "sum", pair) + 1

    return counted(reduce)


@pytest.mark.parametrize("world", [2, 4])
def test_the_group_of_the_call_counts_not_the_world(world: int) -> None:
    """An all-reduce among two sends its tensor once, however many ranks there are."""
    for results in results_of(collectives, world):
        assert results["groups"] == {"all_reduce": Collective(2, 2 * BYTES)}


def call_compiled(rank: int, world: int) -> tuple[int, list[Counted]]:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def reduce(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    measured = [counted(lambda: reduce(torch.ones(ROWS, WIDTH))) for _ in range(2)]
    return len(graphs), measured


def test_a_compiled_region_stays_compiled_and_is_counted() -> None:
    """Counting does not make torch.compile step back, and sees what the compiled code sends."""
    for graphs, measured in run_processes(2, call_compiled):
        assert graphs == 1
        assert measured == [{"all_reduce": Collective(1, BYTES)}] * 2


def test_every_collective_of_this_torch_has_a_rule() -> None:
    """A collective that a newer torch adds is noticed here, not in a run."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    missing = [
        name
        for name in names
        for namespace, operator in [name.split("::")]
        if namespace in _RULES and operator not in _RULES[namespace] and operator not in _SILENT
    ]
    assert "c10d::allreduce_" in names
    assert not missing


def reduce_without_a_rule(rank: int, world: int) -> list[str]:
    del _RULES["c10d"]["allreduce_"]
    with CountTraffic() as traffic:
        dist.all_reduce(torch.ones(2))
    return list(traffic.collectives)


def test_a_collective_without_a_rule_is_told() -> None:
    """An incomplete count ends no run, but it names the operator that it could not count."""
    assert "unknown_allreduce_" in run_processes(1, reduce_without_a_rule)[0]


# ---- what trains a model -------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def padded_bytes(layer: nn.Linear, ranks: int) -> int:
    """What FSDP2 gathers of a layer: each parameter's first dimension made a multiple."""
    return sum(
        -(-parameter.shape[0] // ranks) * ranks * parameter[0].numel() * 4
        for parameter in layer.parameters()
    )


def parallel(kind: str, world: int) -> nn.Module:
    model = two_layers()
    if kind == "ddp":
        return DistributedDataParallel(model)
    shape = (2, 2) if kind == "hsdp" else (world,)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for module in [*model.children(), model]:
        fully_shard(module, mesh=mesh)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


def training(rank: int, world: int) -> dict[str, Any]:
    kinds = ["fsdp", "ddp"] + ["hsdp"] * (world == 4)
    steps = {kind: train_step(rank, world, kind) for kind in kinds}
    return {**steps, "optimizer": step_and_clip(rank, world)}


def train_step(rank: int, world: int, kind: str) -> tuple[Counted, bool]:
    """The collectives of the first step; whether its gradients, uncounted, have the same bits."""
    batch = torch.rand(4, 5, generator=torch.Generator().manual_seed(rank))
    model, uncounted = parallel(kind, world), parallel(kind, world)
    measured = counted(lambda: model(batch).square().sum().backward())
    uncounted(batch).square().sum().backward()
    return measured, all(map(torch.equal, gradients(model), gradients(uncounted)))


@pytest.mark.parametrize("world", WORLDS)
def test_fsdp_gathers_and_scatters_padded_layers(world: int) -> None:
    """Each layer is gathered in both passes and its gradient scattered; alone nothing is sent."""
    sizes = [padded_bytes(layer, world) for layer in two_layers()]
    sent = sum(sizes) // world * (world - 1)
    for results in results_of(training, world):
        measured, equal = results["fsdp"]
        assert equal
        if world == 1:
            assert measured == {}
        else:
            assert measured == {
                "all_gather": Collective(4, 2 * sent),
                "reduce_scatter": Collective(2, sent),
            }


def test_hsdp_also_reduces_among_the_replicas() -> None:
    """2 shards × 2 replicas: half of each layer to one peer, then an all-reduce of that half."""
    half = sum(padded_bytes(layer, 2) for layer in two_layers()) // 2
    for results in results_of(training, 4):
        measured, equal = results["hsdp"]
        assert equal
        assert measured == {
            "all_gather": Collective(4, 2 * half),
            "reduce_scatter": Collective(2, half),
            "all_reduce": Collective(2, half),
        }


@pytest.mark.parametrize("world", WORLDS)
def test_ddp_reduces_all_gradients(world: int) -> None:
    """Its reducer, in C++ and in the backward pass, is seen: one bucket of all parameters."""
    size = 4 * sum(parameter.numel() for parameter in two_layers().parameters())
    for results in results_of(training, world):
        measured, equal = results["ddp"]
        assert equal
        assert measured == {"all_reduce": Collective(1, 2 * size * (world - 1) // world)}


def step_and_clip(rank: int, world: int) -> dict[str, Counted]:
    model = parallel("fsdp", world)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    shards = [parameter.grad for parameter in model.parameters()]
    return {
        "norm": counted(lambda: nn.utils.get_total_norm(shards).full_tensor()),
        "step": counted(optimizer.step),
    }


def test_an_optimizer_of_shards_says_nothing_and_a_norm_little() -> None:
    """AdamW on FSDP2's shards is local; the norm is an all-reduce of a number per parameter."""
    for results in results_of(training, 2):
        measured = results["optimizer"]
        assert measured["step"] == {}
        assert measured["norm"].keys() == {"all_reduce"}
        assert 0 < measured["norm"]["all_reduce"].bytes_sent <= 4 * 4


def count_two_regions(rank: int, world: int) -> list[Collective]:
    counter, outer = CountTraffic(), CountTraffic()
    with outer:
        for _ in range(2):
            with counter:
                dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2))
    return [mode.traffic.collectives["all_reduce"] for mode in (counter, outer)]


def test_regions_may_be_nested_and_entered_again() -> None:
    """A counter goes on counting when entered again, and hides nothing from one around it."""
    for results in results_of(collectives, 2):
        assert results["nested"] == [Collective(2, 16), Collective(4, 32)]
