"""A run's real step at full size, on GPUs and ranks that are not there.

    python tests/walk imagenet_2b --nodes 2                       the step of rank 0, as JSON
    python tests/walk imagenet_1b --table manifold model.depth=4  and the operators of a phase
    python tests/walk --list < walks.json                         many walks in one process

Tensors are fake: shapes, types and devices without numbers. The process group is fake: one rank of
any number. All else is the package's own code, from the configuration to the optimizers.

DDP and DeepSpeed look at memory; memoryless.py answers them. ZeRO with the optimizer on the CPU is
not walked: its step is the host's.
"""

import argparse
import json
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absent_cuda
import memoryless
import numpy as np
import torch
from ledger import LOOKAHEAD_STEP, Ledger
from roofline import IMAGENET, figures, table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import _disable_current_modes

from lipnext_scale.checkpoint import CheckpointWriter
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.data import Batch, TestBatch
from lipnext_scale.distributed import Engine, build_engine
from lipnext_scale.distributed.engine import checksums
from lipnext_scale.distributed.processes import fake_group
from lipnext_scale.observe import Observer
from lipnext_scale.training.non_finite import NonFinitePolicy
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"
TEST_BATCH = 256


@dataclass(frozen=True)
class Walk:
    """What to walk: a shipped configuration with other settings, on so many ranks."""

    config: str = "imagenet_1b"
    settings: list[str] = field(default_factory=list)
    nodes: int = 1
    per_node: int = 8
    # step, lookahead (every sixth), logged, retraction (an epoch's last), evaluation, checkpoint
    what: str = "step"

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


class DatalessTrainer(Trainer):
    """A trainer with all that `train_step` and an evaluation use: no data, no run directory."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        self.recipe, self.request, self.stop_signal = recipe, StopRequest(), None
        self._unread: list[Any] = []
        self.engine, self.processes = engine, engine.processes
        loader: Any = SimpleNamespace(steps_per_epoch=IMAGENET // recipe.data.batch_size)
        data: Any = SimpleNamespace(
            test_set=lambda rank, ranks: [test_batch(recipe)], test=range(TEST_BATCH)
        )
        directory: Any = None
        self.loader = loader
        self.total_steps = self.last_step = recipe.optim.epochs * loader.steps_per_epoch
        self.step = self.total_steps // 2
        self.model = self._build_model()
        self.optimizers = self.engine.optimizers(recipe.optim)
        self.non_finite = NonFinitePolicy(recipe.run)
        self.observer = Observer(
            recipe,
            directory,
            self.engine,
            self.optimizers,
            data,
            loader,
            self.last_step,
            self.total_steps,
        )

    def batch(self, last_of_epoch: bool = False) -> Batch:
        count = self.recipe.data.batch_size // self.processes.world_size
        images, labels = _images(self.recipe, count)
        return Batch(images, labels, np.empty(0), epoch=0, last_of_epoch=last_of_epoch)

    def name_phases(self, ledger: Ledger) -> None:
        """What is in none of them is the phase `step`: the input and the loss."""
        for phase, owner, method in [
            ("forward", self.engine, "forward"),
            ("backward", self.engine, "backward"),
            ("norm", self.engine, "gradient_norm"),
            ("agree", self, "_over_all_ranks"),
            ("finite", self, "_is_finite"),
            ("manifold", self.optimizers.manifold, "step"),
            ("nadam", self.optimizers.euclidean, "step"),
            ("retract", self.optimizers, "retract"),
            ("observe", self.observer, "gradients_made"),
            ("observe", self.observer, "weights_moved"),
        ]:
            ledger.name_phase(phase, owner, method)


def _images(recipe: Recipe, count: int) -> tuple[Tensor, Tensor]:
    side, channels = recipe.model.image_size, recipe.model.in_channels
    images = torch.empty(count, side, side, channels, dtype=torch.uint8).permute(0, 3, 1, 2)
    return images, torch.empty(count, dtype=torch.int64)


def test_batch(recipe: Recipe) -> TestBatch:
    images, labels = _images(recipe, TEST_BATCH)
    return TestBatch(images, labels, labels, torch.empty(TEST_BATCH, dtype=torch.bool))


def take(what: str, trainer: DatalessTrainer, ledger: Ledger) -> None:
    if what == "lookahead":
        ledger.step = LOOKAHEAD_STEP
    if what == "logged":
        trainer.observer._by_block = True
    if what == "evaluation":
        trainer.observer.evaluation.of_test_set()
    elif what == "checkpoint":
        shards = trainer.engine.state_shards(trainer.optimizers)
        checksums(shards)
        writer = CheckpointWriter(Path("nowhere"), keep_last=1)
        writer._stage(shards, set(shards))
    else:
        trainer.train_step(trainer.batch(last_of_epoch=what == "retraction"))


def with_real_numbers(owner: Any, method: str) -> None:
    """Let a method make real tensors: those of a mesh have numbers, those on `meta` no memory."""
    function = getattr(owner, method)

    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    outside.real = True  # type: ignore[attr-defined]
    setattr(owner, method, outside)


class FakeTensors(FakeTensorMode):
    """torch.tensor(…, device="cuda") makes a tensor on the host and copies it."""

    avoid_device_init = True  # it looks for a device to initialise otherwise


def install(ledger: Ledger) -> None:
    """Let this process's torch tell the ledger of waits, and take fake tensors for real ones."""
    absent_cuda.install(lambda name: ledger.note("wait", name))

    def tolist(tensor: Tensor) -> Any:
        """One transfer; torch's own for fake tensors reads each number by itself."""
        value: Any = ledger.read_values(tensor, "tolist")
        for length in reversed(tensor.shape):
            value = [value] * length
        return value

    FakeTensor.tolist = tolist  # type: ignore[method-assign,assignment]
    if not getattr(DeviceMesh.__getitem__, "real", False):
        with_real_numbers(DeviceMesh, "__getitem__")
    if FakeTensor not in _foreach_supported_types:
        _foreach_supported_types.append(FakeTensor)  # else NAdam goes tensor by tensor


