"""A model from whatever holds one: a run directory, one of its checkpoints, or an export."""

from pathlib import Path

from lipnext_scale.checkpoint import SUMS
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import is_export, load_export, load_run_model


def load_model(path: str | Path) -> LipNeXt:
    """The slow weights of a run's newest checkpoint or of a given one, or an export."""
    path = Path(path)
    if is_export(path):
        return load_export(path).eval()
    run = run_of(path)
    if run is None:
        raise UserError(f"{path}: no such run directory, checkpoint or export")
    return load_run_model(run, path if _is_checkpoint(path) else None).eval()


def run_of(path: Path) -> RunDirectory | None:
    """The run that a run directory or a checkpoint belongs to; None for an export."""
    if is_export(path) or not path.is_dir():
        return None
    return RunDirectory(path.absolute().parent.parent if _is_checkpoint(path) else path)


def _is_checkpoint(path: Path) -> bool:
    return (path / SUMS).is_file()
