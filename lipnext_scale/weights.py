"""Weights outside a run: exports with stable names, and the model that a run or an export holds.

An export is one safetensors file under the stable names of `models.lipnext`, whose metadata has the
architecture as JSON, `model`; or a directory of such a file, model.safetensors, and config.json,
which has the architecture for people and tools.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lipnext_scale import config as configuration
from lipnext_scale.checkpoint import (
    StateShard,
    StateShards,
    latest_checkpoint,
    load_pieces,
    stored_shapes,
    verify_checkpoint,
)
from lipnext_scale.errors import UserError
from lipnext_scale.files import write_atomically
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.models.lipnext import named_parts
from lipnext_scale.run_directory import RunDirectory

SUFFIX = ".safetensors"
WEIGHTS = f"model{SUFFIX}"
CONFIG = "config.json"


def stable_parameters(model: LipNeXt) -> dict[str, Tensor]:
    """Views of all parameters by stable name, whatever the grouping into banks."""
    return {part.name: part.of(part.parameter) for part in named_parts(model)}


def save_export(model: LipNeXt, path: Path) -> None:
    """To one file NAME.safetensors, or to any other name as a directory of the two files."""
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in stable_parameters(model).items()
    }
    # How blocks are grouped into banks is not part of the function.
    plain = configuration.to_dict(dataclasses.replace(model.config, blocks_per_bank=0))
    content = save(tensors, metadata={"model": json.dumps(plain)})
    if path.suffix == SUFFIX:
        write_atomically(path, content)
    else:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / WEIGHTS, content)
        write_atomically(path / CONFIG, json.dumps({"model": plain}, indent=2).encode())


def is_export(path: Path) -> bool:
    return path.is_file() or (path / WEIGHTS).is_file()


@contextmanager
def open_export(path: Path) -> Iterator[tuple[LipNeXtConfig, Any]]:
    """(architecture, safetensors file) of an export; whatever is wrong with it is a UserError."""
    weights = path / WEIGHTS if path.is_dir() else path
    if not weights.is_file():
        raise UserError(
            f"{path}: is not an export; python -m lipnext_scale.export --run RUN makes one"
        )
    try:
        file = safe_open(weights, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights}: is not a readable export: {error}") from None
    with file:
        metadata = file.metadata() or {}
        if "model" not in metadata:
            raise UserError(
                f"{weights}: is not an export of lipnext_scale (no `model` in its metadata)"
            )
        try:
            described = json.loads(metadata["model"])
            config = configuration.from_dict(LipNeXtConfig, described, "model")
        except ValueError as error:
            raise UserError(f"{weights}: its architecture cannot be built: {error}") from None
        if path.is_dir():
            _require_same_config(path / CONFIG, described)
        yield config, file


def _require_same_config(path: Path, described: Any) -> None:
    """config.json is for people; one that speaks of another model is not this export's."""
    try:
        written = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if written != {"model": described}:
        raise UserError(f"{path}: describes another model than {WEIGHTS} beside it")


@torch.no_grad()
def load_export(path: Path) -> LipNeXt:
    with open_export(path) as (config, file):
        try:
            model = empty_model(config)
        except RuntimeError as error:
            raise UserError(f"{path}: its architecture cannot be built: {error}") from None
        parameters = stable_parameters(model)
        if set(parameters) != set(file.keys()):
            odd = sorted(set(parameters) ^ set(file.keys()))[0]
            raise UserError(f"{path}: its tensors do not fit its architecture ({odd})")
        read_export(path, file, {name: _whole(tensor) for name, tensor in parameters.items()})
    return model


@torch.no_grad()
def read_export(path: Path, file: Any, pieces: StateShards) -> None:
    """Read pieces by stable name out of an opened export; of each only the rows that it is."""
    for name, piece in pieces.items():
        if name not in file.keys():  # noqa: SIM118
            raise UserError(f"{path}: has no {name}, which this model has")
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(stored.get_shape())}, "
                f"the architecture has {piece.shape}"
            )
        rows = slice(piece.offset[0], piece.offset[0] + piece.tensor.shape[0])
        piece.tensor.copy_(stored[rows])


def _whole(tensor: Tensor) -> StateShard:
    return StateShard(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())


def load_run_model(directory: RunDirectory, checkpoint: Path | None = None) -> LipNeXt:
    """The model of a run's newest checkpoint, or of a given one, with the slow weights: the
    algorithm's output."""
    recipe = directory.recipe()
    path = checkpoint or latest_checkpoint(directory.checkpoints)
    if path is None:
        raise UserError(f"{directory.path}: has no checkpoint yet")
    verify_checkpoint(path)
    model, stored = empty_model(recipe.model), stored_shapes(path)
    pieces = {}
    for name, tensor in stable_parameters(model).items():
        # A frozen weight, or a run without Lookahead, has no slow weights: it is its own.
        kind = "slow" if f"slow.{name}" in stored else "model"
        pieces[f"{kind}.{name}"] = _whole(tensor)
    load_pieces(path, pieces)
    return model


def empty_model(config: LipNeXtConfig) -> LipNeXt:
    """A model on the CPU whose weights are still to be loaded."""
    with torch.device("meta"):
        model = LipNeXt(config)
    return model.to_empty(device="cpu")
