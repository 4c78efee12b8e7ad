"""A run before it starts: its configuration, its memory, its directory."""

import math
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from lipnext_scale.config import ConfigError, LauncherSetting
from lipnext_scale.data import Catalog, open_catalog, resolve_shards
from lipnext_scale.data.catalog import (
    BUILTIN,
    Cache,
    as_url,
    default_cache,
    is_builtin,
    is_remote,
    is_staged,
    size_of,
    unchecked_shards,
)
from lipnext_scale.data.datasets import require_fits
from lipnext_scale.doctor.environment import memory_limit
from lipnext_scale.doctor.report import Finding, look, of_error, ok, size, warn, wrong
from lipnext_scale.errors import UserError
from lipnext_scale.files import nearest_existing
from lipnext_scale.parallel import build_engine
from lipnext_scale.parallel.estimate import RankEstimate, estimate
from lipnext_scale.parallel.processes import fake_group
from lipnext_scale.preflight import require_engine
from lipnext_scale.recipe import Recipe, load_recipe
from lipnext_scale.run_directory import RunDirectory

# --------------------------------------------------------------------------------------------------
# The shards that a configuration names: there, readable, what the model takes, checked; and room
# on this node for those that are to be copied.

# A disk that copies fill beyond this has too little left for whatever else is written there.
STAGE_ROOM = 0.8
_ASKING = 16  # servers answer one question in some tens of milliseconds


def shards(recipe: Recipe) -> tuple[list[Finding], list[Catalog]]:
    """What there is to say of every set, and those that could be opened."""
    data = recipe.data
    sets = {
        "data.train": (data.train, bool(data.augment.resize[1])),
        "data.test": (data.test, bool(data.test_resize)),
    }
    if data.synthetic.shards:
        resized = bool(data.synthetic.augment.resize[1])
        sets["data.synthetic.shards"] = (data.synthetic.shards, resized)
    findings: list[Finding] = []
    opened: list[Catalog] = []
    for key, (pattern, resized) in sets.items():
        findings += look(key, partial(_set, recipe, key, pattern, resized, opened))
    if opened:
        findings += look("checksums", partial(checksums, recipe, opened))
    return findings, opened


def _set(
    recipe: Recipe, key: str, pattern: str, resized: bool, opened: list[Catalog]
) -> list[Finding]:
    """One set; a remote one would be copied here by opening it, and is only asked for."""
    data, model = recipe.data, recipe.model
    try:
        names = resolve_shards(pattern, key)
        if is_remote(names[0]):
            where = data.stage_dir or data.cache_dir or "the user's cache"
            return [ok(key, f"{len(names)} shards elsewhere; a run copies them into {where}")]
        cache = Path(data.cache_dir) if data.cache_dir else None
        catalog = open_catalog(pattern, key, cache, data.memory_limit_gb)
        require_fits(catalog, model.image_size, model.in_channels, model.num_classes, resized)
    except ConfigError as error:  # nothing there, or not what the model takes
        mend = f"set {error.key}=… to what is there, or mount or make the shards: docs/data.md"
        return [wrong(key, str(error), mend)]
    except UserError as error:
        return [of_error(key, error, _mend(pattern))]
    opened.append(catalog)
    held = sum(shard.bytes for shard in catalog.shards)
    text = f"{len(catalog):,} samples in {len(names)} shards, {size(held)}"
    bare = [shard for shard in catalog.shards if shard.sha256 is None]
    if bare and not pattern.startswith("builtin:"):
        told = f"{text}; {len(bare)} without an index: scanned at every start, never compared"
        return [warn(key, told, f"python -m data_prep.index '{pattern}'")]
    return [ok(key, text)]


def _mend(pattern: str) -> str:
    directory = str(Path(pattern.replace("builtin:", f"{BUILTIN}/")).parent)
    return (
        f"python -m data_prep.verify {directory} names all that is damaged; copy or convert it "
        f"again, or write the index anew: python -m data_prep.index --force '{pattern}'"
    )


def checksums(recipe: Recipe, catalogs: list[Catalog]) -> Finding:
    """Which of the shards are known to be whole; they are hashed by the run, not here."""
    with_sums = [s for catalog in catalogs for s in catalog.shards if s.sha256 is not None]
    if not with_sums:
        return ok("checksums", "these shards have none")
    if not recipe.data.verify:
        return warn("checksums", "data.verify = false: shards are not compared", "data.verify=true")
    new = unchecked_shards(catalogs, RunDirectory(recipe.run.dir).whole_files())
    if not new:
        return ok("checksums", f"all {len(with_sums)} shards were found whole by this run")
    held = sum(shard.bytes for shard in new)
    return ok("checksums", f"{len(new)} shards, {size(held)}: the run compares them as it starts")


def room_for_copies(recipe: Recipe) -> list[Finding]:
    """Free space of this node against the shards that a run would still copy there."""
    staged, directory = bool(recipe.data.stage_dir), recipe.data.stage_dir or recipe.data.cache_dir
    key = "data.stage_dir" if staged else "data.cache_dir"
    path = Path(directory) if directory else default_cache()
    copied = _copied(recipe, staged)
    if not copied:
        return []
    new = [shard for shard in copied if not is_staged(shard, Cache(path, key))]
    mend = f"another {key}=…, on a disk that is larger and can be written"
    if staged:
        mend = f"{mend}; or {key}= with nothing, to read the shards where they are"
    try:
        place = nearest_existing(path)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"written by the doctor")
        free = shutil.disk_usage(place).free
    except OSError as error:
        return [wrong(key, f"{path}: cannot be written: {error.strerror}", mend)]
    with ThreadPoolExecutor(_ASKING) as pool:
        sizes = list(pool.map(size_of, new))
    needed, unknown = sum(held or 0 for held in sizes), sizes.count(None)
    text = f"{len(new)} of {len(copied)} shards are to be copied, {size(needed)}"
    text += f" and {unknown} whose size is not told" if unknown else ""
    text = f"{text}; {size(free)} free at {path}"
    if needed > free:
        return [wrong(key, text, mend)]
    if needed > STAGE_ROOM * free:
        return [warn(key, f"{text}: it will be nearly full", mend)]
    return [ok(key, text)]


def _copied(recipe: Recipe, staged: bool) -> list[str]:
    """What a run reads from copies, of sets that are there; of others it has been told."""
    data, found = recipe.data, list[str]()
    for key, pattern in (
        ("data.train", data.train),
        ("data.test", data.test),
        ("data.synthetic.shards", data.synthetic.shards),
    ):
        try:
            names = resolve_shards(pattern, key) if pattern else []
        except UserError:
            continue
        if staged and not is_builtin(pattern):
            names = [as_url(name) for name in names]
        found += [name for name in names if is_remote(name)]
    return found


# Activations come on top of what is estimated.
ROOM = 0.8


def configuration(
    path: str | None, overrides: list[str], launcher: Mapping[str, LauncherSetting]
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
        with fake_group(0, ranks):
            engine = build_engine(config, "cpu", per_node)
            return estimate(engine, engine.place(recipe.model), recipe.optim)
    require_engine(recipe, ranks, per_node)
    with fake_group(0, 1):
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
    with fake_group(0, 1):
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
