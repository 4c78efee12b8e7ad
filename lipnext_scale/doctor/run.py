"""A run before it starts: its configuration, its memory, its directory."""

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace

from lipnext_scale.config import Told
from lipnext_scale.data import Catalog
from lipnext_scale.doctor.environment import memory_limit
from lipnext_scale.doctor.report import Finding, of_error, ok, size, warn, wrong
from lipnext_scale.errors import UserError
from lipnext_scale.files import nearest_existing
from lipnext_scale.parallel import build_engine
from lipnext_scale.parallel.estimate import RankEstimate, estimate
from lipnext_scale.parallel.pretending import fake_processes
from lipnext_scale.preflight import require_engine
from lipnext_scale.recipe import Recipe, load_recipe
from lipnext_scale.run_directory import RunDirectory

# Activations come on top of what is estimated.
ROOM = 0.8


def configuration(
    path: str | None, overrides: list[str], launcher: Mapping[str, Told]
) -> tuple[Recipe | None, Finding]:
    try:
        recipe = load_recipe(path, overrides, launcher)
    except UserError as error:
        return None, of_error("configuration", error, f"mend {path}")
    return recipe, ok("configuration", f"{path or 'the arguments'}: loads")


def batch(recipe: Recipe, ranks: int) -> Finding:
    """Every process takes an equal share, in equal parts."""
    whole, parts = recipe.data.batch_size, recipe.parallel.accumulation * ranks
    try:
        recipe.require_batch_for(ranks)
    except UserError as error:
        less, more = whole // parts * parts, -(-whole // parts) * parts
        sizes = " or ".join(f"data.batch_size={size}" for size in (less, more) if size)
        return wrong("batch", str(error), sizes)
    return ok("batch", f"{whole}: {whole // ranks} images for each of {ranks} process(es)")


def memory_of_rank(recipe: Recipe, ranks: int, per_node: int) -> RankEstimate:
    """What the first rank holds, without activations; of ZeRO, the least that it can be."""
    config = recipe.parallel
    if config.engine != "deepspeed":
        with fake_processes(0, ranks):
            engine = build_engine(config, "cpu", per_node)
            return estimate(engine, engine.place(recipe.model), recipe.optim)
    require_engine(recipe, ranks, per_node)
    with fake_processes(0, 1):
        engine = build_engine(replace(config, engine="single", offload_optimizer=False), "cpu", 1)
        whole = estimate(engine, engine.place(recipe.model), recipe.optim)
    stage = config.zero_stage
    return replace(
        whole,
        parameters=whole.parameters // (ranks if stage >= 3 else 1),
        gradients=whole.gradients // (ranks if stage >= 2 else 1),
        optimizer=0 if config.offload_optimizer else whole.optimizer // ranks,
    )


def memory(recipe: Recipe, ranks: int, per_node: int) -> Finding:
    """The estimate against the memory that a process has: of its GPU, or its share of the RAM."""
    import torch

    needed = memory_of_rank(recipe, ranks, per_node)
    least = needed.kept + needed.gathered + needed.buffers
    if recipe.run.device != "cpu" and torch.cuda.is_available():
        there, what = torch.cuda.get_device_properties(0).total_memory, "the GPU has"
    else:
        there, what = memory_limit()[0] // per_node, "the machine has for it"
    text = f"a process holds {size(least)} beside activations; {what} {size(there)}"
    text = f"{text} ({ranks} process(es), {per_node} a node)"
    mend = (
        "more processes, with parallel.engine=fsdp to share the weights; a smaller model.width or "
        "model.depth; python -m lipnext_scale.plan --ranks N shows what N processes hold"
    )
    if least > there:
        return wrong("memory of the run", text, mend)
    if least > ROOM * there:
        return warn("memory of the run", f"{text}: little is left for activations", mend)
    return ok("memory of the run", text)


def checkpoint_bytes(recipe: Recipe) -> int:
    """Weights and state of both optimizers, which are the same whatever the engine."""
    with fake_processes(0, 1):
        alone = replace(
            recipe.parallel,
            engine="single",
            offload_optimizer=False,
            shard_size=0,
            weight_layout="bank",
        )
        engine = build_engine(alone, "cpu", 1)
        whole = estimate(engine, engine.place(recipe.model), recipe.optim)
    return whole.parameters + whole.optimizer


def checkpoints_kept(recipe: Recipe, samples: int) -> int:
    """At most at one time, with the one that is being written. samples: of an epoch, 0 if not known
    yet."""
    run = recipe.run
    steps = recipe.optim.epochs * (samples // recipe.data.batch_parts()[0])
    steps = min(steps, run.max_steps) if run.max_steps else steps
    kept = run.keep_checkpoints + 1
    if run.keep_every and run.checkpoint_every:
        kept += steps // math.lcm(run.keep_every, run.checkpoint_every)
    if steps and run.checkpoint_every:
        kept = min(kept, -(-steps // run.checkpoint_every))
    elif steps:
        kept = 1
    return kept


def disk(recipe: Recipe, catalogs: list[Catalog]) -> Finding:
    """Free space against the checkpoints that are to be kept. (A quota is not seen.)"""
    directory = RunDirectory(recipe.run.dir)
    train = next((catalog for catalog in catalogs if catalog.key == "data.train"), None)
    each = checkpoint_bytes(recipe)
    count = checkpoints_kept(recipe, len(train) if train is not None else 0)
    there = sum(f.stat().st_size for f in directory.checkpoints.rglob("*") if f.is_file())
    needed = max(0, each * count - there)
    free = shutil.disk_usage(nearest_existing(directory.path)).free
    text = f"{count} checkpoint(s) of {size(each)}; {size(free)} free at {directory.path}"
    mend = "another run.dir, or fewer: run.keep_checkpoints=1 run.keep_every=0"
    if needed > free:
        return wrong("disk", text, mend)
    if needed > ROOM * free:
        return warn("disk", f"{text}: it will be nearly full", mend)
    return ok("disk", text)


def directory(recipe: Recipe) -> Finding:
    """Whether run.dir can be written and holds no other run; nothing stays behind of the trial."""
    run = RunDirectory(recipe.run.dir)
    mend = "choose another run.dir=…, or mend the permissions or the mount of this one"
    try:
        run.require_free_or_same(recipe)
        with tempfile.TemporaryFile(dir=nearest_existing(run.path)) as file:
            file.write(b"written by the doctor")
    except UserError as error:
        return of_error("run.dir", error, mend)
    except OSError as error:
        return wrong("run.dir", f"{run.path}: cannot be written: {error.strerror}", mend)
    state = "holds this run" if run.config.exists() else "is free"
    return ok("run.dir", f"{run.path}: can be written, {state}")
