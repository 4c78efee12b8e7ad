"""All that a run records and prints; the trainer calls it at each event of a step.

It changes nothing that is trained, and cannot end a run: what cannot be written is printed.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import DataSets, StreamLoader
from lipnext_scale.distributed import Engine
from lipnext_scale.observe.block_stats import BlockStats
from lipnext_scale.observe.console import Pace, console_line, process_memory, score_line
from lipnext_scale.observe.evaluation import Evaluation
from lipnext_scale.observe.metrics import Metrics, open_wandb
from lipnext_scale.observe.profile import ProfileWindow
from lipnext_scale.optim import Optimizers
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.errors import UserError
from lipnext_scale.utils.files import os_error_in_words
from lipnext_scale.utils.progress import Progress

LOST = 4
Values = dict[str, float | Tensor]


class Observer:
    """One for each rank; rank 0 writes and prints.

    last_step: where this process stops, before or at the total_steps of the schedule.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        engine: Engine,
        optimizers: Optimizers,
        data: DataSets,
        loader: StreamLoader,
        last_step: int,
        total_steps: int,
    ) -> None:
        self._recipe, self._run, self._directory = recipe, recipe.run, directory
        self._processes, self._loader = engine.processes, loader
        self._last_step, self._total_steps = last_step, total_steps
        self._is_rank0 = engine.processes.rank == 0
        self._metrics: Metrics | None = None
        self._wandb: Any = None
        self.evaluation = Evaluation(engine, optimizers, data, recipe)
        self._blocks = BlockStats(engine, optimizers)
        self._by_block = False  # in this step
        self._lost = 0  # lines in a row

    def open(self, step: int) -> None:
        """All ranks together, before the first step of this process, which follows `step`."""
        rank, device = self._processes.rank, self._processes.device
        self._processes.on_rank0(lambda: self._open_metrics(step))
        self._progress = Progress(self._last_step, step, title="train", silent=not self._is_rank0)
        self._pace = Pace(self._recipe, device, self._processes.world_size, step)
        say = self.say if self._is_rank0 else print
        self._profile = ProfileWindow(self._run, self._directory.profile, rank, device, say)

    def _open_metrics(self, step: int) -> None:
        try:
            self._metrics = Metrics(self._directory, step, configuration.dump(self._recipe))
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
        if self._run.wandb:
            self._wandb = open_wandb(self._directory, self._recipe)

    def say(self, line: str) -> None:
        """Above the bar, or as a line of the log; on rank 0 only."""
        self._progress.say(line)

    def finish(self) -> None:
        """The training is complete: a picture that cannot be drawn does not fail it."""
        if not self._is_rank0 or not self._run.summary:
            return
        try:
            from lipnext_scale.observe.picture import draw_summary  # matplotlib is slow to import

            draw_summary(self._directory, self._directory.summary)
        except Exception as error:  # matplotlib may raise any
            known = isinstance(error, UserError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self.say(f"{self._directory.summary}: the summary was not drawn: {reason}")

    def close(self) -> None:
        self._profile.close()
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close()
        failed = sys.exc_info()[0] is not None
        self._to_wandb(lambda run: run.finish(exit_code=int(failed)))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step of this number, the first of which is 1."""
        self._by_block = self._run.per_depth and self._is_logged(number)
        self._profile.begin(number)
        yield
        self._profile.end(number)
        self._progress.advance()

    def gradients_made(self) -> None:
        """The gradients are complete, and not yet clipped."""
        if self._by_block:
            self._blocks.note_gradients()

    def weights_moved(self, updates: int) -> None:
        """Before a retraction. updates: the number of this step's update, 0 if there was none."""
        if self._by_block:
            self._blocks.note_matrices(updates)

    def prints_after(self, number: int) -> bool:
        """Whether `after_step` prints a line: at each log interval, and where the process stops."""
        return self._is_logged(number) or number == self._last_step

    def after_step(self, number: int, values: Values) -> None:
        """The record and line of a log interval, the scores of the subset; all ranks together."""
        record: dict[str, float] = {}
        if self.prints_after(number):
            interval = self._interval(number, values)
            if self._is_logged(number):  # a stop in between leaves no trace in the metrics
                record = interval
            if self._by_block:
                record |= self._blocks.gather()
        every = self._run.watch_every if self._run.watch_samples else 0
        if every and number % every == 0:
            with self._pace.paused():
                scores = self.evaluation.of_subset()
            self.say(score_line(scores))
            record |= scores
        self._write(number, record)

    def evaluate(self, number: int) -> None:
        """Scores of the full test set; all ranks together."""
        with self._pace.paused():
            scores = self.evaluation.of_test_set()
        self._write(number, scores)
        self.say(score_line(scores))

    def _interval(self, number: int, values: Values) -> dict[str, float]:
        """The figures of the steps since the last line, which are printed."""
        record = {name: float(value) for name, value in values.items()}
        record["train/epoch"] = number / self._loader.steps_per_epoch
        record |= self._pace.take(number) | self._loader.stats.take()
        record |= process_memory(self._processes.device)
        to_go = self._pace.seconds_to(self._last_step, number)
        epochs = self._recipe.optim.epochs
        self.say(console_line(record, epochs, number, self._total_steps, to_go))
        self._warn_if_lost(number, record)
        return record

    def _warn_if_lost(self, number: int, record: dict[str, float]) -> None:
        """Once, after LOST lines in a row that are no better than a guess, the warm-up past."""
        optim, classes = self._recipe.optim, self._recipe.model.num_classes
        guess = 1 / classes + 2 * math.sqrt(1 / classes / self._recipe.data.batch_size)  # at most
        lost = record["train/accuracy"] < guess and record["train/loss"] > math.log(classes)
        if record["train/epoch"] > max(1, optim.warmup_epochs) and self._lost < LOST:
            self._lost = self._lost + 1 if lost else 0
            if self._lost == LOST:
                what = "loss and accuracy are those of a guess"
                key = "lr" if self._recipe.model.layer == "manifold" else "euclidean_lr"
                lr = f"optim.{key} = {getattr(optim, key):g}"
                self.say(f"warning: step {number}: {what}: is {lr} too high?")

    def _write(self, number: int, values: dict[str, float]) -> None:
        """On rank 0. What fails is opened again at the next record, which drops a torn line."""
        if not values or not self._is_rank0:
            return
        try:
            if self._metrics is None:
                self._metrics = Metrics(self._directory, number - 1)
            self._metrics.write(number, values)
        except OSError as error:
            why = os_error_in_words(error, self._directory.path)
            self.say(f"warning: the metrics of step {number} are not written: {why}")
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
        self._to_wandb(lambda run: run.log(values, step=number))

    def _to_wandb(self, action: Callable[[Any], None]) -> None:
        try:
            if self._wandb is not None:
                action(self._wandb)
        except Exception as error:  # of its own process, which may have died
            self._wandb = None
            self.say(f"warning: Weights & Biases gets no more of this run: {error!r}")

    def _is_logged(self, number: int) -> bool:
        return number % self._run.log_every == 0 or number == self._total_steps
