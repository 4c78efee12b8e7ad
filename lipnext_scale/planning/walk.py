"""A run's real step at full size, on devices and ranks that are not there.

Tensors are fake: shapes, types and devices without numbers. The process group is fake: one rank of
any number. All else is the package's own code, from the configuration to the optimizers. `walk_all`
does it in a process of its own, because the absent GPU must be there before torch.

DDP and DeepSpeed look at memory; memoryless.py answers them. ZeRO with the optimizer on the CPU is
not walked: its step is the host's.
"""

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, astuple, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
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
from lipnext_scale.manifold import Workspace
from lipnext_scale.manifold.tensor_core import usual_entry
from lipnext_scale.models import kernels as block_kernels
from lipnext_scale.observe import Observer
from lipnext_scale.planning import absent_cuda, guard, memoryless
from lipnext_scale.planning.ledger import LOOKAHEAD_STEP, ORDINARY_STEP, Ledger, Row
from lipnext_scale.planning.times import read_device
from lipnext_scale.training.non_finite import NonFinitePolicy
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError

IMAGENET = 1_281_167  # images
TEST_BATCH = 256
STEPS = ("step", "lookahead", "retraction")  # of a run


@dataclass(frozen=True)
class Walk:
    """What to walk: a configuration with other settings, on so many ranks, as one of them."""

    config: str
    settings: list[str] = field(default_factory=list)
    nodes: int = 1
    per_node: int = 8
    device: str = "cuda"
    rank: int = 0
    gpu: str = "h100"  # of devices.yaml: what torch says the device is
    # step, lookahead (every sixth), logged, retraction (an epoch's last), evaluation, checkpoint
    what: tuple[str, ...] = ("step",)

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Walked:
    """Of each thing walked its rows and the most memory, by kind, with its phase and place."""

    engine: str
    rows: dict[str, list[Row]]
    memory: dict[str, tuple[dict[str, int], str, str]]
    kept: dict[str, int]  # memory between steps, by kind
    entries: int  # numbers in the matrices that this rank moves
    checkpoint: int  # bytes of this rank's shards

    @property
    def peak(self) -> int:
        """Bytes, in any of the steps."""
        return max(sum(kinds.values()) for kinds, _, _ in self.memory.values())


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
    ledger.step = LOOKAHEAD_STEP if what == "lookahead" else ORDINARY_STEP
    ledger.exponent = usual_exponent(trainer, what == "lookahead")
    trainer.observer._by_block = what == "logged"
    if what == "evaluation":
        trainer.observer.evaluation.of_test_set()
    elif what == "checkpoint":
        shards = trainer.engine.state_shards(trainer.optimizers)
        checksums(shards)
        writer = CheckpointWriter(Path("nowhere"), keep_last=1)
        writer._stage(shards, set(shards))
    else:
        trainer.train_step(trainer.batch(last_of_epoch=what == "retraction"))


def usual_exponent(trainer: DatalessTrainer, lookahead: bool) -> float:
    """‖A²‖_F^½ of a step's exponent, which picks fp32 products: near ‖A‖_F/√2, as if one plane made
    up most of A (`tensor_core.squarings_for`)."""
    optim, width = trainer.recipe.optim, trainer.recipe.model.width
    norm = usual_entry(optim.betas[0], ORDINARY_STEP) * optim.lr * width
    return norm / math.sqrt(2) * (optim.lookahead / 2 if lookahead else 1)


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


def install(ledger: Ledger, gpu: str) -> None:
    """Let this process's torch tell the ledger of waits, and take fake tensors for real ones."""
    if ledger.device == "cuda":
        absent_cuda.install(ledger, read_device(gpu))
        vars(block_kernels)["_has_triton"] = lambda: True  # as where the GPUs are

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


def optimizer_state(trainer: DatalessTrainer) -> list[Any]:
    """All that the optimizers keep, buffers and operands of the next step too."""
    manifold: Any = trainer.optimizers.manifold
    parts = [manifold, getattr(manifold, "_inner", manifold)]  # where ranks share the step
    kept = [value for part in parts for key, value in vars(part).items() if key != "param_groups"]
    kept += [list(vars(value).values()) for value in kept if isinstance(value, Workspace)]
    return [kept, list(trainer.optimizers.euclidean.state.values())]


