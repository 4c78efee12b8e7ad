"""Whether processes reach each other: really tried, between two of this machine."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from lipnext_scale.doctor.report import Finding, ok, wrong

# --------------------------------------------------------------------------------------------------
# Which of how many processes this one is, as torchrun, a launcher like it or srun says.

# srun names no port. Jobs of one node must not share it, and all processes of a job must.
FIRST_PORT, PORTS = 20000, 20000


@dataclass(frozen=True)
class Launch:
    """nodes: their names, where the launcher tells them. hosted: the launcher keeps the store at
    which the processes meet; else the first of them does."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False
    nodes: tuple[str, ...] = ()

    @property
    def speaks(self) -> bool:
        """Of the processes of a node one looks at the node."""
        return self.local_rank == 0

    def node_of(self, rank: int) -> int:
        return rank // self.local_world_size

    def name_of(self, rank: int) -> str:
        """What is known of a process that has not been heard of."""
        node = self.node_of(rank)
        host = self.nodes[node] if node < len(self.nodes) else f"node {node}"
        return f"rank {rank} on {host}"


def launch_of(environment: Mapping[str, str]) -> Launch:
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return _of_torchrun(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # not in a batch script itself
        return _of_srun(environment)
    return Launch()


def _of_torchrun(environment: Mapping[str, str]) -> Launch:
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    here = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=int(environment.get("LOCAL_RANK", rank % int(here))),
        local_world_size=int(here),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=int(environment.get("MASTER_PORT", FIRST_PORT)),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        nodes=tuple(expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))),
    )


