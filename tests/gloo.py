"""Real processes for tests: a function run by every rank of a gloo group, results gathered.

def work(rank, world_size, x):          # module level, so that it can be pickled
    ...                                 # torch.distributed is initialised
    return something_picklable

results = run_processes(4, work, x)     # results[rank]
"""

import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The server imports torch once; every rank is a fork of it, ready in 40 ms. So ranks need not
# outlive a call, and no test sees the process state that another one left.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "deepspeed",  # where it is installed
        "torch._inductor.compile_fx",  # which every start of DeepSpeed would import, in 1.3 s
        "pytest",
        "lipnext_scale.training.trainer",
    ]
)


def run_processes(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120
) -> list[Any]:
    """function(rank, world_size, *arguments) on every rank; its results in rank order.

    The first rank that fails ends all; its traceback is the assertion's message. A hang is an error
    after `timeout` seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ends, processes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_entry, args=(theirs, store, rank, world_size, function, arguments)
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        patience = 0.0
        try:
            results = _collect(ends, time.monotonic() + timeout, timeout)
            patience = 10.0
            return results
        finally:
            _end(processes, patience)


def _entry(
    end: Connection,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as commands do: DeepSpeed looks for garbage, even where that is switched off
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
        _send(end, "result", function(rank, world_size, *arguments))
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        _send(end, "error", f"rank {rank} of {world_size}:\n{traceback.format_exc()}")


def _send(end: Connection, kind: str, value: Any) -> None:
    """By value: a pipe would pass tensors as handles to memory that ends with the process."""
    end.send_bytes(pickle.dumps((kind, value)))


def _collect(ends: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} have not finished after {timeout} s"
        for end in ready:
            rank = waiting[end]  # type: ignore[index]
            try:
                kind, value = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                kind, value = "error", f"rank {rank} died"
            assert kind == "result", value
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _end(processes: list[BaseProcess], patience: float) -> None:
    for process in processes:
        process.join(timeout=patience)
        if process.is_alive():
            process.kill()
            process.join()
