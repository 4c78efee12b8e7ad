"""Models outside a run: exports under stable names, and the model that a checkpoint holds.

An export is one safetensors file under the stable names of `models.lipnext`, whose metadata has the
architecture as JSON, `model`; in it `data`, which older ones lack, has how test images were made
and what the classes are called. Or it is a directory of such a file, model.safetensors, and
config.json, which has the same for people and tools. `zoo:NAME` is one that ships with the package.
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

from lipnext_scale.checkpoint.directory import verify_checkpoint
from lipnext_scale.checkpoint.io import load_shards, stored_shapes
from lipnext_scale.checkpoint.shards import StateShard, StateShards
from lipnext_scale.models import LipNeXt, LipNeXtConfig, freeze
from lipnext_scale.models.lipnext import named_parts
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.collectives import Group
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import write_atomically

SUFFIX = ".safetensors"
WEIGHTS = f"model{SUFFIX}"
CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class DataFacts:
    """test_resize: as of the run's data. classes: the names of the labels; empty: they have none"""

    test_resize: int = 0
    classes: tuple[str, ...] = ()


def stable_parameters(model: LipNeXt) -> dict[str, Tensor]:
    """Views of all parameters by stable name, for any grouping into banks."""
    return {part.name: part.of(part.parameter) for part in named_parts(model)}


def save_export(model: LipNeXt, path: Path, data: DataFacts | None = None) -> None:
    """To one file NAME.safetensors, or to any other name as a directory of the two files.

    It has matrices, not what they are made of (`models.freeze`).
    """
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in stable_parameters(freeze(model)).items()
    }
    # The grouping of blocks into banks is not part of the function.
    plain = configuration.to_dict(dataclasses.replace(model.config, blocks_per_bank=0))
    facts = configuration.to_dict(data or DataFacts())
    # One key: safetensors writes several in any order, and files of one model would differ.
    content = save(tensors, metadata={"model": json.dumps({**plain, "data": facts})})
    if path.suffix == SUFFIX:
        write_atomically(path, content)
    else:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / WEIGHTS, content)
        described = json.dumps({"model": plain, "data": facts}, indent=2)
        write_atomically(path / CONFIG, described.encode())


ZOO = Path(__file__).parents[1] / "zoo"
IN_ZOO = "zoo:"


def in_zoo(path: Path) -> Path:
    """The file of zoo:NAME; any other path as it is."""
    if not str(path).startswith(IN_ZOO):
        return path
    found = {file.stem: file for file in sorted(ZOO.glob(f"*{SUFFIX}"))}
    if (name := str(path).removeprefix(IN_ZOO)) not in found:
        raise UserError(f"{path}: is not in the zoo, which has {', '.join(found)}")
    return found[name]


def is_export(path: Path) -> bool:
    path = in_zoo(path)
    return path.is_file() or (path / WEIGHTS).is_file()


@contextmanager
def open_export(path: Path) -> Iterator[tuple[LipNeXtConfig, Any]]:
    """(architecture, safetensors file) of an export; anything wrong with it is a UserError."""
    path = in_zoo(path)
    weights = path / WEIGHTS if path.is_dir() else path
    if not weights.is_file():
        raise UserError(
            f"{path}: is not an export; python -m lipnext_scale.export --run RUN makes one"
        )
    try:
        file = safe_open(weights, framework="pt")
    except (OSError, SafetensorError) as error:
        right = "give a run directory, a checkpoint or NAME.safetensors"
        raise UserError(f"{weights}: is not a readable export ({error}); {right}") from None
    with file:
        metadata = file.metadata() or {}
        if "model" not in metadata:
            raise UserError(
                f"{weights}: is not an export of lipnext_scale (no `model` in its metadata)"
            )
        try:
            described = json.loads(metadata["model"])
            if isinstance(described, dict):
                described.pop("data", None)
            config = configuration.from_dict(LipNeXtConfig, described, "model")
        except ValueError as error:
            raise UserError(f"{weights}: its architecture cannot be built: {error}") from None
        yield config, file


def export_data(path: Path) -> DataFacts:
    with open_export(path) as (_, file):
        stored = json.loads(file.metadata()["model"]).get("data", {})
    try:
        return configuration.from_dict(DataFacts, stored, "data")
    except ValueError as error:
        raise UserError(f"{path}: its `data` cannot be read: {error}") from None


def load_export(path: Path) -> LipNeXt:
    with open_export(path) as (config, file):
        model = empty_model(config, frozen=True)
        parameters = stable_parameters(model).items()
        read_export(path, file, {name: StateShard.full(tensor) for name, tensor in parameters})
    return model


@torch.no_grad()
def read_export(path: Path, file: Any, shards: StateShards) -> None:
    """Read shards by stable name from an opened export: of each tensor only the shard's rows."""
    names = set(file.keys())
    for name, shard in shards.items():
        factor = name.removesuffix("W") + "M"
        from_factor = name not in names and factor in names  # an older export
        stored_name = factor if from_factor else name
        if stored_name not in names:
            raise UserError(f"{path}: has no {name}, which its architecture has")
        stored = file.get_slice(stored_name)
        shape = tuple(stored.get_shape())
        if shape != shard.shape:
            raise UserError(f"{path}: {name} has shape {shape}, the architecture has {shard.shape}")
        rows = stored[shard.offset[0] : shard.offset[0] + shard.tensor.shape[0]]
        if from_factor:
            rows = weight_of(rows, file.get_tensor(name.removesuffix("W") + "R"))
        shard.tensor.copy_(rows)


def weight_of(factor: Tensor, rotation: Tensor) -> Tensor:
    """W = M·Rᵀ, rounded once."""
    return (factor.double() @ rotation.double().mT).to(factor.dtype)


def load_checkpoint_model(config: LipNeXtConfig, path: Path) -> LipNeXt:
    """Frozen, if its matrices are made of free parameters."""
    model = empty_model(config)
    parameters = stable_parameters(model).items()
    read_checkpoint(path, {name: StateShard.full(tensor) for name, tensor in parameters})
    return freeze(model)


@torch.no_grad()
def read_checkpoint(path: Path, shards: StateShards, group: Group = None) -> None:
    """Read shards by stable name: the slow weights, which are the algorithm's output."""
    verify_checkpoint(path, group)
    stored, held, factors = stored_shapes(path), dict(shards), []
    for name in [name for name in shards if f"model.{name}" not in stored]:
        block = name.removesuffix("W")  # M is learned, and W = M·Rᵀ follows
        factor = held[f"{block}M"] = held.pop(name)
        if f"{block}R" not in held:  # another rank has it; matrices are whole
            held[f"{block}R"] = StateShard.full(torch.empty_like(factor.tensor))
        factors.append((factor.tensor, held[f"{block}R"].tensor))
    # A run without Lookahead has no slow weights.
    kinds = {name: "slow" if f"slow.{name}" in stored else "model" for name in held}
    load_shards(path, {f"{kinds[name]}.{name}": shard for name, shard in held.items()}, group)
    for matrix, rotation in factors:
        matrix.copy_(weight_of(matrix, rotation))


def empty_model(config: LipNeXtConfig, frozen: bool = False) -> LipNeXt:
    """A model on the CPU whose weights are still to be loaded."""
    with torch.device("meta"):
        model = LipNeXt(config, frozen=frozen)
    return model.to_empty(device="cpu")
