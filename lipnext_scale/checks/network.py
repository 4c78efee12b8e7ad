"""Whether processes reach each other: a collective is tried, on this machine or over a launch."""

import json
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from lipnext_scale.checks import Finding, ok, wrong

START = 60  # seconds that a process takes to start and import torch on a busy machine
EXAMINING = 300  # seconds that a node may take to examine itself
NUMBERS = 1 << 18  # of float32: a MB

# --------------------------------------------------------------------------------------------------
# Which of how many processes this one is, as torchrun, a launcher like it or srun says.


@dataclass(frozen=True)
class Launch:
    """nodes: their names, if the launcher gives them. hosted: the launcher keeps the store at which
    the processes meet; else rank 0 does."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    nodes: tuple[str, ...] = ()

    def name_of(self, rank: int) -> str:
        """What is known of a process that does not answer."""
        node = rank // self.local_world_size
        host = self.nodes[node] if node < len(self.nodes) else f"node {node}"
        return f"rank {rank} on {host}"


def launch_of(environment: Mapping[str, str]) -> Launch:
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    if "WORLD_SIZE" in environment and "RANK" in environment:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        here = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # not in a batch script itself
        rank, world_size = (int(environment[f"SLURM_{x}"]) for x in ("PROCID", "STEP_NUM_TASKS"))
        local_rank, here = int(environment["SLURM_LOCALID"]), -(-world_size // len(nodes))
    else:
        return Launch()
    # srun names no port. Jobs of one node must not share it, and all processes of a job must.
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=here,
        address=environment.get("MASTER_ADDR", nodes[0] if nodes else "127.0.0.1"),
        port=int(environment.get("MASTER_PORT", port)),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        nodes=tuple(nodes),
    )


def expand_nodes(listed: str) -> list[str]:
    """Slurm's way to write names: gpu[01-03,7],login → gpu01, gpu02, gpu03, gpu7, login."""
    names = []
    for part in re.findall(r"[^,\[]+(?:\[[^]]*\][^,\[]*)?", listed):
        found = re.fullmatch(r"([^\[]*)\[([^]]*)\](.*)", part)
        if found is None:
            names.append(part)
            continue
        for numbers in found[2].split(","):
            first, _, last = numbers.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names.append(f"{found[1]}{number:0{len(first)}}{found[3]}")
    return names


# --------------------------------------------------------------------------------------------------
# One collective.

Outcome = tuple[bool, str]  # whether it succeeded, its milliseconds or its error


def attempt(launch: Launch, backend: str, seconds: int) -> Callable[[], Outcome]:
    """Start one rank's part in a process, for it may hang or crash; the result waits for it."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe(duplex=False)
    process = context.Process(target=_sum_over_all, args=(launch, backend, seconds, end))
    process.start()
    end.close()

    def outcome() -> Outcome:
        try:
            answered = pipe.poll(seconds + START)
            return pipe.recv() if answered else (False, f"no answer within {seconds + START} s")
        except EOFError:
            return False, "its process crashed"
        finally:
            process.join(timeout=5)
            process.kill()

    return outcome


def _sum_over_all(launch: Launch, backend: str, seconds: int, pipe: Connection) -> None:
    """Send the milliseconds of the second sum; the first one also opens the connections."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    try:
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", launch.local_rank)
            torch.cuda.set_device(device)
        meeting = dist.TCPStore(launch.address, launch.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"doctor/{backend}", meeting),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        for _ in range(2):
            values = torch.ones(NUMBERS, device=device)
            began = time.perf_counter()
            dist.all_reduce(values)
            total = values.sum().item()
            took = time.perf_counter() - began
        assert total == NUMBERS * launch.world_size, f"the sum is {total}"
        pipe.send((True, f"{1000 * took:.1f}"))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send((False, " ".join(f"{type(error).__name__}: {error}".split())[:200]))


def summary(check: str, outcomes: dict[str, Outcome], backend: str) -> Finding:
    """outcomes: of each process, by its name."""
    failed = [f"{name}: {text}" for name, (succeeded, text) in outcomes.items() if not succeeded]
    if failed:
        return wrong(check, "; ".join(failed), fix_for(backend))
    slowest = max(float(text) for _, text in outcomes.values())
    return ok(check, f"{len(outcomes)} processes sum 1 MB in {slowest:.1f} ms")


