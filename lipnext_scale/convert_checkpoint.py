"""Convert the newest checkpoint of a run between our format and DeepSpeed's, bit for bit.

    python -m lipnext_scale.convert_checkpoint RUN --to native
    torchrun --nproc-per-node 8 -m lipnext_scale.convert_checkpoint RUN --to deepspeed \\
        parallel.zero_stage=3

The first needs one process, no DeepSpeed, and memory for the whole state. The second needs as many
processes as the run shall go on with. `docs/engines.md` says which format is for what.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lipnext_scale.checkpoint import CheckpointWriter, latest_checkpoint, step_of
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.parallel import build_engine
from lipnext_scale.parallel.zero_reader import MODEL, ModelStates, stored_pieces
from lipnext_scale.progress import Progress
from lipnext_scale.recipe import CheckpointFormat, load_recipe
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.run_state import RunState

# What can be said beside parallel.*: where it is done, and where matrices must not be cut.
OTHERS = ("run.device", "model.blocks_per_bank")


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    directory = RunDirectory(arguments.run)
    directory.recipe()  # it is a run
    try:
        if arguments.to == "native":
            to_native(directory)
        else:
            to_deepspeed(directory, arguments.overrides)
    finally:
        directory.lock.release()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(
        prog="lipnext_scale.convert_checkpoint", description="Convert a run's newest checkpoint."
    )
    parser.add_argument("run", help="run directory")  # torchrun would take --run for its own
    parser.add_argument("--to", required=True, choices=("native", "deepspeed"))
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="how DeepSpeed cuts it, such as parallel.zero_stage=3; else as the run's own "
        f"(parallel.*, {', '.join(OTHERS)})",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.to == "native" and arguments.overrides:
        parser.error(f"{arguments.overrides[0]}: is for --to deepspeed alone")
    for override in arguments.overrides:
        if not override.startswith(("parallel.", *(f"{key}=" for key in OTHERS))):
            allowed = ", ".join(("parallel.*", *OTHERS))
            parser.error(f"{override}: only {allowed} can be given")
    return arguments


def _source(
    directory: RunDirectory, to: CheckpointFormat, cut: tuple[int, int] | None = None
) -> Path:
    """The newest checkpoint of the other format, which is not there yet in this one.

    cut: for DeepSpeed's, stage and ranks; one that is cut otherwise is replaced. No run goes on
    here meanwhile: it would remove what is being read.
    """
    other: CheckpointFormat = "native" if to == "deepspeed" else "deepspeed"
    path, done = (latest_checkpoint(directory.checkpoints_of(f)) for f in (other, to))
    if path is None:
        raise UserError(f"{directory.path}: has no checkpoint in {other} format")
    if done is not None and step_of(done) >= step_of(path):
        if step_of(done) > step_of(path) or cut is None or cut == _cut_of(done):
            raise UserError(f"{done}: is there already, and {path} is no newer")
    directory.lock.require_free()
    directory.lock.take()
    return path


def _cut_of(path: Path) -> tuple[int, int]:
    states = ModelStates.read(path)
    return states.stage, states.ranks


def to_native(directory: RunDirectory) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("--to native: one process does it; start it without a launcher")
    path = _source(directory, "native")
    states = ModelStates.read(path)
    model = _model(directory.recipe().model, states)
    print(f"{path}: ZeRO-{states.stage} on {states.ranks} process(es)", flush=True)
    progress = Progress(states.ranks, unit="rank", title="read", log_seconds=10)
    pieces = stored_pieces(states, model, progress.advance)
    progress.close()
    facts = dict(states.facts)
    writer = CheckpointWriter(directory.checkpoints, keep_last=sys.maxsize)
    writer.save(facts.pop("step"), pieces, facts, asynchronous=False)
    print(f"{latest_checkpoint(directory.checkpoints)}: {len(pieces)} tensors")


def _model(config: LipNeXtConfig, states: ModelStates) -> LipNeXt:
    """The run's model without memory, in the banks that were stored."""
    stored = {name: shape for shapes in states.shapes for name, shape in shapes.items()}
    banks = [shape[0] // 2 for name, shape in stored.items() if name.endswith(".bank")]
    with torch.device("meta"):
        model = LipNeXt(replace(config, blocks_per_bank=max(banks, default=0)))
    ours = {f"{MODEL}{name}": tuple(p.shape) for name, p in model.named_parameters()}
    for name, shape in ours.items():
        if tuple(stored.get(name, ())) != shape:
            there = tuple(stored[name]) if name in stored else "not there"
            raise UserError(f"{states.path}: {name} is {there}, in this run's model {shape}")
    return model


class Position:
    """Of the loader, handed on as it was stored: nothing is loaded here."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


def to_deepspeed(directory: RunDirectory, overrides: list[str]) -> None:
    recipe = load_recipe(str(directory.config), ["parallel.engine=deepspeed", *overrides])
    engine = build_engine(recipe.parallel, recipe.run.device)
    processes = engine.processes
    cut = recipe.parallel.zero_stage, processes.world_size
    path = processes.first_does(lambda: _source(directory, "deepspeed", cut))
    first = processes.rank == 0
    if first:
        print(f"{path}: for {engine.describe()}", flush=True)
    model = engine.build(recipe.model, recipe.run.seed)
    optimizers = engine.optimizers(recipe.optim)
    position = Position()
    ours, theirs = (
        replace(recipe.run, checkpoint_format=format, keep_checkpoints=sys.maxsize)
        for format in ("native", "deepspeed")
    )
    before, after = (RunState(directory, run, engine, model, optimizers) for run in (ours, theirs))
    step = before.resume(position)
    after.non_finite = before.non_finite
    after.save(step, position)
    if first:
        print(f"{latest_checkpoint(directory.deepspeed_checkpoints)}: complete")
    processes.close()


if __name__ == "__main__":
    main()
