"""Fixtures that several directories of tests share."""

import os
import signal
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.training.trainer import Trainer

# Tests are of CPUs, also on a machine with GPUs: what differs between the two is not tested here.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).parent.parent
LONGEST = ["launch", "faults", "distributed", "doctor"]  # directories of tests


def pytest_configure(config: pytest.Config) -> None:
    """Two workers on two cores: more threads each would only get in each other's way.

    A script's background ignores SIGINT, nohup ignores SIGHUP, and children inherit that: those
    under test are to have the handlers that a terminal gives them.
    """
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start many processes come first: at the end no core waits for a long one."""

    def turn(item: pytest.Item) -> int:
        directory = item.path.parent.name
        return LONGEST.index(directory) if directory in LONGEST else len(LONGEST)

    items.sort(key=turn)  # keeps the order within a directory


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the README's demo, trained to the end: once for all pytest workers.

    Tests that use it are marked slow.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all workers
    directory = base / "demo" / "digits"
    directory.parent.mkdir(exist_ok=True)
    with FileLock(base / "demo.lock"):
        recipe = load_recipe(str(ROOT / "configs" / "digits.yaml"), [f"run.dir={directory}"])
        Trainer(recipe).run()  # where it is trained already this does nothing
    return directory
