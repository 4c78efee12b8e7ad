"""A trace of chosen steps (run.profile_steps): what every operator of them took.

    RUN/profile/steps-000010-000012.rank-0.json.gz   for chrome://tracing or https://ui.perfetto.dev
    RUN/profile/steps-000010-000012.rank-0.txt       the operators that took longest

A run that continues inside the window traces the steps that are left; one that continues after it
has nothing to trace.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lipnext_scale.config import ConfigError
from lipnext_scale.recipe import RunConfig

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
        self._rank, self._on_gpu, self._say = rank, device.type == "cuda", say
        self._profiler: profile | None = None
        self._traced: list[int] = []

    def begin(self, step: int) -> None:
        """Before the step of this number, the first of which is 1."""
        if step not in self._steps:
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if self._on_gpu:
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, acc_events=True)
            self._profiler.start()
        self._traced.append(step)

    def end(self, step: int) -> None:
        if self._profiler is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write what has been traced: also where the run ends before the window does."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"steps-{self._traced[0]:06d}-{self._traced[-1]:06d}.rank-{self._rank}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(profiler, self._directory / name)
        except (OSError, RuntimeError) as error:  # a picture of a run is not worth the run
            self._say(f"{self._directory / name}: the profile was not written: {error}")
            return
        self._say(f"profile of steps {self._traced[0]} to {self._traced[-1]}: {self._directory}")

    def _write(self, profiler: profile, stem: Path) -> None:
        trace = stem.with_name(stem.name + ".json.gz")
        aside = stem.with_name(stem.name + ".partial.json.gz")  # torch goes by the ending
        profiler.export_chrome_trace(str(aside))
        aside.replace(trace)
        order = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS)
        stem.with_name(stem.name + ".txt").write_text(table, encoding="utf-8")


def require_reachable_window(run: RunConfig, last_step: int, world_size: int) -> None:
    """A trace that nobody would make is a mistake to be told at the start."""
    first, _ = run.profile_steps
    if first > last_step:
        right = f"must begin by step {last_step}, where the run ends"
        raise ConfigError("run.profile_steps", list(run.profile_steps), right)
    if first and max(run.profile_ranks) >= world_size:
        right = f"must be below {world_size}, the number of processes"
        raise ConfigError("run.profile_ranks", list(run.profile_ranks), right)
