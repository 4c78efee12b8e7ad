"""What a run takes, from its walk: times, memory, figures of an epoch, warnings, variants."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.observe.console import training_flops_per_image
from lipnext_scale.planning.times import Device, Timeline, Times, replay
from lipnext_scale.planning.walk import IMAGENET, Walk, Walked
from lipnext_scale.utils.errors import UserError

# Of one core, photographs of 224 px without and with RandAugment: docs/results/2026-11-17-data.md.
IMAGES_PER_CORE, WITH_RAND_AUGMENT = 1373, 739
WRITE_RATE = 2e9  # bytes/s of a node to its disks; assumed
CHAIN = ("step", "lookahead")
# Minutes per epoch of ImageNet on a node of 8 H100 in the paper's table, by width (L32, patch 16).
PAPER = {4096: 8.9, 5792: 17.8}


def is_papers(recipe: Recipe) -> bool:
    model = recipe.model
    shape = (model.depth, model.image_size, model.patch_size, model.num_classes)
    return shape == (32, 224, 16, 1000) and model.width in PAPER


def count_images(recipe: Recipe) -> int | None:
    """Of the training set, if it can be opened here; a remote one would be copied."""
    if "://" in recipe.data.train or recipe.data.train.startswith("pipe:"):
        return None
    try:
        return len(open_catalog(recipe.data.train, "data.train"))
    except (UserError, OSError):
        return None


@dataclass(frozen=True)
class Prediction:
    walk: Walk
    walked: Walked
    device: Device
    images: int = IMAGENET  # of an epoch, without synthetic ones
    images_per_core: float = 0.0  # of the loader; 0: as measured here

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.walk.config, list(self.walk.settings))

    @cached_property
    def times(self) -> Times:
        """Of a mean step: every `optim.lookahead`-th is a Lookahead step."""
        rows, every = self.walked.rows, self.recipe.optim.lookahead
        steps = [rows["step"]] * max(1, every - 1) + ([rows["lookahead"]] if every else [])
        return replay(steps, self.device, self.walk.nodes)

    @cached_property
    def retraction(self) -> float:
        """What it adds to an epoch's last step, in seconds."""
        rows = self.walked.rows
        if "retraction" not in rows:
            return 0.0
        of = [replay([rows[what]], self.device, self.walk.nodes) for what in ("step", "retraction")]
        return of[1].step - of[0].step

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.images // self.recipe.data.batch_parts()[0])

    @property
    def epoch(self) -> float:
        return self.steps_per_epoch * self.times.step + self.retraction

    @property
    def images_per_second(self) -> float:
        return self.recipe.data.batch_size / self.times.step

    @property
    def mfu(self) -> float:
        peak = self.walk.ranks * self.device.peak[self.recipe.parallel.precision]
        return self.images_per_second * training_flops_per_image(self.recipe.model) / peak

    @cached_property
    def peak(self) -> tuple[dict[str, int], str, str]:
        """Memory by kind at its highest, its phase and its place."""
        return max(self.walked.memory.values(), key=lambda found: sum(found[0].values()))

    @property
    def memory(self) -> int:
        return sum(self.peak[0].values()) + self.device.overhead

    @property
    def room(self) -> int:
        """Memory that a rank has; on a CPU processes share it."""
        return self.device.memory // (self.walk.per_node if self.walk.device == "cpu" else 1)

    @property
    def fits(self) -> bool:
        return self.memory <= self.room

    @property
    def loader_rate(self) -> float:
        """Images a second and core."""
        share = self.recipe.data.augment.rand_augment
        slow = share / WITH_RAND_AUGMENT + (1 - share) / IMAGES_PER_CORE
        return self.images_per_core or 1 / slow

    @property
    def cores(self) -> float:
        """Of a node, that load data."""
        return self.images_per_second / self.walk.nodes / self.loader_rate

    def checkpoint(self, size: int) -> tuple[float, float]:
        """(seconds of the copy to the host, seconds to write) of so many bytes."""
        timeline = Timeline(self.device, self.walk.nodes)
        timeline.take(self.walked.rows["checkpoint"])
        copied = max([timeline.host, *(clock.time for clock in timeline.streams.values())])
        return copied, size / (WRITE_RATE * self.walk.nodes)

    def whole_run(self, size: int) -> float:
        """Seconds to the end of the schedule, with checkpoints of so many bytes."""
        epochs, every = self.recipe.optim.epochs, self.recipe.run.checkpoint_every
        copied, written = self.checkpoint(size)
        waits = copied if self.recipe.run.async_checkpoint else copied + written
        count = epochs * self.steps_per_epoch / every if every else 1
        return epochs * self.epoch + count * waits

    @property
    def limit(self) -> str:
        """What takes the largest part of a step; or that it does not fit."""
        if not self.fits:
            return "memory full"
        names = {
            "compute": self.times.of("arithmetic"),
            "memory bandwidth": self.times.of("memory", "beside"),
            "links in the node": self.times.of("node"),
            "network": self.times.of("network"),
            "host": self.times.of("host"),
        }
        return max(names, key=names.__getitem__)


# --------------------------------------------------------------------------------------------------
# Warnings: what is wrong, and the setting that helps.

