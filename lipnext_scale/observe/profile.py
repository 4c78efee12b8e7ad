"""A trace of chosen steps (run.profile_steps): the time of every operator in them.

    RUN/profile/steps-000010-000012.rank-0.json.gz   for chrome://tracing or https://ui.perfetto.dev
    RUN/profile/steps-000010-000012.rank-0.txt       the operators that took longest

A run that continues inside the window traces the rest of it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lipnext_scale.config.recipe import RunConfig
from lipnext_scale.utils.config import ConfigError

ROWS = 30  # of the table


class ProfileWindow:
    """Called before and after every step; `say` prints where the trace is, or why there is none."""

    def __init__(
        self,
        run: RunConfig,
        directory: Path,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        first, end = run.profile_steps
        self._steps = range(first, end if rank in run.profile_ranks else first)
        self._directory = Path(run.profile_dir) if run.profile_dir else directory
        self._rank, self._device, self._say = rank, device.type, say
        self._profiler: profile | None = None
        self._traced: list[int] = []

    def begin(self, step: int) -> None:
        """Before the step of this number, the first of which is 1."""
        if step not in self._steps:
            return
        if self._profiler is None:
            kinds = {ProfilerActivity.CPU, getattr(ProfilerActivity, self._device.upper())}
            self._profiler = profile(activities=kinds, acc_events=True)
            self._profiler.start()
        self._traced.append(step)

    def end(self, step: int) -> None:
        if self._profiler is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace, also where the run ends before the window does."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        first, last = self._traced[0], self._traced[-1]
        stem = f"{self._directory}/steps-{first:06d}-{last:06d}.rank-{self._rank}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{stem}.json.gz")
            order = f"self_{self._device}_time_total"
            table = profiler.key_averages().table(sort_by=order, row_limit=ROWS)
            Path(f"{stem}.txt").write_text(table, encoding="utf-8")
        except (OSError, RuntimeError) as error:  # not worth the run
            self._say(f"{stem}: the profile was not written: {error}")
        else:
            self._say(f"profile of steps {first} to {last}: {self._directory}")


def require_reachable_window(run: RunConfig, last_step: int, world_size: int) -> None:
    """Refuse a window that no step or rank of this run is in."""
    first, _ = run.profile_steps
    if first > last_step:
        right = f"must begin by step {last_step}, where the run ends"
        raise ConfigError("run.profile_steps", list(run.profile_steps), right)
    if first and max(run.profile_ranks) >= world_size:
        right = f"must be below {world_size}, the number of processes"
        raise ConfigError("run.profile_ranks", list(run.profile_ranks), right)
