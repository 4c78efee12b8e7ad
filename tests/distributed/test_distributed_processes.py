"""What the processes of a run do together: rendezvous, results and errors of rank 0, gathering."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes

from lipnext_scale.distributed.processes import Processes, rendezvous
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.cpu import step_threads
from lipnext_scale.utils.errors import RunFailed, UserError


def start(store: dist.Store, world_size: int) -> list[dist.Store]:
    """All processes of a start, here as threads; rank 0 comes last."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = reversed(range(world_size))
        parts = list(pool.map(lambda rank: rendezvous(store, rank, world_size), ranks))
    return parts[::-1]


def test_a_start_sees_nothing_of_earlier_ones() -> None:
    """Not what they wrote, nor the requests of processes that died before the answer."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    for attempt in range(4):
        parts = start(store, 3)
        assert not parts[0].check(["address"])
        parts[1].set("address", f"of attempt {attempt}")
        assert {part.get("address") for part in parts} == {f"of attempt {attempt}".encode()}
        store.add("requests", attempt)  # as many of the next start were killed at once


def test_processes_that_do_not_come_are_named() -> None:
    """After the store's own timeout, which is half an hour, in a line."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RunFailed, match="2 of 3 processes did not come"):
        rendezvous(store, 0, 3)
    with pytest.raises(RunFailed, match="no answer from rank 0: "):
        rendezvous(store, 1, 3)


def agree(rank: int, world: int) -> dict[str, Any]:
    processes = Processes("cpu")
    acted = []

    def act() -> dict[str, int]:
        time.sleep(0.3)
        acted.append(rank)
        return {"from": rank}

    begin = time.monotonic()
    result = processes.on_rank0(act)
    waited = time.monotonic() - begin
    groups = {processes.host_group, processes.checkpoint_group, dist.group.WORLD}
    found = {
        "place": (processes.rank, processes.world_size),
        "result": result,
        "acted": acted,
        "errors": [error_of(lambda fail=fail: processes.on_rank0(fail)) for fail in FAILURES],
        "vectors": processes.gather(torch.tensor([float(rank), 10.0])).tolist(),
        "objects": processes.gather_objects({"rank": rank}),
        "groups": len(groups),
    }
    processes.close()
    assert waited > 0.25 and dist.is_initialized()  # a group of somebody else is not closed
    return found


def fail_in_configuration() -> None:
    raise ConfigError("run.dir", "/nowhere", "must be somewhere")


def fail_by_mistake() -> None:
    raise UserError("no such file")


def fail_in_the_run() -> None:
    raise RunFailed("step 3: the loss is nan")


FAILURES = [fail_in_configuration, fail_by_mistake, fail_in_the_run]
ERRORS = [
    ("ConfigError", "run.dir = '/nowhere': must be somewhere"),
    ("UserError", "no such file"),
    ("RunFailed", "step 3: the loss is nan"),
]


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except (UserError, RunFailed) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_all_ranks_get_what_rank_0_did() -> None:
    """Its result or its error reach every rank; it alone acts, and the others wait for it."""
    for rank, found in enumerate(run_processes(3, agree)):
        assert found == {
            "place": (rank, 3),
            "result": {"from": 0},
            "acted": [0] if rank == 0 else [],
            "errors": ERRORS,
            "vectors": [[float(r), 10.0] for r in range(3)],
            "objects": [{"rank": r} for r in range(3)],
            "groups": 3,
        }


def test_one_process_needs_no_group() -> None:
    """Errors come through as they are."""
    processes = Processes("cpu", alone=True)
    assert not dist.is_initialized()
    assert processes.on_rank0(lambda: 5) == 5
    assert [error_of(lambda fail=fail: processes.on_rank0(fail)) for fail in FAILURES] == ERRORS
    assert torch.equal(processes.gather(torch.ones(2)), torch.ones(1, 2))
    assert processes.gather_objects("x") == ["x"]
    processes.close()


@pytest.mark.parametrize(
    "own, of_node, variables, threads",
    [
        (96, 96, {}, 12),
        (48, 96, {"OMP_NUM_THREADS": "1"}, 12),  # bound to the half that is near the GPU
        (4, 96, {"OMP_NUM_THREADS": "1"}, 4),
        (2, 2, {}, 1),
        (96, 96, {"OMP_NUM_THREADS": "4"}, None),
        (96, 96, {"OMP_NUM_THREADS": "1", "LIPNEXT_OMP_CHOSEN": "yes"}, None),
    ],
)
def test_ranks_share_the_cores_of_a_node(
    own: int, of_node: int, variables: dict[str, str], threads: int | None
) -> None:
    """Unless the user said how many threads; a launcher's 1 does not count."""
    assert step_threads(own, of_node, 8, variables) == threads
