"""Checkpoints of a run: one file per step, written aside, then named."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from lipnext_scale.errors import UserError

FORMAT = 1


def save_checkpoint(directory: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step`; in all the newest `keep` stay."""
    path = directory / f"step-{step:09d}.pt"
    aside = path.with_name(path.name + ".partial")
    try:
        with aside.open("wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{path}: the checkpoint cannot be written: {error.strerror}") from None
    for old in _steps(directory)[:-keep]:
        old.unlink()
    return path


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint. One that was cut off has never got its name."""
    steps = _steps(directory)
    return steps[-1] if steps else None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: a checkpoint can carry no code."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: is not a readable checkpoint: {reason}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path}: is not a checkpoint of format {FORMAT}")
    return state


def _steps(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*.pt"))
