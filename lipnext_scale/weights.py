"""Weights outside a run: exports with stable names, and the model that a run or an export holds.

An export is one safetensors file under names that only the model decides: blocks.{i}.R,
blocks.{i}.M (product) or blocks.{i}.W (merged), blocks.{i}.bias, blocks.{i}.pos, head.weight,
head.bias. Its metadata has the architecture as JSON, `model`.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lipnext_scale import config as configuration
from lipnext_scale.checkpoint import latest_checkpoint, load_checkpoint, restore
from lipnext_scale.errors import UserError
from lipnext_scale.files import write_atomically
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import Optimizers
from lipnext_scale.run_directory import RunDirectory


def stable_parameters(model: LipNeXt) -> dict[str, Tensor]:
    """Views of all parameters by stable name, whatever the grouping into banks."""
    second = "M" if model.config.parametrisation == "product" else "W"
    named: dict[str, Tensor] = {}
    for group in model.block_groups():
        for index in range(group.count):
            block = f"blocks.{group.first + index}"
            named[f"{block}.R"] = group.bank[2 * index]
            named[f"{block}.{second}"] = group.bank[2 * index + 1]
            named[f"{block}.bias"] = group.bias[index]
            if group.pos is not None:
                named[f"{block}.pos"] = group.pos[index]
    named["head.weight"], named["head.bias"] = model.head.weight, model.head.bias
    return named


def save_export(model: LipNeXt, path: Path) -> None:
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in stable_parameters(model).items()
    }
    # How blocks are grouped into banks is not part of the function.
    plain = dataclasses.replace(model.config, blocks_per_bank=0)
    content = save(tensors, metadata={"model": json.dumps(configuration.to_dict(plain))})
    write_atomically(path, content)


@torch.no_grad()
def load_export(path: Path) -> LipNeXt:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: is not a readable export: {error}") from None
    if "model" not in metadata:
        raise UserError(f"{path}: is not an export of lipnext_scale (no `model` in its metadata)")
    try:
        config = configuration.from_dict(LipNeXtConfig, json.loads(metadata["model"]), "model")
        model = empty_model(config)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path}: its architecture cannot be built: {error}") from None
    parameters = stable_parameters(model)
    if set(parameters) != set(tensors):
        odd = sorted(set(parameters) ^ set(tensors))[0]
        raise UserError(f"{path}: its tensors do not fit its architecture ({odd})")
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, "
                f"the architecture has {tuple(parameter.shape)}"
            )
        parameter.copy_(tensors[name])
    return model


def load_run_model(directory: RunDirectory) -> LipNeXt:
    """The model of a run's newest checkpoint, with the slow weights: the algorithm's output."""
    recipe = directory.recipe()
    path = latest_checkpoint(directory.checkpoints)
    if path is None:
        raise UserError(f"{directory.path}: has no checkpoint yet")
    state = load_checkpoint(path)
    model = empty_model(recipe.model)
    # The optimizer wants an orthogonal start. What is stored may have drifted: that K will show.
    with torch.no_grad():
        for group in model.block_groups():
            group.bank.copy_(torch.eye(recipe.model.width))
    optimizers = Optimizers(model, recipe.optim)
    restore(path, model, state["model"])
    restore(path, optimizers, state["optimizers"])
    with optimizers.slow_weights():
        slow = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(slow)
    return model


def empty_model(config: LipNeXtConfig) -> LipNeXt:
    """A model on the CPU whose weights are still to be loaded."""
    with torch.device("meta"):
        model = LipNeXt(config)
    return model.to_empty(device="cpu")
