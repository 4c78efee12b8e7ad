"""A run's state to and from its checkpoints: weights, both optimizers, generator, data position.

The schedule is a function of the step. What is stored does not depend on engine, layout or number
of processes (`parallel.pieces`), so any of them can continue.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lipnext_scale import config as configuration
from lipnext_scale.checkpoint import (
    CheckpointWriter,
    Pieces,
    latest_checkpoint,
    load_pieces,
    read_facts,
    verify_checkpoint,
)
from lipnext_scale.data import Loader
from lipnext_scale.errors import RunFailed, UserError
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import Optimizers, require_orthogonal
from lipnext_scale.parallel import Engine, training_pieces
from lipnext_scale.parallel.pieces import checksums
from lipnext_scale.recipe import RunConfig
from lipnext_scale.weights import open_export, read_export


class RunState:
    def __init__(
        self,
        directory: Path,
        run: RunConfig,
        engine: Engine,
        model: LipNeXt,
        optimizers: Optimizers,
    ) -> None:
        self._directory, self._engine = directory, engine
        self._model, self._optimizers = model, optimizers
        self._asynchronous, self._init_from = run.async_checkpoint, run.init_from
        self._writer = CheckpointWriter(
            directory, run.keep_checkpoints, run.keep_every, engine.processes.checkpoint_group
        )

    def save(self, step: int, loader: Loader) -> None:
        """Begin to write the checkpoint of `step`; training may go on at once."""
        pieces = training_pieces(self._model, self._optimizers, self._engine.owned_matrices())
        facts: dict[str, Any] = {
            "loader": loader.state_dict(),
            "optimizers": self._optimizers.counters(),
            "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        }
        self._require_equal_replicas(step, pieces)
        self._writer.save(step, pieces, facts, self._asynchronous)

    def _require_equal_replicas(self, step: int, pieces: Pieces) -> None:
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

    def resume(self, loader: Loader) -> int:
        """Take up the newest checkpoint; the step it is of, 0 where there is none."""
        processes = self._engine.processes
        path = processes.first_does(lambda: latest_checkpoint(self._directory))
        if path is None:
            if self._init_from:
                self._start_from(Path(self._init_from))
            return 0
        try:
            verify_checkpoint(path, processes.checkpoint_group)
        except UserError as error:
            raise UserError(f"{error}; remove {path} to go on from the one before it") from None
        facts = read_facts(path)
        owned = self._engine.owned_matrices()
        pieces = training_pieces(self._model, self._optimizers, owned)
        load_pieces(path, pieces, processes.checkpoint_group)
        if owned is not None:
            owned.rows_from_owners()
        self._optimizers.set_counters(facts["step"], facts["optimizers"])
        loader.load_state_dict(facts["loader"])
        rng = bytearray(base64.b64decode(facts["rng"]))
        torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
        return facts["step"]

    def _start_from(self, path: Path) -> None:
        """Weights out of an export of the same architecture; each process reads what it keeps."""
        owned = self._engine.owned_matrices()
        weights = training_pieces(self._model, None, owned)
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
        if owned is not None:
            owned.rows_from_owners()


def _require_same_architecture(path: Path, there: LipNeXtConfig, here: LipNeXtConfig) -> None:
    there, here = (replace(config, blocks_per_bank=0) for config in (there, here))
    for key, (old, new) in configuration.differences(there, here).items():
        raise UserError(
            f"run.init_from = {str(path)!r}: another architecture "
            f"(model.{key} = {old!r} there, {new!r} here)"
        )
