"""The shards that a configuration names: there, readable, what the model takes, checked; and room
on this node for those that are to be copied."""

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lipnext_scale.config import ConfigError
from lipnext_scale.data import Catalog, open_catalog, resolve_shards
from lipnext_scale.data.integrity import unchecked_shards
from lipnext_scale.data.samples import require_fits
from lipnext_scale.data.shards import BUILTIN, as_url, is_builtin, is_remote
from lipnext_scale.data.staging import Cache, default_cache, is_staged, size_of
from lipnext_scale.doctor.report import Finding, look, of_error, ok, size, warn, wrong
from lipnext_scale.errors import UserError
from lipnext_scale.files import nearest_existing
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory

# A disk that copies fill beyond this has too little left for whatever else is written there.
ROOM = 0.8
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
    if needed > ROOM * free:
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
