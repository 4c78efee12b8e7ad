"""Export a run's slow weights to one safetensors file, under names that only the model decides.

    python -m lipnext_scale.export --run runs/digits --out digits.safetensors

Names: blocks.{i}.R, blocks.{i}.M (product) or blocks.{i}.W (merged), blocks.{i}.bias,
blocks.{i}.pos, head.weight, head.bias. The file's metadata has the architecture as JSON, `model`.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lipnext_scale import config as configuration
from lipnext_scale.checkpoint import latest_checkpoint, load_checkpoint
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import Optimizers
from lipnext_scale.run_directory import RunDirectory, write_atomically


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
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}") from None


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
    config = configuration.from_dict(LipNeXtConfig, json.loads(metadata["model"]), "model")
    with torch.device("meta"):
        model = LipNeXt(config)
    model.to_empty(device="cpu")
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
    checkpoint = latest_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise UserError(f"{directory.path}: has no checkpoint yet")
    state = load_checkpoint(checkpoint)
    model = LipNeXt(recipe.model, seed=0)
    optimizers = Optimizers(model, recipe.optim)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    exported = LipNeXt(recipe.model, seed=0)
    with optimizers.slow_weights():
        exported.load_state_dict(model.state_dict())
    return exported


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.export", description=__doc__.split("\n")[0])
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    arguments = parser.parse_args(argv)
    model = load_run_model(RunDirectory(arguments.run))
    save_export(model, arguments.out)
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
