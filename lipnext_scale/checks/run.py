"""A run before it starts: what preflight and a walk say of it, and its disks."""

from dataclasses import replace
from functools import partial

from lipnext_scale.checks import Finding, enough, look, ok, size, warn
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import DataSets, resolve_shards
from lipnext_scale.data.catalog import is_builtin, is_remote
from lipnext_scale.distributed.processes import choose_device
from lipnext_scale.planning import guard
from lipnext_scale.planning.fit import checkpoint_bytes, memory_needed
from lipnext_scale.training.preflight import require_engine
from lipnext_scale.utils.files import free_bytes

DATA_FIX = (
    "copy or convert the shards again (docs/data.md); python -m data_prep.verify DIRECTORY names "
    "all that is damaged, python -m data_prep.index --force 'SHARDS' writes the index anew"
)


def examine_run(recipe: Recipe, ranks: int, per_node: int) -> list[Finding]:
    """The checks of `train --check`, each by itself, but run.init_from; nothing is written."""
    findings = look("batch", partial(batch, recipe, ranks))
    findings += look("device", partial(device, recipe, per_node))
    findings += look("memory of the run", partial(memory, recipe, ranks, per_node))
    findings += look("data", partial(data, recipe), DATA_FIX)
    findings += look("run.dir", partial(directory, recipe), "choose another run.dir")
    findings += look("disk", partial(disk, recipe))
    return findings


def batch(recipe: Recipe, ranks: int) -> str:
    recipe.require_batch_for(ranks)
    whole = recipe.data.batch_size
    return f"{whole}: {whole // ranks} images for each of {ranks} process(es)"


def device(recipe: Recipe, per_node: int) -> Finding:
    import torch

    chosen = choose_device(recipe.run.device, local_rank=per_node - 1)
    if chosen.type == "cuda" and recipe.parallel.precision == "bf16":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            text = "these GPUs do not compute with parallel.precision = 'bf16'"
            return Finding("device", "wrong", text, "parallel.precision=fp32")
    return ok("device", f"{per_node} process(es) of a node use {chosen.type}")


def memory(recipe: Recipe, ranks: int, per_node: int) -> Finding:
    """What a walk of the run's steps takes against what a process has: of its GPU, or its share of
    the RAM."""
    require_engine(recipe, ranks, per_node)
    if recipe.parallel.offload_optimizer:
        return ok(
            "memory of the run", "is not known: with parallel.offload_optimizer the host steps"
        )
    if reason := guard.missing() if choose_device(recipe.run.device).type == "cuda" else "":
        return warn("memory of the run", f"is not known: {reason}", "apt-get install g++")
    needed, there, where = memory_needed(recipe, ranks, per_node)
    text = f"each of {ranks} process(es), {per_node} a node, takes {size(needed)} at most ({where})"
    fix = (
        "more processes, with parallel.engine=fsdp to share the weights; a larger "
        "parallel.accumulation; a smaller model.width or model.depth; "
        "python -m lipnext_scale.plan --compare shows what others take"
    )
    return enough("memory of the run", f"{text}; it has {size(there)}", needed, there, fix)


def data(recipe: Recipe) -> Finding:
    """All sets are there and what the model takes; opening remote ones would copy them."""
    config, model = recipe.data, recipe.model
    patterns = {"data.train": config.train, "data.test": config.test}
    if config.synthetic.shards:
        patterns["data.synthetic.shards"] = config.synthetic.shards
    shards = [name for key, pattern in patterns.items() for name in resolve_shards(pattern, key)]
    if remote := list(filter(is_remote, shards)):
        where = config.stage_dir or config.cache_dir or "the user's cache"
        return ok("data", f"{len(remote)} remote shards, which a run copies into {where}")
    local = replace(config, stage_dir="")
    sets = DataSets(local, model.image_size, model.in_channels, model.num_classes)
    text = "; ".join(
        f"{catalog.key}: {len(catalog):,} samples in {len(catalog.shards)} shard(s)"
        for catalog in sets.all
    )
    for catalog in sets.all:
        if not is_builtin(catalog.pattern) and any(s.sha256 is None for s in catalog.shards):
            text += f"; {catalog.key} has no index: scanned at every start, never compared"
            return warn("data", text, f"python -m data_prep.index '{catalog.pattern}'")
    return ok("data", text)


def directory(recipe: Recipe) -> str:
    """run.dir can be written and holds no other run."""
    run = RunDirectory(recipe.run.dir)
    run.require_free_or_same(recipe)
    return f"{run.path}: can be written, {'holds this run' if run.config.exists() else 'is free'}"


def disk(recipe: Recipe) -> Finding:
    """Free space against the newest checkpoints and the one that is being written. Quotas are not
    seen, nor the checkpoints of run.keep_every."""
    run, each = RunDirectory(recipe.run.dir), checkpoint_bytes(recipe)
    count = recipe.run.keep_checkpoints + 1
    there = sum(f.stat().st_size for f in run.checkpoints.rglob("*") if f.is_file())
    free = free_bytes(run.path)
    text = f"{count} checkpoints of {size(each)}; {size(free)} free at {run.path}"
    fix = "another run.dir, or fewer: run.keep_checkpoints=1"
    return enough("disk", text, each * count - there, free, fix)
