"""A small run as users start it: by a launcher or without, watched and interfered with."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lipnext_scale.observe.metrics import read_records

ROOT = Path(__file__).parents[2]
# 120 steps of some 20 ms. ε is large enough that Adam does not make steps of rounding errors.
SETTINGS = """
data.train=builtin:digits/test-*.tar.gz data.test=builtin:digits/test-*.tar.gz data.batch_size=72
model.depth=2 model.width=16 model.image_size=8 model.patch_size=4 model.in_channels=1
optim.epochs=24 optim.warmup_epochs=1 optim.lookahead=3 optim.eps=1e-3 loss.logit_scale=8
run.summary=false run.eval_every=12 run.log_every=1 run.checkpoint_every=0
""".split()
STEPS = 120
PATIENCE = 120  # seconds, of a test


def torchrun() -> list[str]:
    """Two processes; --standalone finds a free port by itself."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", "2", "-m", "lipnext_scale.train"]


def accelerate_launch(*flags: str) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    return [*launcher, "-m", "lipnext_scale.train"]


def deepspeed_launch() -> list[str]:
    """Two processes, for a program or `--module` and its name."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    return [*launcher, "--master_port", str(free_port())]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: pip install 'lipnext_scale[{package}]'",
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(
    launcher: list[str], *overrides: str, settings: list[str] = SETTINGS
) -> subprocess.CompletedProcess[str]:
    """A run to its end."""
    with started(launcher, *overrides, settings=settings) as process:
        out, error = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


@contextmanager
def started(
    launcher: list[str], *overrides: str, settings: list[str] = SETTINGS
) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on; afterwards neither it nor its workers are left, nor what started them:
    they are a session of their own."""
    process = subprocess.Popen(
        [*launcher, *settings, *overrides],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _with_root()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """A launcher and its workers: each is a session of its own."""
    left = workers(process.pid) if process.poll() is None else {}
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in left.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.returncode is None:
        process.communicate()


def _with_root() -> str:
    """For a program, which has its own directory where a module has the working one."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def steps_logged(run: Path) -> list[int]:
    records = read_records(run / "metrics.jsonl")
    return [record["step"] for record in records if "train/loss" in record]


def workers(launcher: int) -> dict[int, int]:
    """rank → process id of the workers that a launcher has started, from /proc."""
    found = {}
    for task in Path(f"/proc/{launcher}/task").glob("*"):
        with suppress(OSError):  # it has just ended
            for process in (task / "children").read_text().split():
                with suppress(OSError):
                    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
                    environment = dict(text.split("=", 1) for text in variables if "=" in text)
                    if "RANK" in environment:
                        found[int(environment["RANK"])] = int(process)
    return found
