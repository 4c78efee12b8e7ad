"""A model from whatever holds one: a run directory or an export."""

from pathlib import Path

from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import is_export, load_export, load_run_model


def load_model(run_or_export: str | Path) -> LipNeXt:
    """The slow weights of a run's newest checkpoint, or an export, ready for evaluation."""
    path = Path(run_or_export)
    if is_export(path):
        return load_export(path).eval()
    if (path / "SHA256SUMS").is_file():
        raise UserError(f"{path}: is a checkpoint; give the run directory")
    if path.is_dir():
        return load_run_model(RunDirectory(path)).eval()
    raise UserError(f"{path}: no such run directory or export")