NOTABLE = 0.1  # of a step


def warnings(found: Prediction) -> list[str]:
    parallel, data, times = found.recipe.parallel, found.recipe.data, found.times
    lines, rows, per_node = [], found.walked.rows["step"], found.walk.per_node
    if not found.fits:
        lines.append(
            "it does not fit: parallel.accumulation, parallel.reshard_after_forward=true, "
            "parallel.recompute_activations=true, or more GPUs"
        )
    gathers = [row for row in rows if row.name == "all_gather" and row.phase == "forward"]
    fsdp = found.walked.engine.startswith("fsdp")
    late = times.parts["forward"]["network"] > NOTABLE * sum(times.parts["forward"].values())
    if fsdp and late and any(row.across for row in gathers):
        lines.append(
            f"weights are gathered across nodes: parallel.shard_size={per_node} gathers inside them"
        )
    if times.exposed > NOTABLE * times.step:
        helps = "a larger data.batch_size"
        if times.of("network") > times.of("node"):
            helps += ", fewer nodes, parallel.reduce_precision=bf16"
        elif parallel.reshard_after_forward:
            helps += ", parallel.reshard_after_forward=false"
        lines.append(f"{times.exposed / times.step:.0%} of a step waits for collectives: {helps}")
    room = found.memory < 0.6 * found.room
    if room and parallel.recompute_activations:
        lines.append("memory to spare: parallel.recompute_activations=false is quicker")
    if room and fsdp and parallel.reshard_after_forward and times.of("node") > 0.02 * times.step:
        lines.append("memory to spare: parallel.reshard_after_forward=false gathers weights once")
    replicas = fsdp and not found.walked.engine.startswith("fsdp 1 ")
    if not parallel.share_step and (replicas or parallel.engine == "ddp"):
        lines.append("replicas repeat the manifold step: parallel.share_step=true shares it")
    measured = found.images_per_core or found.recipe.model.image_size > 128  # as the photographs
    if measured and found.cores > data.workers * per_node:
        lines.append(
            f"the loader is too slow: {found.cores:.0f} cores of a node against data.workers="
            f"{data.workers} × {per_node}; `bench data` measures it"
        )
    if times.of("host") > NOTABLE * times.step:
        lines.append(
            f"the host's launches take {times.of('host') / times.step:.0%} of a step: a larger "
            "data.batch_size, fewer GPUs, parallel.compile=true"
        )
    waits = Counter(row.place for row in rows if row.kind == "wait")
    if waits:
        places = ", ".join(f"{place} ({count})" for place, count in waits.most_common(3))
        lines.append(f"the host waits {sum(waits.values())} times a step, at {places}")
    return lines


# --------------------------------------------------------------------------------------------------
# Variants of a configuration, for --compare: the first is itself.


def variants(walk: Walk, recipe: Recipe) -> dict[str, Walk]:
    parallel, optim, batch = recipe.parallel, recipe.optim, recipe.data.batch_size
    ranks, per_node = walk.ranks, walk.per_node
    flips = {
        "parallel.weight_layout": ("bank", "row"),
        "parallel.reshard_after_forward": (True, False),
        "parallel.recompute_activations": (False, True),
        "parallel.share_step": (True, False),
        "parallel.precision": ("bf16", "fp32"),
        "optim.parametrisation": ("product", "merged"),
    }
    settings: list[list[str]] = [[]]
    for key, values in flips.items():
        section, name = key.split(".")
        now = getattr(parallel if section == "parallel" else optim, name)
        (other,) = (value for value in values if value != now)
        settings.append([f"{key}={str(other).lower()}"])
        if other == "fp32":
            settings[-1] += ["parallel.reduce_precision=fp32"]
    if parallel.precision == "bf16" and parallel.reduce_precision == "fp32":
        settings.append(["parallel.reduce_precision=bf16"])
    if walk.nodes > 1:
        settings.append([f"parallel.shard_size={ranks}"])
    if ranks > 1:
        alone = ["parallel.weight_layout=bank", "parallel.shard_size=0"]
        settings.append(["parallel.engine=ddp", *alone])
        for stage in (2, 3):
            engine = ["parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
            settings.append([*engine, *alone])
    settings += [[f"data.batch_size={size}"] for size in (batch // 2, 2 * batch, 4 * batch)]
    found = {_name(more): _with(walk, more, walk.nodes) for more in settings}
    for nodes in sorted({1, 2 * walk.nodes, 4 * walk.nodes} - {walk.nodes}):
        found[f"{nodes} node(s) of {per_node}"] = _with(walk, [], nodes)
    return found


def _name(settings: list[str]) -> str:
    shown = [x for x in settings if not x.endswith(("weight_layout=bank", "shard_size=0"))]
    return ", ".join(x.split(".", 1)[1] for x in shown) or "as configured"


def _with(walk: Walk, more: list[str], nodes: int) -> Walk:
    """A key that is set again is set once."""
    keys = {setting.split("=")[0] for setting in more}
    kept = [setting for setting in walk.settings if setting.split("=")[0] not in keys]
    return replace(walk, settings=kept + more, nodes=nodes, what=CHAIN)
