"""Fixtures that several directories of tests share."""

from pathlib import Path

import pytest
import torch

from lipnext_scale.recipe import load_recipe
from lipnext_scale.trainer import Trainer

ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Two workers on two cores: more threads each would only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the README's demo, trained to the end.

    Tests that use it are marked slow and xdist_group("demo"), so that one worker trains it once.
    """
    directory = tmp_path_factory.mktemp("demo") / "digits"
    recipe = load_recipe(str(ROOT / "configs" / "digits.yaml"), [f"run.dir={directory}"])
    Trainer(recipe).run()
    return directory
