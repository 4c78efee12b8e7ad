"""What the processes of a run agree on: results and errors of the first, vectors, objects."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes

from lipnext_scale.config import ConfigError, from_dict
from lipnext_scale.errors import RunFailed, UserError
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.recipe import RunConfig


def agree(rank: int, world: int) -> dict[str, Any]:
    processes = Processes("cpu")
    acted = []

    def act() -> dict[str, int]:
        acted.append(rank)
        return {"from": rank}

    return {
        "place": (processes.rank, processes.world_size),
        "result": processes.on_rank0(act),
        "acted": acted,
        "errors": [told(lambda fail=fail: processes.on_rank0(fail)) for fail in FAILURES],
        "after": processes.on_rank0(lambda: "still in step"),
        "vectors": processes.gather(torch.tensor([float(rank), 10.0])),
        "objects": processes.gather_objects({"rank": rank}),
    }


def fail_in_configuration() -> None:
    raise ConfigError("run.dir", "/nowhere", "must be somewhere")


def fail_for_want_of_a_key() -> None:
    from_dict(RunConfig, {}, "run")


def fail_by_mistake() -> None:
    raise UserError("no such file")


def fail_in_the_run() -> None:
    raise RunFailed("step 3: the loss is nan")


FAILURES = [fail_in_configuration, fail_for_want_of_a_key, fail_by_mistake, fail_in_the_run]
TOLD = [
    ("ConfigError", "run.dir = '/nowhere': must be somewhere"),
    ("ConfigError", "run.dir: is required and was not given"),
    ("UserError", "no such file"),
    ("RunFailed", "step 3: the loss is nan"),
]


def told(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except (UserError, RunFailed) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("world", [1, 3])
def test_all_learn_what_the_first_did(world: int) -> None:
    """Its result or the error that it met reach every rank; it alone acts."""
    for rank, found in enumerate(run_processes(world, agree)):
        assert found["place"] == (rank, world)
        assert found["result"] == {"from": 0}
        assert found["acted"] == ([0] if rank == 0 else [])
        assert found["errors"] == TOLD
        assert found["after"] == "still in step"
        expected = torch.tensor([[float(r), 10.0] for r in range(world)])
        assert torch.equal(found["vectors"], expected)
        assert found["objects"] == [{"rank": r} for r in range(world)]


def test_alone_the_same_without_a_group() -> None:
    """One process needs no group for any of it, and errors come through as they are."""
    processes = Processes("cpu", alone=True)
    assert not dist.is_initialized()
    assert processes.on_rank0(lambda: 5) == 5
    assert [told(lambda fail=fail: processes.on_rank0(fail)) for fail in FAILURES] == TOLD
    assert torch.equal(processes.gather(torch.ones(2)), torch.ones(1, 2))
    assert processes.gather_objects("x") == ["x"]
    processes.close()


def wait_for_the_first(rank: int, world: int) -> float:
    processes = Processes("cpu")
    dist.barrier()
    start = time.monotonic()
    processes.on_rank0(lambda: time.sleep(0.3))
    return time.monotonic() - start


def test_nobody_goes_on_before_the_first_has_acted() -> None:
    """What it made (a directory, a file) is there for all."""
    assert min(run_processes(2, wait_for_the_first)) > 0.25


def leave(rank: int, world: int) -> tuple[bool, bool]:
    processes = Processes("cpu")
    apart = len({processes.host_group, processes.checkpoint_group, dist.group.WORLD}) == 3
    processes.close()
    return apart, dist.is_initialized()


def test_a_group_of_somebody_else_is_left_behind() -> None:
    """And the run's groups for small things and for checkpoints are neither it nor each other."""
    assert run_processes(2, leave) == [(True, True)] * 2
