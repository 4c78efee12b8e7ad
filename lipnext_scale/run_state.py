"""A run's state to and from its checkpoints: weights, both optimizers, generator, data position.

The schedule is a function of the step. What is stored does not depend on engine, layout or number
of processes (`parallel.pieces`), so any of them can continue.
"""

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from lipnext_scale import config as configuration
from lipnext_scale.checkpoint import (
    CheckpointWriter,
    StateShards,
    load_pieces,
    newest_whole_checkpoint,
    read_facts,
)
from lipnext_scale.errors import RunFailed, UserError
from lipnext_scale.faults.non_finite import NonFiniteSteps
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import Optimizers, require_orthogonal
from lipnext_scale.parallel import Engine
from lipnext_scale.parallel.pieces import checksums
from lipnext_scale.recipe import RunConfig
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import open_export, read_export


class HasPosition(Protocol):
    """A loader, or whatever else knows how far a run has come in its data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RunState:
    def __init__(
        self,
        directory: RunDirectory,
        run: RunConfig,
        engine: Engine,
        model: LipNeXt,
        optimizers: Optimizers,
    ) -> None:
        self._engine = engine
        self._model, self._optimizers = model, optimizers
        self._run, self.non_finite = run, NonFiniteSteps(run)
        self._checkpoints = directory.checkpoints
        self._writer = CheckpointWriter(
            self._checkpoints,
            run.keep_checkpoints,
            run.keep_every,
            engine.processes.checkpoint_group,
        )
        self._told: BaseException | None = None

    def save(self, step: int, loader: HasPosition) -> None:
        """Begin to write the checkpoint of `step`; training may go on at once.

        One that could not be written is told and let pass, since a full disk may have room again
        at the next. That one is waited for, and ends the run if it fails too.
        """
        failed = self._last_save_failed()
        self._optimizers.initialise_state()  # before the first step there is none
        facts: dict[str, Any] = {
            "loader": loader.state_dict(),
            "optimizers": self._optimizers.counters(),
            "non_finite": self.non_finite.state_dict(),
            "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        pieces = self._engine.pieces(self._optimizers)
        self._require_equal_replicas(step, pieces)
        self._writer.save(step, pieces, facts, self._run.async_checkpoint and not failed)

    def _require_equal_replicas(self, step: int, pieces: StateShards) -> None:
        """Ranks that hold the same part hold the same numbers, or the checkpoint would mix two."""
        sums = self._engine.processes.gather_objects(checksums(pieces))
        first: dict[str, tuple[int, int]] = {}
        for rank, held in enumerate(sums):
            for name, checksum in held.items():
                other, expected = first.setdefault(name, (rank, checksum))
                if checksum != expected:
                    raise RunFailed(
                        f"step {step}: ranks {other} and {rank} hold copies of {name} that differ; "
                        "the last checkpoint is whole"
                    )

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete."""
        self._writer.wait()

    def tell_failure(self) -> None:
        """Say so as soon as a checkpoint could not be written. To be called often: it is cheap."""
        error = self._writer.failure
        if isinstance(error, UserError) and error is not self._told:
            self._told = error
            if self._engine.processes.rank == 0:
                line = f"warning: {error}; the run goes on and tries again at the next checkpoint"
                print(line, file=sys.stderr, flush=True)

    def _last_save_failed(self) -> bool:
        """On all ranks alike; what went wrong has been told."""
        self._writer.join()
        self.tell_failure()
        try:
            self.wait()
        except UserError:
            return True
        return False

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Leave no checkpoint half-written behind, also where an error ends the run."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self.wait()
            raise
        self.wait()

    def resume(self, loader: HasPosition) -> int:
        """Take up the newest checkpoint; the step it is of, 0 where there is none."""
        path = newest_whole_checkpoint(self._checkpoints, self._engine.processes.checkpoint_group)
        if path is None:
            if self._run.init_from:
                self._start_from(Path(self._run.init_from))
            return 0
        facts = self._load(path)
        self.non_finite.load_state_dict(_non_finite_in(facts))
        loader.load_state_dict(facts["loader"])
        rng = bytearray(base64.b64decode(facts["rng"]))
        torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
        return facts["step"]

    def _load(self, path: Path) -> dict[str, Any]:
        """Make weights and optimizers those of a checkpoint, whose files were verified."""
        facts = read_facts(path)
        pieces = self._engine.pieces(self._optimizers)
        load_pieces(path, pieces, self._engine.processes.checkpoint_group)
        self._engine.pieces_loaded(pieces, self._optimizers)
        updates = facts["step"] - _non_finite_in(facts)["missing"]
        self._optimizers.set_counters(updates, facts["optimizers"])
        return facts

    def without_update(self, step: int, what: str) -> str:
        """Let step number `step` pass, which would have been one with `what`; the line to tell."""
        line = self.non_finite.add(step, what)
        self._engine.discard_gradients()
        return f"{line}; its batch was left out"

    def _start_from(self, path: Path) -> None:
        """Weights out of an export of the same architecture; each process reads what it keeps."""
        weights = self._engine.pieces(None)
        named = {name.removeprefix("model."): piece for name, piece in weights.items()}

        def read() -> None:
            with open_export(path) as (config, file):
                _require_same_architecture(path, config, self._model.config)
                read_export(path, file, named)
            for name, piece in named.items():
                if name.endswith((".R", ".M", ".W")) and piece.tensor.shape == piece.shape:
                    try:
                        require_orthogonal(f"{path}: {name}", piece.tensor)
                    except ValueError as error:
                        raise UserError(str(error)) from None

        self._engine.processes.everywhere(read)
        self._engine.pieces_loaded(weights, None)


def _non_finite_in(facts: dict[str, Any]) -> dict[str, int]:
    """Checkpoints from before there was a policy know of none."""
    return facts.get("non_finite", {"count": 0, "missing": 0})


def _require_same_architecture(path: Path, there: LipNeXtConfig, here: LipNeXtConfig) -> None:
    there, here = (replace(config, blocks_per_bank=0) for config in (there, here))
    for key, (old, new) in configuration.differences(there, here).items():
        raise UserError(
            f"run.init_from = {str(path)!r}: another architecture "
            f"(model.{key} = {old!r} there, {new!r} here)"
        )
