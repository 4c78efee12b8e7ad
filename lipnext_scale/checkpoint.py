"""Checkpoints of a run: one file per step, written aside, then named."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch

from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, atomic_file

FORMAT = 1
PARTS = {"step", "model", "optimizers", "loader", "rng"}


class Restorable(Protocol):
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def save_checkpoint(directory: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step`; in all the newest `keep` stay."""
    path = directory / f"step-{step:09d}.pt"
    try:
        with atomic_file(path) as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
    except OSError as error:
        raise UserError(f"{path}: the checkpoint cannot be written: {error.strerror}") from None
    cut_off = directory.glob(f"step-*{PARTIAL}")  # by a kill, earlier
    for old in [*_steps(directory)[:-keep], *cut_off]:
        old.unlink()
    return path


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint. One that was cut off has never got its name."""
    steps = _steps(directory)
    return steps[-1] if steps else None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: a checkpoint can carry no code."""
    _require_intact(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: is not a readable checkpoint: it holds more than tensors and plain values"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: is not a readable checkpoint: {reason}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: is not a checkpoint of format {FORMAT}")
    missing = sorted(PARTS - set(state))
    if missing:
        raise UserError(f"{path}: is not a whole checkpoint: it has no {missing[0]!r}")
    return state


def restore(path: Path, target: Restorable, state: dict[str, Any]) -> None:
    """Load a part of the checkpoint at `path` into what it belongs to."""
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: does not fit this run's configuration: {reason}") from None


def _require_intact(path: Path) -> None:
    """torch.load does not look at the archive's checksums: it would load a flipped bit."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,  # what zipfile raises for a compression it does not know
    ) as error:
        raise UserError(f"{path}: is not a readable checkpoint: {error}") from None
    if damaged is not None:
        raise UserError(f"{path}: is damaged: the checksum of {damaged} is wrong")


def _steps(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-[0-9]*.pt"))
