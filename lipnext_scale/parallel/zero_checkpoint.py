"""Checkpoints in DeepSpeed's own format, for its tools and for runs on its engine.

DeepSpeed writes the files; that they get their names when they are complete, which of them stay and
what `latest` says is as with our own checkpoints. They are neither checked by sums nor written
beside the training, and only as many ranks of the same stage take them up again. All others convert
them (`lipnext_scale.convert_checkpoint`), by `zero_reader`.
"""

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lipnext_scale.agreement import reason_of
from lipnext_scale.checkpoint.directory import (
    LATEST,
    checkpoint_name,
    give_name,
    retain,
    sync_directory,
    tidy,
)
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, free_space, sync_file, write_atomically
from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel.processes import lost_a_peer
from lipnext_scale.parallel.zero import DeepSpeedEngine
from lipnext_scale.parallel.zero_reader import (
    FACTS,
    FORMAT,
    ModelStates,
    files_of,
    require_numbers_alone,
)


class ZeroCheckpoints:
    """keep_last, keep_every: as of CheckpointWriter."""

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_every: int,
        engine: DeepSpeedEngine,
        optimizers: Optimizers,
    ) -> None:
        self._directory, self._keep = directory, (keep_last, keep_every)
        self._engine, self._optimizers = engine, optimizers

    def save(self, step: int, facts: dict[str, Any]) -> None:
        """All ranks together; back when it is complete."""
        processes = self._engine.processes
        path = self._directory / checkpoint_name(step)
        partial = path.with_name(path.name + PARTIAL)
        processes.first_does(lambda: self._told(path, self._begin))
        try:
            self._engine.deepspeed.save_checkpoint(
                str(self._directory),
                tag=partial.name,
                client_state={FACTS: {"format": FORMAT, "step": step, **facts}},
                save_latest=False,
            )
        except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by the latter
            if isinstance(error, RuntimeError) and lost_a_peer(error):
                raise
            left = free_space(self._directory)
            shutil.rmtree(partial, ignore_errors=True)
            raise self._failure(path, error, left) from None
        processes.each(lambda: self._told(path, lambda: self._sync(partial)))
        processes.first_does(lambda: self._told(path, lambda: self._finish(step, partial, path)))

    def _begin(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        tidy(self._directory)

    def _sync(self, partial: Path) -> None:
        """What this rank has written is on the disk before the checkpoint gets its name."""
        processes, stage = self._engine.processes, self._engine.config.zero_stage
        for file in files_of(partial, stage, processes.rank):
            if stage == 3 or processes.rank == 0 or "optim" in file.name:
                sync_file(file)

    def _finish(self, step: int, partial: Path, path: Path) -> None:
        stage, ranks = self._engine.config.zero_stage, self._engine.processes.world_size
        for rank in range(ranks):
            for file in files_of(partial, stage, rank):
                if not file.exists():
                    raise UserError(
                        f"{path}: cannot be written: {file.name} of process {rank} is not to be "
                        "seen from the first: all processes need the same directory"
                    )
        sync_directory(partial)
        give_name(partial, path)
        write_atomically(self._directory / LATEST, path.name.encode())
        retain(self._directory, step, *self._keep)

    def _told(self, path: Path, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise self._failure(path, error, free_space(self._directory)) from None

    def _failure(self, path: Path, error: Exception, left: str) -> UserError:
        return UserError(f"{path}: cannot be written: {reason_of(error)} ({left} are free there)")

    def load(self, path: Path) -> dict[str, Any]:
        """Into the engine and the optimizers; the facts that were saved."""
        processes = self._engine.processes
        facts = processes.first_does(lambda: self._facts_for_us(path))
        # DeepSpeed unpickles whatever a file says.
        stage = self._engine.config.zero_stage
        processes.each(lambda: require_numbers_alone(path, stage, processes.rank))
        self._optimizers.initialise_state()
        with contextlib.redirect_stdout(io.StringIO()):  # ZeRO-1 in bf16 prints for itself
            loaded, _ = self._engine.deepspeed.load_checkpoint(str(path.parent), tag=path.name)
        assert loaded is not None
        self._engine.publish()
        return facts

    def _facts_for_us(self, path: Path) -> dict[str, Any]:
        stored = ModelStates.read(path)
        ours = self._engine.config.zero_stage, self._engine.processes.world_size
        instead = (
            "with run.checkpoint_format = 'native' any goes on, after "
            f"python -m lipnext_scale.convert_checkpoint {path.parent.parent} --to native"
        )
        if (stored.stage, stored.ranks) != ours:
            raise UserError(
                f"{path}: is of ZeRO-{stored.stage} on {stored.ranks} process(es), this is "
                f"ZeRO-{ours[0]} on {ours[1]}; {instead}"
            )
        if stored.shapes_of_model() != self._engine.shapes:
            raise UserError(
                f"{path}: has its matrices in other banks (model.blocks_per_bank); {instead}"
            )
        return stored.facts
