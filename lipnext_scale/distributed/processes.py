"""The processes of a run: their ranks, their rendezvous and what they do together.

torchrun, accelerate launch and deepspeed start the processes and set RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE (deepspeed: LOCAL_SIZE). Without these there is one.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lipnext_scale.utils.collectives import everywhere, on_rank0, reason_of
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import RunFailed

# --------------------------------------------------------------------------------------------------
# Rendezvous: where the processes of one start find each other, and nothing of an earlier start.
#
# torchrun keeps its store when it restarts processes, with the addresses of those that died. Each
# of its agents counts only the restarts that its own processes caused, so on several machines no
# environment variable names a start for all of them. They agree on a name in the store itself:
# each asks rank 0 for it, by a request of its own. When a start begins, all processes of earlier
# ones have ended: torchrun waits for that.

POLL = 0.02  # seconds


def rendezvous(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """A part of the store that these processes alone use; all of them must call it."""
    name = _answer_all(store, world_size) if rank == 0 else _ask(store)
    return dist.PrefixStore(name, store)


def _answer_all(store: dist.Store, world_size: int) -> str:
    """Rank 0: a new name for every request, until all processes have it.

    It cannot distinguish requests of processes that died, and answers them too.
    """
    name, answered = f"start {uuid.uuid4().hex}", 0
    patience = store.timeout.total_seconds()  # type: ignore[attr-defined]  # its stub lacks it
    deadline = time.monotonic() + patience
    while (met := store.add(f"{name}/met", 0)) < world_size - 1:
        requested = store.add("requests", 0)
        for number in range(answered, requested):
            store.set(f"answer {number + 1}", name)
        answered = requested
        if time.monotonic() > deadline:
            missing = f"{world_size - 1 - met} of {world_size} processes"
            raise RunFailed(f"{missing} did not come within {patience:.0f} s")
        time.sleep(POLL)
    return name


def _ask(store: dist.Store) -> str:
    try:
        number = store.add("requests", 1)
        name = store.get(f"answer {number}").decode()
        store.add(f"{name}/met", 1)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RunFailed(f"no answer from rank 0: {reason_of(error)}") from None
    return name


Result = TypeVar("Result")


class Processes:
    """All processes of a run; NCCL between GPUs, gloo between CPUs.

    alone: one process needs no process group.
    local_world_size: the processes of a node, if not as the launcher says.
    timeout: seconds that a collective may take; None: torch's default.
    A process group that exists already is used as it is and not closed.
    """

    def __init__(
        self,
        device_name: str,
        alone: bool = False,
        local_world_size: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._made_group = not dist.is_initialized()
        if not self._made_group:
            self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        of_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
        self.local_world_size = local_world_size or int(of_node or self.world_size)
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank % self.local_world_size)))
        self.device = choose_device(device_name, self.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # The environment may ask for TF32, whose ten bits would not keep a matrix orthogonal.
            torch.backends.cuda.matmul.allow_tf32 = False
        self.host_group = self.checkpoint_group = None
        self._grouped = not (alone and self.world_size == 1)
        if not self._grouped:
            return
        if self._made_group:
            self._make_group(device_name)
        if dist.get_backend() != "fake":  # dry runs have no other backend
            # For small objects, and for checkpoints, whose thread must not share a group with the
            # training.
            self.host_group = dist.new_group(backend="gloo", timeout=self.timeout)
            self.checkpoint_group = dist.new_group(backend="gloo", timeout=self.timeout)

    def _make_group(self, device_name: str) -> None:
        store = self._store()
        # Groups of other backends than rank 0's would wait for each other forever.
        store.set(f"device of {self.rank}", self.device.type)
        first = store.get("device of 0").decode()
        if first != self.device.type:
            found = f"{self.device.type} on {os.uname().nodename}, {first} on rank 0"
            raise ConfigError("run.device", device_name, f"{found}; set it, or fix that host")
        # For the report of a hang: how many collectives torch records.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            timeout=self.timeout,
            world_size=self.world_size,
            rank=self.rank,
            store=store,
        )

    def _store(self) -> dist.Store:
        if self.world_size == 1:
            return dist.HashStore()
        store, _, _ = next(dist.rendezvous("env://", self.rank, self.world_size))
        return rendezvous(store, self.rank, self.world_size)

    def apply_timeout(self, group: dist.ProcessGroup) -> None:
        """To a group that torch or DeepSpeed created with its own."""
        if self.timeout is not None and self.host_group is not None:
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)

    def gather(self, values: Tensor) -> Tensor:
        """The vectors of all ranks as rows [world_size, n], on every rank."""
        if not self._grouped:
            return values[None]
        gathered = values.new_empty(self.world_size, *values.shape)
        dist.all_gather(list(gathered.unbind(0)), values)
        return gathered

    def sum(self, value: Tensor) -> Tensor:
        """Over all ranks, on every rank."""
        value = value.to(self.device)
        if self._grouped:
            dist.all_reduce(value)
        return value

    def everywhere(self, action: Callable[[], Result]) -> list[Result]:
        """Every rank acts; the results of all, or the error of the first rank that had one."""
        return everywhere(self.host_group, action)

    def each(self, action: Callable[[], Result]) -> Result:
        """Every rank acts and keeps its own result; if one fails, all raise its error."""
        kept: list[Result] = []
        self.everywhere(lambda: kept.append(action()))
        return kept[0]

    def gather_objects(self, value: Result) -> list[Result]:
        return self.everywhere(lambda: value)

    def on_rank0(self, action: Callable[[], Result]) -> Result:
        """Rank 0 acts; the others wait and get its result, or raise the error that it met."""
        return on_rank0(self.host_group, action)

    def close(self) -> None:
        if self._grouped and self._made_group and dist.is_initialized():
            dist.destroy_process_group()


def lost_a_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has ended."""
    messages = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"]
    messages += ["remote process exit"]  # NCCL's
    return isinstance(error, dist.DistNetworkError) or any(m in str(error) for m in messages)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU or of the machine."""
    messages = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in messages)


def gpu_is_there() -> str:
    """Evidence that this machine or job has a GPU, whether torch can use it or not; "" if none.

    A GPU that is hidden on purpose (CUDA_VISIBLE_DEVICES is empty or -1) does not count.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if devices := sorted(Path("/dev").glob("nvidia[0-9]*")):
        return str(devices[0])
    given = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    return "" if given == "0" else f"SLURM_GPUS_ON_NODE = {given}"


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and (evidence := gpu_is_there()):
            build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
            why = f"there is a GPU ({evidence}) that torch, built for {build}, cannot use"
            right = "python -m lipnext_scale.doctor says more; run.device=cpu trains without it"
            raise ConfigError("run.device", "auto", f"{why}; {right}")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device", name, "no GPU is visible here; use cpu or auto")
    if local_rank >= torch.cuda.device_count():
        few = (
            f"this node has {torch.cuda.device_count()} GPUs, too few for its process {local_rank}"
        )
        raise ConfigError("run.device", name, f"{few}; start as many processes as there are GPUs")
    return torch.device("cuda", local_rank)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """This process as one of many that do not exist: engines can place a model, on no memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
