"""Worker processes: torch's DataLoader, told how to start and how to end."""

import gc
import multiprocessing
import signal
import threading
from collections.abc import Iterable, Iterator
from ctypes import CDLL, c_int, c_ulong
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import cv2
import torch
from torch.utils.data import DataLoader, Dataset

from lipnext_scale.cpu import keep_freed_memory

Made = TypeVar("Made")
_PR_SET_PDEATHSIG = 1


def made_by_workers(
    dataset: Dataset[Made],
    requests: Iterable[Any],
    workers: int,
    prefetch: int = 2,
    in_order: bool = True,
) -> Iterator[Made]:
    """dataset[request] for every request, made by processes, or here if there are none.

    in_order: in turn. Otherwise whoever is free gets the next, and what is made comes at once.

    The processes end with the iterator, or with ours.
    """
    before = multiprocessing.active_children()
    made = iter(
        DataLoader(
            dataset,
            sampler=requests,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            in_order=in_order,
            worker_init_fn=start_worker,
            # The quickest start, and scripts need no `if __name__ == "__main__"`. Workers touch
            # neither the GPU nor other processes.
            multiprocessing_context="fork" if workers else None,
            # It draws a seed, which nothing here uses, and must not draw it from the run's own.
            generator=torch.Generator(),
        )
    )
    processes = [process for process in multiprocessing.active_children() if process not in before]
    # At the exit of ours, multiprocessing asks its children to end by a signal that workers leave
    # to their rank, and waits for them: so they are ended before, where an error kept the iterator.
    Finalize(made, _end, args=(processes,), exitpriority=1)
    return _waiting_for_workers(made, processes)


def _waiting_for_workers(made: Iterator[Made], processes: list[BaseProcess]) -> Iterator[Made]:
    """torch raises where a worker's end reaches us as a signal. Where that happens in a finalizer
    Python drops the error, and those that are left would go on with ever less to do."""
    for item in made:
        for process in processes:
            if not process.is_alive():
                raise RuntimeError(f"DataLoader worker (pid {process.pid}) has ended")
        yield item


def _end(processes: list[BaseProcess]) -> None:
    living = [process for process in processes if process.is_alive()]
    if living and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise at their end
    for process in living:
        process.kill()


def start_worker(_number: int) -> None:
    """A worker leaves signals to its rank, which stops at a safe moment, and ends when it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    CDLL(None).prctl(c_int(_PR_SET_PDEATHSIG), c_ulong(signal.SIGKILL))
    cv2.setNumThreads(0)
    keep_freed_memory()
    gc.freeze()  # what is inherited is not looked through again, and so stays shared


def lost_a_worker(error: RuntimeError) -> bool:
    """Whether torch says that a worker has died; it may say so at any moment, in any call."""
    return str(error).startswith("DataLoader worker (pid")  # "Caught … in" one is another thing
