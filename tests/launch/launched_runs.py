"""A small run for launchers: 60 steps on digits, over as many processes as they start."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distributed import launch_commands
from distributed.launch_commands import end, free_port

ROOT = Path(__file__).parents[2]
STEPS = 60
SETTINGS = [*launch_commands.SETTINGS, "optim.epochs=12", "run.device=cpu", "run.eval_every=0"]
# The digits demo in place of the paper's sizes, on CPUs instead of eight GPUs a node.
VARIABLES = {
    "LIPNEXT_CONFIG": "configs/digits.yaml",
    "LIPNEXT_PROCS_PER_NODE": "2",
    "LIPNEXT_PYTHON": sys.executable,
    "LIPNEXT_MAX_RESTARTS": "0",
    "OMP_NUM_THREADS": "1",
}


def environment(**variables: str) -> dict[str, str]:
    """Of a launcher, without what this process may have been launched with."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "LIPNEXT_"))}
    return {**others, **VARIABLES, **variables}


@contextmanager
def two_machines(
    run: Path, *overrides: str, **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """launch/torchrun.sh on each, with a process a machine; here both are this one, with two of its
    addresses. Afterwards nothing is left of them."""
    command = [str(ROOT / "launch" / "torchrun.sh"), "configs/digits.yaml", *SETTINGS]
    command += [f"run.dir={run}", *overrides]
    variables = {
        "LIPNEXT_NODES": "2",
        "LIPNEXT_PROCS_PER_NODE": "1",
        "LIPNEXT_HEAD_ADDRESS": "127.0.0.1",
        "LIPNEXT_HEAD_PORT": str(free_port()),
        "LIPNEXT_ADDRESS": "127.0.0.2",
        **variables,
    }
    machines = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(LIPNEXT_NODE=str(node), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node in range(2)
    ]
    try:
        yield machines
    finally:
        for machine in machines:
            end(machine)
