"""A run's state to and from its checkpoints: weights, both optimizers, generator, data position.

The schedule is a function of the step. What is stored does not depend on engine, layout or number
of processes (`Engine.state_shards`), so any can continue. A run may start from another model.
"""

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lipnext_scale.certification.certifier import run_of
from lipnext_scale.checkpoint import (
    CheckpointWriter,
    StateShards,
    load_shards,
    newest_intact_checkpoint,
    read_facts,
)
from lipnext_scale.checkpoint.exports import open_export, read_checkpoint, read_export
from lipnext_scale.config.recipe import RunConfig
from lipnext_scale.data import StreamLoader
from lipnext_scale.distributed import Engine
from lipnext_scale.distributed.engine import checksums
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.optim import Optimizers, require_orthogonal
from lipnext_scale.training.non_finite import NonFinitePolicy
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.errors import UserError


class Checkpointer:
    """Saves and resumes what it is given, as it is at that moment; all ranks together."""

    def __init__(
        self,
        directory: Path,
        run: RunConfig,
        engine: Engine,
        optimizers: Optimizers,
        loader: StreamLoader,
        non_finite: NonFinitePolicy,
    ) -> None:
        self._directory, self._run = directory, run
        self._engine, self._optimizers = engine, optimizers
        self._loader, self._non_finite = loader, non_finite
        self._group = engine.processes.checkpoint_group
        self.writer = CheckpointWriter(directory, run.keep_checkpoints, run.keep_every, self._group)
        self._warned_of: BaseException | None = None
        self._repaired = 0
        self.origin = ""  # of the weights, in words, where the run starts from others

    def save(self, step: int) -> None:
        """Begin to write the checkpoint of `step`; training may continue at once.

        One that could not be written is a warning, since a full disk may have room again at the
        next. That one is waited for, and ends the run if it fails too.
        """
        failed = False
        try:
            self.writer.wait()
        except UserError as error:  # the same on all ranks
            self._warn_of(error)
            failed = True
        self._optimizers.initialise_state()  # before the first step there is none
        facts: dict[str, Any] = {
            "loader": self._loader.state_dict(),
            "optimizers": self._optimizers.counters(),
            "non_finite": {"missing": self._non_finite.skipped},
            "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        shards = self._engine.state_shards(self._optimizers)
        self._equalise_replicas(step, shards)
        self.writer.save(step, shards, facts, self._run.async_checkpoint and not failed)

    def _equalise_replicas(self, step: int, shards: StateShards) -> None:
        """Ranks that hold the same part hold the same bits, or the checkpoint would mix two.

        Where they do not (a flipped bit, unlike devices) the first rank's count for all.
        """
        sums = self._engine.processes.gather_objects(checksums(shards))
        first: dict[str, tuple[int, int]] = {}
        unequal: dict[str, str] = {}
        for rank, held in enumerate(sums):
            for name, checksum in held.items():
                other, expected = first.setdefault(name, (rank, checksum))
                if checksum != expected:
                    unequal.setdefault(name, f"ranks {other} and {rank} hold copies of {name}")
        if not unequal:
            return
        assert self._engine.replicas() > 1, unequal
        self._engine.equalise_replicas(unequal, shards, self._optimizers)
        self._repaired += len(unequal)
        if self._engine.processes.rank == 0:
            line, *others = unequal.values()
            line += f" (and of {len(others)} more)" if others else ""
            said = f"warning: step {step}: {line} that differ; the first rank's are taken"
            print(said, file=sys.stderr, flush=True)

    def metrics(self) -> dict[str, int]:
        """Tensors whose replicas were made equal since the start of this process, if any were."""
        return {"train/repaired_replicas": self._repaired} if self._repaired else {}

    def warn_of_failure(self) -> None:
        """Cheap: called after every step."""
        self._warn_of(self.writer.failure)

    def _warn_of(self, error: BaseException | None) -> None:
        """Print that a checkpoint could not be written, once."""
        if isinstance(error, UserError) and error is not self._warned_of:
            self._warned_of = error
            if self._engine.processes.rank == 0:
                line = f"warning: {error}; the run continues and tries again at the next checkpoint"
                print(line, file=sys.stderr, flush=True)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Complete the checkpoint that is being written, also where an error ends the run."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.writer.wait()
            raise
        self.writer.wait()

    def resume(self) -> int:
        """Load the newest intact checkpoint and return its step; 0 where there is none."""
        path = newest_intact_checkpoint(self._directory, self._group)
        if path is None:
            if self._run.init_from:
                self.origin = start_from(Path(self._run.init_from), self._engine)
            return 0
        facts = read_facts(path)
        shards = self._engine.state_shards(self._optimizers)
        load_shards(path, shards, self._group)
        self._engine.state_loaded(shards, self._optimizers)
        if "non_finite" in facts:  # not in the oldest checkpoints
            self._non_finite.skipped = facts["non_finite"]["missing"]
        updates = self._non_finite.updates(facts["step"])
        self._optimizers.set_counters(updates, facts["optimizers"])
        self._loader.load_state_dict(facts["loader"])
        rng = bytearray(base64.b64decode(facts["rng"]))
        torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
        return facts["step"]


def starting_point(path: Path, here: LipNeXtConfig) -> tuple[LipNeXtConfig, Path | None]:
    """(architecture, checkpoint or None for an export) of run.init_from, whose backbone fits."""
    run, checkpoint = run_of(path), None
    if run is None:
        with open_export(path) as (there, _):
            pass
    else:
        there = run.recipe().model
        checkpoint = path if path != run.path else run.newest_checkpoint()
    same: Any = {"blocks_per_bank": 0, "num_classes": 2}  # what may differ
    for key, (old, new) in configuration.differences(
        replace(there, **same), replace(here, **same)
    ).items():
        raise UserError(
            f"run.init_from = {str(path)!r}: another architecture (model.{key} = {old!r} there, "
            f"{new!r} here); model.num_classes alone may differ"
        )
    if checkpoint is None and here.layer != "manifold":
        raise UserError(
            f"run.init_from = {str(path)!r}: an export of model.layer = {here.layer!r} has its "
            "matrices, not what they are made of; give the run or one of its checkpoints"
        )
    return there, checkpoint


def start_from(path: Path, engine: Engine) -> str:
    """Take the weights of a run, a checkpoint or an export, without its head where the classes are
    others; each rank reads what it keeps. Returns the origin of the weights in words."""
    here, processes = engine.model.config, engine.processes
    there, checkpoint = processes.on_rank0(lambda: starting_point(path, here))
    weights = engine.state_shards(None)
    named = {name.removeprefix("model."): shard for name, shard in weights.items()}
    origin = f"weights of {path}"
    if there.num_classes != here.num_classes:
        named = {name: shard for name, shard in named.items() if not name.startswith("head.")}
        classes = f"{here.num_classes} classes, not {there.num_classes}"
        origin = f"backbone of {path}, and a new head: {classes}"

    def read() -> None:
        if checkpoint is None:
            with open_export(path) as (_, file):
                read_export(path, file, named)
        for name, shard in named.items():
            if name.endswith((".R", ".W")) and shard.tensor.shape == shard.shape:
                try:
                    require_orthogonal(f"{path}: {name}", shard.tensor)
                except ValueError as error:
                    raise UserError(str(error)) from None

    if checkpoint is not None:
        read_checkpoint(checkpoint, named, processes.checkpoint_group)
    processes.everywhere(read)
    engine.state_loaded(weights, None)
    return origin
