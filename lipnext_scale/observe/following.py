"""A run as its directory tells it while it goes on: what a watcher has to know."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lipnext_scale.checkpoint.directory import complete_checkpoints
from lipnext_scale.errors import UserError
from lipnext_scale.metrics import parse_record
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory

QUIET_AFTER = 60.0  # seconds without a word that are nothing yet
QUIET_INTERVALS = 4  # and so many of its usual intervals
KEPT = 4000  # numbers of a curve: of a longer one every second is dropped


@dataclass
class Curve:
    """One scalar by step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > KEPT:
            self.steps, self.values = self.steps[1::2], self.values[1::2]


class FollowedRun:
    """metrics.jsonl is read on from where it was read last; a torn last line waits."""

    def __init__(self, path: str | Path) -> None:
        self.directory = RunDirectory(path)
        self.recipe: Recipe = self.directory.recipe()  # refuses what is no run
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None
        self._position, self._torn = 0, b""
        self.curves: dict[str, Curve] = {}
        self.latest: dict[str, float] = {}
        self._logged: list[tuple[int, float]] = []  # (step, seconds) of the newest log records

    def refresh(self) -> None:
        """Take up what was written since."""
        try:
            with self.directory.metrics.open("rb") as file:
                self._start_over_if_other(file.fileno())
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            self._forget()  # it has not begun
            return
        except OSError as error:
            raise UserError(f"{self.directory.metrics}: cannot be read: {error.strerror}") from None
        self._position += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        for line in lines:
            record = parse_record(line.decode("utf-8", errors="replace"))
            if record is not None:
                self._add(record)

    def _start_over_if_other(self, descriptor: int) -> None:
        """A run that continues writes the file anew, without what lay beyond its checkpoint."""
        status = os.fstat(descriptor)
        same = self._file == (status.st_dev, status.st_ino) and status.st_size >= self._position
        if not same:
            self._forget()
            self._file = status.st_dev, status.st_ino

    def _add(self, record: dict[str, Any]) -> None:
        step = record.pop("step")
        seconds = record.pop("seconds", None)
        for name, value in record.items():
            if isinstance(value, int | float):
                self.curves.setdefault(name, Curve()).add(step, float(value))
                self.latest[name] = float(value)
        if "train/loss" in record and isinstance(seconds, int | float):
            if self._logged and seconds < self._logged[-1][1]:  # another process counts anew
                self._logged.clear()
            self._logged = [*self._logged[-15:], (step, float(seconds))]

    @property
    def step(self) -> int:
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """As the steps of an epoch follow from what was recorded."""
        epochs = self.curves.get("train/epoch")
        if epochs is None or not epochs.values[-1]:
            return None
        total = round(self.recipe.optim.epochs * epochs.steps[-1] / epochs.values[-1])
        return min(total, self.recipe.run.max_steps or total)

    @property
    def seconds_per_step(self) -> float | None:
        """Evaluations and all, over the newest records."""
        if len(self._logged) < 2 or self._logged[-1][0] == self._logged[0][0]:
            return None
        (first, began), (last, ended) = self._logged[0], self._logged[-1]
        return (ended - began) / (last - first)

    @property
    def seconds_to_go(self) -> float | None:
        total, pace = self.total_steps, self.seconds_per_step
        return None if total is None or pace is None else (total - self.step) * pace

    @property
    def finished(self) -> bool:
        """A stop between two records leaves none of its own, but a checkpoint."""
        checkpoint = self.checkpoint()
        step = max(self.step, checkpoint[0] if checkpoint else 0)
        return self.total_steps is not None and step >= self.total_steps

    def age(self) -> float | None:
        """Seconds since the last record; None where there is none."""
        try:
            return time.time() - self.directory.metrics.stat().st_mtime if self.curves else None
        except OSError:
            return None

    def patience(self) -> float:
        """How long a run that is well may be silent."""
        gaps = [b[1] - a[1] for a, b in zip(self._logged, self._logged[1:], strict=False)]
        return max(QUIET_AFTER, QUIET_INTERVALS * median(gaps) if gaps else 0.0)

    def checkpoint(self) -> tuple[int, float] | None:
        """(step, age in seconds) of the newest complete one."""
        try:
            found = complete_checkpoints(self.directory.checkpoints)
            return max((s, time.time() - path.stat().st_mtime) for s, path in found.items())
        except (OSError, ValueError):  # there is none, or it has just been removed for a newer one
            return None
