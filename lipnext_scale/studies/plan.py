"""STUDY.yaml: rows of settings, and seeds; the runs that they mean."""

import json
import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from lipnext_scale.attacks import INSIDE, METHODS
from lipnext_scale.certification.certificate import whole_certificate
from lipnext_scale.certification.report import attack_in
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import DataSets
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.config import ConfigError, leaves
from lipnext_scale.utils.errors import UserError

# Settings that a study makes, by these keys of it.
OWN = {"run.dir": "dir", "run.seed": "seeds", "run.max_steps": "equal"}


@dataclass(frozen=True)
class Budget:
    """What every row gets, one of the three; none: as many epochs as its settings say."""

    steps: int = 0
    epochs: int = 0
    # Of training steps, by the time of a few that are measured before.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        given = {key: value for key, value in vars(self).items() if value}
        for key, value in given.items():
            if value < 0 or len(given) > 1:
                raise ConfigError(key, value, "must be positive, and the only key of equal")


@dataclass(frozen=True)
class Attack:
    """Of every certified run inside its radii, as the options of `attack`; samples 0: none."""

    samples: int = 0
    steps: int = 100
    restarts: int = 5

    def __post_init__(self) -> None:
        for key, least in {"samples": 0, "steps": 1, "restarts": 1}.items():
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"must be at least {least}")


@dataclass(frozen=True)
class Study:
    # As of train; `dir` holds all runs and the table.
    config: str
    dir: str
    # Key → value: of all rows.
    settings: dict[str, Any] = field(default_factory=dict)
    # Key → values: each combination is a row, or a row with each of `rows`.
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    # Name → settings.
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    equal: Budget = field(default_factory=Budget)
    attack: Attack = field(default_factory=Attack)
    # Of one run, on one machine; torchrun starts several.
    processes: int = 1
    # Options of sbatch for the job of one run.
    slurm: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len({*self.seeds}) < max(1, len(self.seeds)):
            raise ConfigError("seeds", list(self.seeds), "must be different numbers, such as [0]")
        if self.processes < 1:
            raise ConfigError("processes", self.processes, "must be at least 1")

    def points(self) -> dict[str, dict[str, Any]]:
        """Name → settings of each row."""
        found = {}
        for (name, own), values in product(
            (self.rows or {"": {}}).items(), product(*self.grid.values())
        ):
            point = dict(zip(self.grid, values, strict=True))
            words = [word for word in (str(name), described(point)) if word]
            found[", ".join(words) or "all"] = leaves(self.settings) | leaves(own) | point
        return found


class Task:
    """A run of a study. settings: arguments of train, but those that the study makes."""

    def __init__(self, study: Study, row: str, seed: int, settings: list[str]) -> None:
        self.study, self.row, self.seed, self.settings = study, row, seed, settings
        self.name = f"{row}, seed {seed}"
        words = row.replace("/", "-").replace(", ", ",").replace(" ", "_")
        self.directory = Path(study.dir) / words  # of the row
        self.run = RunDirectory(self.directory / f"seed_{seed}")
        self.log = self.run.path / "study.log"
        # The seconds of an epoch, for equal.seconds: those of the row's first run.
        self.timing = self.directory / "timing.json"

    def plain(self) -> Recipe:
        """What the row says itself."""
        return load_recipe(self.study.config, [*self.settings, f"run.dir={self.run.path}"])

    def epochs(self) -> int:
        """Of the schedule."""
        equal, recipe = self.study.equal, self.plain()
        if equal.seconds:
            seconds = json.loads(self.timing.read_bytes())["seconds_per_epoch"]
            return max(1, round(equal.seconds / seconds))
        if equal.steps:
            model = recipe.model
            data = DataSets(recipe.data, model.image_size, model.in_channels, model.num_classes)
            return math.ceil(equal.steps / data.training_loader(0).steps_per_epoch)
        return equal.epochs or recipe.optim.epochs

    def arguments(self) -> list[str]:
        """Of train; the warm-up keeps its share of the epochs."""
        epochs, optim = self.epochs(), self.plain().optim
        warmup = optim.warmup_epochs * epochs / optim.epochs
        own = [f"optim.epochs={epochs}", f"optim.warmup_epochs={warmup:g}"]
        own += [f"run.max_steps={self.study.equal.steps}"] if self.study.equal.steps else []
        return [*self.settings, *own, f"run.seed={self.seed}", f"run.dir={self.run.path}"]

    def is_finished(self) -> bool:
        """Certified and attacked as the study wants it; a run with other settings is refused."""
        if not self.run.config.exists() or (self.study.equal.seconds and not self.timing.exists()):
            return False
        recipe = load_recipe(self.study.config, self.arguments())
        self.run.require_new_or_same(recipe)
        same = self.run.recipe().run.max_steps == recipe.run.max_steps
        return same and self.run.certificate.exists() and self.is_attacked()

    def is_attacked(self) -> bool:
        """As the study wants it, and without a violation, which fails each time it is asked for."""
        asked = self.study.attack
        if not asked.samples:
            return True
        stored = whole_certificate(self.run)
        found = (stored and attack_in(self.run, stored[0])) or {}
        wanted = {
            "attacked": asked.samples,
            "steps": asked.steps,
            "restarts": asked.restarts,
            "methods": [*METHODS],
            "inside": INSIDE,
            "violations": [],
        }
        return all(found.get(key) == value for key, value in wanted.items())


def load_tasks(path: str, overrides: list[str]) -> list[Task]:
    """Rows are checked against the configuration. All come with one seed, then with the next."""
    study = configuration.load(Study, path, overrides)
    tasks = []
    for seed, (row, settings) in product(study.seeds, study.points().items()):
        task = Task(study, row, seed, [f"{key}={text(v)}" for key, v in settings.items()])
        try:
            for key in OWN.keys() & settings.keys():
                raise ConfigError(key, settings[key], f"is made by the study's `{OWN[key]}`")
            task.plain()
        except ConfigError as error:
            raise UserError(f"{path}: {row}: {error}") from None
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: has no rows: a list of `grid` is empty")
    return tasks


def described(settings: dict[str, Any]) -> str:
    """lr=0.01, width=64: keys without their section, where no two are the same."""
    lasts = [key.rpartition(".")[2] for key in settings]
    keys = lasts if len({*lasts}) == len(lasts) else list(settings)
    return ", ".join(f"{key}={text(v)}" for key, v in zip(keys, settings.values(), strict=True))


def text(value: Any) -> str:
    """As in an argument."""
    return value if isinstance(value, str) else json.dumps(value)
