"""A run as its directory tells it while it goes on: what a watcher has to know."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from lipnext_scale.checkpoint.directory import complete_checkpoints
from lipnext_scale.errors import UserError
from lipnext_scale.metrics import parse_record
from lipnext_scale.observe.console import duration
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


# --------------------------------------------------------------------------------------------------
# Runs as text for a terminal: a panel each, side by side where there is room.

BLOCKS = "▁▂▃▄▅▆▇█"
NARROWEST = 58  # columns of a panel
WIDEST = 110
GAP = "   "
# ANSI colours by meaning; a panel without colour has none of them.
STYLES = {"bold": "1", "good": "32", "bad": "31", "dim": "2", "curve": "36"}
CURVES = {  # name → (tags of which the first that is there is shown, how its value is written)
    "loss": (("train/loss",), "{:.4f}"),
    "accuracy": (("train/accuracy",), "{:.1%}"),
    "test clean": (("test/clean_accuracy", "watch/clean_accuracy"), "{:.2%}"),
    "test CRA": (("test/nominal_cra", "watch/nominal_cra"), "{:.2%}"),
    "grad norm": (("train/gradient_norm",), "{:.3g}"),
    "drift": (("drift/largest",), "{:.1e}"),
    "images/s": (("images_per_second",), "{:,.0f}"),
}


class Pen:
    """Writes words in a style, or plainly."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, style: str, words: str) -> str:
        return f"\x1b[{STYLES[style]}m{words}\x1b[0m" if self._colour and words else words


def render(runs: Sequence[FollowedRun], width: int, colour: bool) -> list[str]:
    """Lines of at most `width` columns."""
    beside = max(1, min(len(runs), (width + len(GAP)) // (NARROWEST + len(GAP))))
    column = min(WIDEST, (width - (beside - 1) * len(GAP)) // beside)
    panels = [panel(run, column, Pen(colour)) for run in runs]
    lines: list[str] = []
    for start in range(0, len(panels), beside):
        row = panels[start : start + beside]
        lines += [""] if lines else []
        lines += [
            GAP.join(padded(cell, column) for cell in cells).rstrip()
            for cells in zip_longest(*row, fillvalue="")
        ]
    return lines


def panel(run: FollowedRun, width: int, pen: Pen) -> list[str]:
    title, state = str(run.directory.path), _state(run)
    room = max(8, width - len(state[1]) - 2)
    if len(title) > room:
        title = "…" + title[1 - room :]
    space = " " * max(2, width - len(title) - len(state[1]))
    lines = [pen("bold", title) + space + pen(*state)]
    if not run.curves:
        return [_cut(line, width) for line in [*lines, "nothing recorded yet", _checkpoint(run)]]
    lines += [_progress(run, width, pen), *_curves(run, width, pen), _settings(run)]
    lines += [_costs(run), _checkpoint(run)]
    return [_cut(line, width) for line in lines]


def _state(run: FollowedRun) -> tuple[str, str]:
    """(style, whether the run seems alive)."""
    age = run.age()
    if run.finished:
        return "good", "finished"
    if age is None:
        return "dim", "waiting for the first record"
    if age <= run.patience():
        return "good", f"running, told {duration(age)} ago"
    return "bad", f"silent for {duration(age)}: stopped?"


def _progress(run: FollowedRun, width: int, pen: Pen) -> str:
    step, total, epochs = run.step, run.total_steps, run.recipe.optim.epochs
    if total is None:
        return f"step {step}"
    share = min(1.0, step / total)
    to_go = run.seconds_to_go
    eta = "" if run.finished or to_go is None else f"  ETA {duration(to_go)}"
    epoch = min(epochs, max(1, math.ceil(run.latest["train/epoch"] - 1e-9)))
    after = f" {share:4.0%}  epoch {epoch}/{epochs}  step {step:,}/{total:,}{eta}"
    room = max(4, width - len(after))
    full = round(share * room)
    return pen("curve", "█" * full) + pen("dim", "░" * (room - full)) + after


def _curves(run: FollowedRun, width: int, pen: Pen) -> list[str]:
    lines = []
    for name, (tags, form) in CURVES.items():
        tag = next((tag for tag in tags if tag in run.curves), None)
        if tag is None:
            continue
        curve = run.curves[tag]
        value = form.format(curve.values[-1])
        after = f" at {curve.steps[-1]:,}" if tag.startswith(("test/", "watch/")) else ""
        after += " (subset)" if tag.startswith("watch/") else ""
        room = max(4, width - 10 - 9 - 2 - len(after))
        lines.append(f"{name:<10}{value:>9}  {pen('curve', sparkline(curve, room))}{after}")
    return lines


def _settings(run: FollowedRun) -> str:
    told, words = run.latest, []
    for tag, form in (("train/lr", "lr {:.2e}"), ("train/epsilon", "ε {:.3f}")):
        if tag in told:
            words.append(form.format(told[tag]))
    if "move/largest" in told:
        words.append(f"‖Δ‖ {told['move/largest']:.1e}")
    drifts = {tag: told[tag] for tag in told if tag.startswith("drift/block_")}
    if drifts:
        worst = max(drifts, key=lambda tag: drifts[tag])
        words.append(f"most drift in block {int(worst.rpartition('_')[2])}")
    return "  ".join(words)


def _costs(run: FollowedRun) -> str:
    told, words = run.latest, []
    if "mfu" in told:
        words.append(f"MFU {told['mfu']:.1%}")
    if "data/wait_share" in told:
        words.append(f"data wait {told['data/wait_share']:.0%}")
    for tag, name in (
        ("memory/gpu_allocated_gb", "GPU peak {:.1f} GB"),
        ("memory/resident_gb", "resident {:.1f} GB"),
        ("data/bad_samples", "{:.0f} bad samples"),
    ):
        if tag in told:
            words.append(name.format(told[tag]))
    return "  ".join(words)


def _checkpoint(run: FollowedRun) -> str:
    found = run.checkpoint()
    if found is None:
        return "no checkpoint yet"
    return f"checkpoint of step {found[0]:,}, {duration(found[1])} ago"


def sparkline(curve: Curve, width: int) -> str:
    """The curve over its steps in at most `width` blocks, from its least to its largest number."""
    columns = min(width, len(curve.values))
    means = []
    for index in range(columns):
        start = index * len(curve.values) // columns
        stop = (index + 1) * len(curve.values) // columns
        finite = [value for value in curve.values[start:stop] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "?" * columns
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        BLOCKS[round((mean - low) * scale)] if math.isfinite(mean) else "?" for mean in means
    )


def visible_length(text: str) -> int:
    """Columns on the screen: those of escape sequences do not count."""
    return sum(
        len(part.partition("m")[2]) if i else len(part) for i, part in enumerate(_split(text))
    )


def _split(text: str) -> list[str]:
    return text.split("\x1b[")


def _cut(text: str, width: int) -> str:
    """At most `width` columns, with the styles closed."""
    if visible_length(text) <= width:
        return text
    kept, left = "", width
    for index, part in enumerate(_split(text)):
        code, _, words = part.partition("m") if index else ("", "", part)
        kept += (f"\x1b[{code}m" if index else "") + words[:left]
        left -= min(left, len(words))
    return kept


def padded(text: str, width: int) -> str:
    return text + " " * max(0, width - visible_length(text))
