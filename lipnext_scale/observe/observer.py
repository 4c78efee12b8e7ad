"""All that a run tells of itself, and when; the trainer only says what happens.

    step            around a step: it may be profiled
    gradients_made  the gradients are there, and not yet clipped
    weights_moved   the step is taken, and not yet retracted
    after_step      the interval's record and line, the watched subset
    evaluate        scores of the whole test set
    finish          the summary picture
    close           files are closed, also where an error ends the run

Nothing here changes what is trained: weights are read, or exchanged with the slow ones and back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lipnext_scale import config as configuration
from lipnext_scale.data import DataSets, StreamLoader
from lipnext_scale.data.loader import BadSamples
from lipnext_scale.errors import UserError
from lipnext_scale.metrics import Metrics
from lipnext_scale.observe.console import Pace, console_line, process_memory, score_line
from lipnext_scale.observe.profiling import ProfileWindow, require_reachable_window
from lipnext_scale.observe.scores import Scores
from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel import Engine
from lipnext_scale.parallel.per_depth import BlockStats
from lipnext_scale.progress import Progress
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory

Values = dict[str, float | Tensor]


class Observer:
    """One for each process; the first one writes and speaks for all."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        optimizers: Optimizers,
        data: DataSets,
        loader: StreamLoader,
        step: int,
    ) -> None:
        self.recipe, self._run, self._engine = recipe, recipe.run, engine
        self._optimizers, self._loader, self._processes = optimizers, loader, engine.processes
        self._started_at = step
        self.total_steps = recipe.optim.epochs * loader.steps_per_epoch
        self.last_step = min(self.total_steps, self._run.max_steps or self.total_steps)
        require_reachable_window(self._run, self.last_step, self._processes.world_size)
        self.scores = Scores(engine, optimizers, data, recipe.loss.epsilon)
        self._depth = BlockStats(engine, optimizers)
        self._by_depth = False  # in this step
        self._metrics: Metrics | None = None

    # The whole run

    def open(self, directory: RunDirectory) -> None:
        """All ranks together, before the first step."""
        self._directory, first = directory, self._processes.rank == 0
        self._metrics = self._open_metrics()
        self._bad_samples = BadSamples(
            self.recipe.data.bad_sample_limit, directory.bad_samples, writes=first
        )
        self._progress = Progress(self.last_step, self._started_at, title="train", silent=not first)
        self._pace = Pace(
            self.recipe, self._processes.device, self._processes.world_size, self._started_at
        )
        self._profile = ProfileWindow(
            self._run,
            directory.profile,
            self._processes.rank,
            self._processes.device,
            self._progress.say if first else print,
        )

    def _open_metrics(self) -> Metrics | None:
        """The first rank's; the others have none."""

        def open_on_first() -> None:
            path, events = self._directory.metrics, self._directory.tensorboard
            told = configuration.dump(self.recipe)
            try:
                opened.append(Metrics(path, events, self._started_at, told))
            except OSError as error:
                raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None

        opened: list[Metrics] = []
        self._processes.on_rank0(open_on_first)
        return opened[0] if opened else None

    def say(self, line: str) -> None:
        """Above the bar, or as a line of the log; the first rank's alone."""
        self._progress.say(line)

    def finish(self) -> None:
        """The training has come to its end."""
        if self._metrics is not None and self._run.summary:
            # Not at the top: importing matplotlib takes longer than many a test's run.
            from lipnext_scale.observe.picture import draw_summary_or_say

            draw_summary_or_say(self._directory, self._directory.summary, self._progress.say)

    def close(self) -> None:
        self._profile.close()
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close()

    # A step

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the step of this number, the first of which is 1."""
        self._by_depth = self._run.per_depth and self._is_logged(number)
        self._profile.begin(number)
        yield
        self._profile.end(number)
        self._progress.advance()

    def gradients_made(self) -> None:
        """They are whole, and not clipped."""
        if self._by_depth:
            self._depth.note_gradients()

    def weights_moved(self, updates: int) -> None:
        """They are as this step left them, by the update of that number, 0 if there was none; an
        epoch's retraction comes after."""
        if self._by_depth:
            self._depth.note_matrices(updates)

    def after_step(self, number: int, values: Values) -> None:
        """Tell what there is to tell; all ranks together."""
        told: dict[str, float] = {}
        if self._is_logged(number):
            told = self._interval(number, values)
            if self._by_depth:
                told |= self._depth.gather().as_metrics()
        elif number == self.last_step:  # a stop in between leaves no trace in the metrics
            self._interval(number, values)
        if self._is_watched(number):
            with self._pace.paused():
                scores = self.scores.of_subset(self._run.watch_samples)
            self._progress.say(score_line(scores))
            told |= scores
        self._write(number, told)

    def evaluate(self, number: int) -> None:
        """Tell the scores of the whole test set; all ranks together."""
        with self._pace.paused():
            scores = self.scores.of_test_set()
        self._write(number, scores)
        self._progress.say(score_line(scores))

    def _interval(self, number: int, values: Values) -> dict[str, float]:
        """What the steps since the last line were like; it is said."""
        told = {name: float(value) for name, value in values.items()}
        told["train/epoch"] = number / self._loader.steps_per_epoch
        told |= self._pace.take(number) | self._loader.stats.take()
        told |= process_memory(self._processes.device)
        self.tell_bad_samples(told)
        to_go = self._pace.seconds_to(self.last_step, number)
        epochs = self.recipe.optim.epochs
        self._progress.say(console_line(told, epochs, number, self.total_steps, to_go))
        return told

    def tell_bad_samples(self, told: dict[str, float]) -> None:
        """Name those of all ranks that had to be replaced since the last time."""
        if self.recipe.data.on_bad_sample != "substitute":
            return
        reports = self._processes.gather_objects(self._loader.stats.take_bad())
        for line in self._bad_samples.add([bad for of_rank in reports for bad in of_rank]):
            self._progress.say(line)
        told["data/bad_samples"] = len(self._bad_samples)

    def _write(self, number: int, values: dict[str, float]) -> None:
        if values and self._metrics is not None:
            self._metrics.write(number, values)

    # When

    def _is_logged(self, number: int) -> bool:
        return number % self._run.log_every == 0 or number == self.total_steps

    def _is_watched(self, number: int) -> bool:
        every = self._run.watch_every if self._run.watch_samples else 0
        return bool(every) and number % every == 0