def _of_srun(environment: Mapping[str, str]) -> Launch:
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    world_size = int(environment["SLURM_STEP_NUM_TASKS"])
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return Launch(
        rank=int(environment["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(environment["SLURM_LOCALID"]),
        local_world_size=-(-world_size // len(nodes)),
        address=environment.get("MASTER_ADDR", nodes[0]),
        port=int(environment.get("MASTER_PORT", FIRST_PORT + job % PORTS)),
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
# The processes of a launch, heard and tried out.

# What a process takes to start and to import torch on a busy machine.
START = 60


def local_gloo(seconds: int) -> Finding:
    """Two processes of this machine meet at a free port and sum a vector over gloo."""
    import torch.distributed as dist

    patience = timedelta(seconds=seconds + START)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    pair = [start("127.0.0.1", store.port, rank, 2, "gloo", rank, seconds) for rank in range(2)]
    outcomes = [outcome(one, seconds + START) for one in pair]
    for came_through, told in outcomes:
        if not came_through:
            return wrong("gloo", f"two processes of this machine: {told}", gloo_mend())
    slowest = max(float(told) for _, told in outcomes)
    return ok("gloo", f"two processes of this machine sum 1 MB in {slowest:.1f} ms")


def gloo_mend() -> str:
    """gloo listens where the host's name leads to, or on the interface that is set."""
    there = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None and not set(chosen.split(",")) <= set(there):
        return (
            f"GLOO_SOCKET_IFNAME = {chosen!r} is none of {', '.join(there)}: set one, or unset it"
        )
    host = socket.gethostname()
    try:
        socket.gethostbyname(host)
    except OSError:
        return f"the name {host} leads nowhere: echo '127.0.1.1 {host}' >> /etc/hosts"
    return f"export GLOO_SOCKET_IFNAME=ONE, of {', '.join(there)}"


# --------------------------------------------------------------------------------------------------
# One of the processes that try a collective: a program of its own, which may hang or crash.
#
# python -m lipnext_scale.doctor.network ADDRESS PORT RANK WORLD_SIZE BACKEND LOCAL_RANK SECONDS
#
# Meets the others at a store that is there already, sums a vector over all, and prints how many
# milliseconds the second sum took; the first one also opens the connections.

NUMBERS = 1 << 18  # of float32: a MB


def main(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    address, backend = argv[0], argv[4]
    port, rank, world_size, local_rank, seconds = (int(argv[i]) for i in (1, 2, 3, 5, 6))
    patience = timedelta(seconds=seconds)
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(address, port, is_master=False, timeout=patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"doctor/{backend}", store),
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    for _ in range(2):
        values = torch.full((NUMBERS,), float(rank + 1), device=device)
        began = time.perf_counter()
        dist.all_reduce(values)
        total = values.sum().item()
        took = time.perf_counter() - began
        assert total == NUMBERS * world_size * (world_size + 1) / 2, f"the sum is {total}"
    print(f"{1000 * took:.1f}", flush=True)
    dist.destroy_process_group()


def start(
    address: str, port: int, rank: int, world_size: int, backend: str, local_rank: int, seconds: int
) -> subprocess.Popen[str]:
    values = (address, port, rank, world_size, backend, local_rank, seconds)
    return subprocess.Popen(
        [sys.executable, "-m", "lipnext_scale.doctor.network", *map(str, values)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(peer: subprocess.Popen[str], seconds: float) -> tuple[bool, str]:
    """(whether it came through, its milliseconds or why it did not); it has ended then."""
    try:
        out, err = peer.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        peer.kill()
        peer.communicate()
        return False, f"no answer within {seconds:.0f} s"
    if peer.returncode == 0:
        return True, out.split()[-1]
    said = [line for line in err.splitlines() if "Error" in line] or err.splitlines()
    return False, said[-1].strip() if said else f"it ended with {peer.returncode}"


if __name__ == "__main__":
    main(sys.argv[1:])


# --------------------------------------------------------------------------------------------------
# All processes of a launch: who answers, which host reaches which, one collective over all.
#
# Every process tells the store at which all meet what it found; the first one reads it there.
# Nobody waits without an end, and what is missing then has a name.

if TYPE_CHECKING:
    from torch.distributed import Store

LOOKING = 300  # seconds that a node may take to look at itself


class Together:
    """seconds: how long one waits for the others."""

    def __init__(self, launch: Launch, seconds: int) -> None:
        import torch.distributed as dist

        self.launch, self.seconds = launch, seconds
        self._store: Store = dist.TCPStore(
            launch.address,
            launch.port,
            is_master=launch.rank == 0 and not launch.hosted,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
        self.hosts: dict[int, str] = {}

    def tell(self, key: str, value: object) -> None:
        self._store.set(f"doctor/{key}", json.dumps(value))

    def hear(self, key: str, deadline: float) -> object | None:
        """What was told under a key, None if nobody has until then."""
        wait = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        try:
            self._store.wait([f"doctor/{key}"], wait)
        except RuntimeError:  # torch's own for a time that is over, or a store that is gone
            return None
        return json.loads(self._store.get(f"doctor/{key}"))

    # Who is there

    def answers(self) -> list[Finding]:
        """Every process says where it is; then all know whether all did."""
        launch, deadline = self.launch, time.monotonic() + self.seconds
        self.tell(f"host/{launch.rank}", socket.gethostname())
        missing = []
        for rank in range(launch.world_size):
            host = self.hear(f"host/{rank}", deadline)
            if host is None:
                missing.append(rank)
            else:
                self.hosts[rank] = str(host)
        if missing:
            names = ", ".join(launch.name_of(rank) for rank in missing)
            mend = (
                f"look at that host; it must reach {launch.address}:{launch.port} "
                f"(nc -vz {launch.address} {launch.port}); --timeout waits longer"
            )
            told = f"no answer within {self.seconds} s from {names}"
            return [wrong("processes", told, mend)]
        nodes = len(set(self.hosts.values()))
        return [ok("processes", f"{launch.world_size} answer, on {nodes} host(s)")]

    # Which host reaches which

    def reaches(self) -> list[Finding]:
        """The first process of every node opens a connection to that of every other."""
        launch, deadline = self.launch, time.monotonic() + self.seconds
        nodes = range(-(-launch.world_size // launch.local_world_size))
        if len(nodes) == 1:
            return []
        if launch.speaks:
            with _Listener() as listener:
                own = launch.node_of(launch.rank)
                self.tell(f"listens/{own}", [own_address(launch), listener.port])
                failed = [node for node in nodes if not self._reach(node, deadline)]
                self.tell(f"reaches/{own}", failed)
                for node in nodes:  # nobody stops to listen before all have tried
                    self.hear(f"reaches/{node}", deadline + self.seconds)
        return self._unreached(list(nodes), deadline) if launch.rank == 0 else []

    def _reach(self, node: int, deadline: float) -> bool:
        place = self.hear(f"listens/{node}", deadline)
        if not isinstance(place, list):
            return False
        try:
            socket.create_connection((place[0], place[1]), timeout=5).close()
        except OSError:
            return False
        return True

    def _unreached(self, nodes: list[int], deadline: float) -> list[Finding]:
        findings = []
        for node in nodes:
            failed = self.hear(f"reaches/{node}", deadline + self.seconds)
            for other in failed if isinstance(failed, list) else []:
                here, there = (self._host_of_node(n) for n in (node, other))
                mend = (
                    f"open all TCP ports from {here} to {there}, or name the right interface: "
                    "export GLOO_SOCKET_IFNAME=… NCCL_SOCKET_IFNAME=…"
                )
                findings.append(wrong("hosts", f"{here} does not reach {there}", mend))
        return findings or [ok("hosts", f"all {len(nodes)} reach each other")]

    def _host_of_node(self, node: int) -> str:
        return self.hosts[node * self.launch.local_world_size]

    # A collective

    def sums(self, backend: str) -> list[Finding]:
        """One vector summed over all processes; the first one tells who did not come through."""
        launch = self.launch
        one = start(
            launch.address,
            launch.port,
            launch.rank,
            launch.world_size,
            backend,
            launch.local_rank,
            self.seconds,
        )
        self.tell(f"{backend}/{launch.rank}", outcome(one, self.seconds + START))
        if launch.rank > 0:
            return []
        deadline = time.monotonic() + self.seconds + START
        slowest = 0.0
        failed: list[str] = []
        for rank in range(launch.world_size):
            told = self.hear(f"{backend}/{rank}", deadline)
            came_through, text = told if isinstance(told, list) else (False, "no word")
            if came_through:
                slowest = max(slowest, float(text))
            else:
                failed.append(f"rank {rank} on {self.hosts[rank]}: {text}")
        if failed:
            return [wrong(f"{backend} of all", "; ".join(failed), _mend(backend))]
        text = f"{launch.world_size} processes sum 1 MB in {slowest:.1f} ms"
        return [ok(f"{backend} of all", text)]

    # What the nodes found

    def share(self, findings: list[Finding]) -> list[Finding]:
        """On the first process, what is not as it should be on the other nodes."""
        launch, deadline = self.launch, time.monotonic() + LOOKING
        if launch.rank > 0:
            self.tell(f"found/{launch.rank}", [asdict(finding) for finding in findings])
            return []
        others: list[Finding] = []
        for rank in range(launch.local_world_size, launch.world_size, launch.local_world_size):
            told = self.hear(f"found/{rank}", deadline)
            if not isinstance(told, list):
                text = f"{self.hosts[rank]} has not said what it found within {LOOKING} s"
                others.append(wrong("hosts", text, f"run the doctor on {self.hosts[rank]} alone"))
                continue
            found = [replace(Finding(**values), host=self.hosts[rank]) for values in told]
            others += [finding for finding in found if finding.state != "ok"]
        return others


class _Listener:
    """A port that takes connections and does nothing with them."""

    def __enter__(self) -> "_Listener":
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        try:
            while True:
                self._socket.accept()[0].close()
        except OSError:  # it is closed
            pass

    def __exit__(self, *_error: object) -> None:
        self._socket.close()


def own_address(launch: Launch) -> str:
    """Ours as the others see it: where the way to the meeting place leaves this host from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.address, launch.port))  # sends nothing
        return str(probe.getsockname()[0])


def _mend(backend: str) -> str:
    if backend == "nccl":
        return (
            "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=…; NCCL_IB_DISABLE=1 leaves InfiniBand out"
        )
    return gloo_mend()
