"""A rank's memory: every storage once, of what is distributed the local part."""

import pytest
import torch
from gloo import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lipnext_scale.parallel.estimate import Memory, memory_per_rank

PARAMETERS = 5 * 7 + 7 + 7 * 3 + 3


def trained(model: nn.Module) -> Memory:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return memory_per_rank(model, [optimizer.state])


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def test_a_plain_model_is_measured_exactly() -> None:
    """AdamW keeps two moments and a counter of four bytes per parameter."""
    memory = trained(two_layers())
    assert memory.parameters == memory.gradients == 4 * PARAMETERS
    assert memory.optimizer == 2 * 4 * PARAMETERS + 4 * 4
    assert memory.total == 4 * 4 * PARAMETERS + 4 * 4


def test_before_the_first_step_only_parameters_are_there() -> None:
    """No gradients, no state; an iterable of parameters does as well as a module."""
    model = two_layers()
    memory = memory_per_rank(iter(model.parameters()), [{}])
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * PARAMETERS, 0, 0)


def test_each_storage_counts_once() -> None:
    """Tied weights, views of one buffer and a state that is the parameter itself."""
    parameter = nn.Parameter(torch.zeros(10))
    buffer = torch.zeros(6, dtype=torch.float64)
    state = {
        parameter: {"step": 3, "slow": parameter.detach(), "moments": [buffer[:2], buffer[2:]]}
    }
    memory = memory_per_rank([parameter, parameter.detach().view(2, 5)], [state, state])
    assert (memory.parameters, memory.gradients, memory.optimizer) == (40, 0, 48)


def test_a_model_without_values_takes_no_memory() -> None:
    """On the meta device there is nothing yet."""
    with torch.device("meta"):
        assert memory_per_rank(two_layers()).total == 0


def train_sharded(rank: int, world: int) -> Memory:
    model = two_layers()
    for module in [*model.children(), model]:
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    return trained(model)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_fsdp_leaves_each_rank_its_padded_part(world: int) -> None:
    """Every rank stores as many rows of a parameter as the one with the most."""
    rows = [-(-size // world) for size in (7, 7, 3, 3)]
    padded = 4 * (rows[0] * 5 + rows[1] + rows[2] * 7 + rows[3])
    for memory in run_processes(world, train_sharded):
        assert memory.parameters == memory.gradients == padded
        assert memory.optimizer <= 2 * padded + 4 * 4