def fix_for(backend: str) -> str:
    name, interfaces = f"{backend.upper()}_SOCKET_IFNAME", [n for _, n in socket.if_nameindex()]
    now = f" (now {os.environ[name]!r})" if name in os.environ else ""
    fix = f"export {name}=ONE, of {', '.join(interfaces)}{now}"
    if backend == "nccl":
        return f"{fix}; NCCL_DEBUG=INFO says more, NCCL_IB_DISABLE=1 leaves InfiniBand out"
    return f"{fix}; or let {socket.gethostname()} resolve to an address of this host (/etc/hosts)"


def local_gloo(seconds: int) -> Finding:
    """Two processes of this machine meet at a free port and sum a vector over gloo."""
    import torch.distributed as dist

    timeout = timedelta(seconds=seconds + START)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    ranks = [Launch(rank, 2, rank, 2, port=store.port) for rank in range(2)]
    outcomes = [attempt(rank, "gloo", seconds) for rank in ranks]
    found = {f"rank {rank} on this machine": outcome() for rank, outcome in enumerate(outcomes)}
    return summary("gloo", found, "gloo")


# --------------------------------------------------------------------------------------------------
# All processes of a launch. Each puts what it found into the store at which all meet; rank 0 reads
# it there. Every wait ends, and a process that is missing then has a name.


class Together:
    """seconds: how long a process waits for the others."""

    def __init__(self, launch: Launch, seconds: int) -> None:
        import torch.distributed as dist

        self.launch, self.seconds = launch, seconds
        self._store = dist.TCPStore(
            launch.address,
            launch.port,
            is_master=launch.rank == 0 and not launch.hosted,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
        self.hosts: dict[int, str] = {}

    def put(self, key: str, value: object) -> None:
        self._store.set(f"doctor/{key}", json.dumps(value))

    def get(self, key: str, deadline: float) -> Any:
        """The value of a key, None if there is none until the deadline."""
        wait = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        try:
            self._store.wait([f"doctor/{key}"], wait)
        except RuntimeError:  # torch's own for a timeout, or a store that is gone
            return None
        return json.loads(self._store.get(f"doctor/{key}"))

    def answers(self) -> Finding:
        """Every process puts its host; then all know whether all did."""
        launch, deadline = self.launch, time.monotonic() + self.seconds
        self.put(f"host/{launch.rank}", socket.gethostname())
        found = {rank: self.get(f"host/{rank}", deadline) for rank in range(launch.world_size)}
        self.hosts = {rank: host for rank, host in found.items() if host is not None}
        missing = ", ".join(launch.name_of(rank) for rank in found.keys() - self.hosts.keys())
        if missing:
            place = f"{launch.address} {launch.port}"
            fix = (
                f"look at that host; it must reach {place} (nc -vz {place}); --timeout waits longer"
            )
            return wrong("processes", f"no answer within {self.seconds} s from {missing}", fix)
        nodes = len(set(self.hosts.values()))
        return ok("processes", f"{launch.world_size} answer, on {nodes} host(s)")

    def sums(self, backend: str) -> list[Finding]:
        """One vector summed over all processes; rank 0 reports which of them failed."""
        launch = self.launch
        self.put(f"{backend}/{launch.rank}", attempt(launch, backend, self.seconds)())
        if launch.rank > 0:
            return []
        deadline = time.monotonic() + self.seconds + START
        outcomes = {
            f"rank {rank} on {host}": self.get(f"{backend}/{rank}", deadline)
            or (False, "no answer")
            for rank, host in self.hosts.items()
        }
        return [summary(f"{backend} of all", outcomes, backend)]

    def share(self, findings: list[Finding]) -> list[Finding]:
        """On rank 0, what is not ok on the other nodes."""
        launch, deadline = self.launch, time.monotonic() + EXAMINING
        if launch.rank > 0:
            self.put(f"found/{launch.rank}", [asdict(finding) for finding in findings])
            return []
        others: list[Finding] = []
        for rank in range(launch.local_world_size, launch.world_size, launch.local_world_size):
            text = f"no findings within {EXAMINING} s"
            silent = wrong("hosts", text, "run the doctor there alone")
            found = self.get(f"found/{rank}", deadline) or [asdict(silent)]
            findings = [Finding(**{**values, "host": self.hosts[rank]}) for values in found]
            others += [finding for finding in findings if finding.state != "ok"]
        return others