def moved_entries(trainer: DatalessTrainer) -> int:
    """Numbers in the matrices that this rank moves: those it has a first moment of."""
    manifold: Any = trainer.optimizers.manifold
    manifold = getattr(manifold, "_inner", manifold)  # where ranks share the step
    return sum(state["exp_avg"].numel() for state in manifold.state.values())


def run(walk: Walk) -> tuple[Ledger, dict[str, Any]]:
    recipe = load_recipe(str(CONFIGS / f"{walk.config}.yaml"), walk.settings)
    recipe.require_batch_for(walk.ranks)
    ledger = Ledger()
    install(ledger)
    with fake_group(0, walk.ranks):
        engine = build_engine(recipe.parallel, "cuda", walk.per_node)
        with_real_numbers(engine, "build_on_meta")
        memoryless.prepare(engine)
        with FakeTensors(allow_non_fake_inputs=True), ledger:
            trainer = DatalessTrainer(recipe, engine)
            trainer.optimizers.initialise_state()
            trainer.train_step(trainer.batch())
            trainer.name_phases(ledger)
            ledger.rows.clear()
            with ledger.during("step"):
                take(walk.what, trainer, ledger)
        entries, described = moved_entries(trainer), engine.describe()
    model = recipe.model
    found = figures(ledger.rows, model.width, model.depth, recipe.data.batch_size, entries)
    return ledger, {"engine": described, **found}


def outcome(walk: Walk) -> dict[str, Any]:
    """Its figures; or why it could not be walked."""
    try:
        return run(walk)[1]
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/walk", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", nargs="?", default="imagenet_1b")
    parser.add_argument("settings", nargs="*", help="such as model.depth=4")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--what", default="step")
    parser.add_argument("--table", default="", help="a phase whose operators to print")
    parser.add_argument("--list", action="store_true", help="walks as JSON on stdin")
    given = parser.parse_intermixed_args()
    if given.list:
        with redirect_stdout(sys.stderr):  # DeepSpeed prints
            found = [outcome(Walk(**walk)) for walk in json.load(sys.stdin)]
        print(json.dumps(found))
        return
    walk = Walk(given.config, given.settings, given.nodes, given.per_node, given.what)
    with redirect_stdout(sys.stderr):
        ledger, result = run(walk)
    if given.table:
        print(table(ledger.rows, given.table))
    print(json.dumps(result, indent=1))
