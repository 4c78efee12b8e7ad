"""Where the processes of one start find each other, and nothing of an earlier start.

torchrun keeps its store when it starts processes again, with the addresses of those that died. Each
of its agents counts only the restarts that its own processes caused, so on several machines nothing
that a process is told names a start for all of them. They agree on a name in the store itself: each
asks the first one for it, by a question of its own. When a start begins, all processes of earlier
ones have ended: torchrun waits for that.
"""

import time
import uuid

import torch.distributed as dist

from lipnext_scale.agreement import reason_of
from lipnext_scale.errors import RunFailed

POLL = 0.02  # seconds


def store_of_this_start(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of the store that these processes alone use; all of them must call it."""
    name = _answer_all(store, world_size) if rank == 0 else _ask(store)
    return dist.PrefixStore(name, store)


def _answer_all(store: dist.Store, world_size: int) -> str:
    """A new name, given to whoever asks until all processes have it.

    Questions of those that died are answered too: nobody hears that, and none can be told apart.
    """
    name, answered = f"start {uuid.uuid4().hex}", 0
    patience = store.timeout.total_seconds()  # type: ignore[attr-defined]  # its stub lacks it
    deadline = time.monotonic() + patience
    while (met := store.add(f"{name}/met", 0)) < world_size - 1:
        asked = store.add("asked", 0)
        for question in range(answered, asked):
            store.set(f"answer {question + 1}", name)
        answered = asked
        if time.monotonic() > deadline:
            missing = f"{world_size - 1 - met} of {world_size} processes"
            raise RunFailed(f"{missing} did not come within {patience:.0f} s")
        time.sleep(POLL)
    return name


def _ask(store: dist.Store) -> str:
    try:
        question = store.add("asked", 1)
        name = store.get(f"answer {question}").decode()
        store.add(f"{name}/met", 1)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RunFailed(f"the first process was not met: {reason_of(error)}") from None
    return name
