"""Which of how many processes this one is, as torchrun, a launcher like it or srun says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