def run(walk: Walk) -> Walked:
    recipe = load_recipe(walk.config or None, walk.settings)
    recipe.require_batch_for(walk.ranks)
    if recipe.parallel.offload_optimizer:
        raise ConfigError("parallel.offload_optimizer", True, "cannot be planned: the host steps")
    ledger = Ledger(walk.device, walk.per_node)
    install(ledger, walk.gpu)
    many = walk.ranks > 1 or recipe.parallel.engine != "single"
    with fake_group(walk.rank, walk.ranks) if many else nullcontext():
        engine = build_engine(recipe.parallel, walk.device, walk.per_node)
        with_real_numbers(engine, "build_on_meta")
        memoryless.prepare(engine)
        sizes = ledger.memory.watching_sizes(lambda: ledger.phase)
        with FakeTensors(allow_non_fake_inputs=True), ledger, sizes:
            trainer = DatalessTrainer(recipe, engine)
            trainer.optimizers.initialise_state()
            trainer.name_phases(ledger)
            take("step", trainer, ledger)  # makes what later steps keep
            name_memory(trainer, ledger)
            ledger.rows, rows, memory = [], {}, {}
            for what in walk.what:
                start = len(ledger.memory.changes)
                with ledger.during("step"):
                    take(what, trainer, ledger)
                rows[what], ledger.rows = ledger.rows, []
                name_memory(trainer, ledger)
                memory[what] = ledger.memory.peak(start)
            kept = ledger.memory.peak(len(ledger.memory.changes))[0]
            shards = engine.state_shards(trainer.optimizers).values()
            checkpoint = sum(s.tensor.numel() * s.tensor.element_size() for s in shards)
        return Walked(engine.describe(), rows, memory, kept, moved_entries(trainer), checkpoint)


def name_memory(trainer: DatalessTrainer, ledger: Ledger) -> None:
    parameters = list(trainer.model.parameters())
    ledger.memory.name("optimizer", optimizer_state(trainer))
    ledger.memory.name("parameters", parameters)
    ledger.memory.name("gradients", [p.grad for p in parameters])


def moved_entries(trainer: DatalessTrainer) -> int:
    """Numbers in the matrices that this rank moves: those it has a first moment of."""
    manifold: Any = trainer.optimizers.manifold
    manifold = getattr(manifold, "_inner", manifold)  # where ranks share the step
    return sum(state["exp_avg"].numel() for state in manifold.state.values())


# --------------------------------------------------------------------------------------------------
# In a process of its own.


def walk_all(walks: Iterable[Walk]) -> "list[Walked | UserError]":
    """In new processes; a UserError for what cannot be walked."""
    walks = list(walks)
    if all(walk.device == "cpu" for walk in walks):
        return [_outcome(found) for found in _forked(walks)]
    if reason := guard.missing():
        raise UserError(reason)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "lipnext_scale.planning"],
        input=json.dumps([asdict(walk) for walk in walks]),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"a walk failed:\n{done.stderr}")
    return [_outcome(found) for found in json.loads(done.stdout)]


def _outcome(found: dict[str, Any]) -> Walked | UserError:
    if "refused" in found:
        return UserError(found["refused"])
    if "error" in found:
        raise RuntimeError(found["error"])
    found["rows"] = {
        what: [Row(**dict(zip(Row.__dataclass_fields__, row, strict=True))) for row in rows]
        for what, rows in found["rows"].items()
    }
    return Walked(**found)


def _attempt(walk: Walk) -> dict[str, Any]:
    try:
        walked = run(walk)
    except UserError as error:
        return {"refused": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}
    rows = {what: [astuple(row) for row in found] for what, found in walked.rows.items()}
    return {**asdict(walked), "rows": rows}


def main() -> None:
    walks = [Walk(**walk) for walk in json.load(sys.stdin)]
    with redirect_stdout(sys.stderr):  # DeepSpeed prints
        found = _forked(walks)
    print(json.dumps(found))


def _forked(walks: list[Walk]) -> list[dict[str, Any]]:
    """Each walk in a fork of its own: torch remembers the meshes and groups of the one before."""
    count = min(len(walks), os.cpu_count() or 1)
    with get_context("fork").Pool(count, maxtasksperchild=1) as pool:
        return pool.map(_attempt, walks, chunksize=1)


def walk_recipe(recipe: Recipe, ranks: int, per_node: int, device: str) -> Walked:
    """All steps that a run takes, as rank 0 of it."""
    if ranks % per_node:
        raise UserError(f"{ranks} processes are not so many nodes of {per_node}")
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(configuration.dump(recipe))
        file.flush()
        walk = Walk(file.name, [], ranks // per_node, per_node, device, what=STEPS)
        (walked,) = walk_all([walk])
    if isinstance(walked, UserError):
        raise walked
    return walked
