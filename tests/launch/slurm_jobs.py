"""A small run as a job of a cluster."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from launched_runs import ROOT, SETTINGS, VARIABLES
from slurm_cluster import SlurmCluster, wait_until

from lipnext_scale.data.catalog import BUILTIN


class Job:
    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        script: str,
        *overrides: str,
        log: str,
        flags: tuple[str, ...] = (),
        cwd: Path = ROOT,
        **variables: str,
    ) -> None:
        """Submitted from cwd, with sbatch's flags and what else is in its environment.

        directory: of runs and logs, with the shards on what would be a shared file system.
        """
        self.cluster, self.log = cluster, directory / f"{log}.log"
        shards = directory / "train.tar.gz"
        if not shards.exists():
            shutil.copy(BUILTIN / "digits" / "test-000000.tar.gz", shards)
        settings = [*SETTINGS, f"data.train={shards}", *overrides]
        self.number = cluster.submit(
            f"--output={self.log}", *flags, script, *settings, cwd=cwd, **VARIABLES | variables
        )

    def end(self) -> tuple[str, str]:
        """(state, exit code)."""
        state = self.cluster.wait_for_end(self.number)
        return state, self.cluster.told(self.number, "ExitCode")

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """That must happen while the job is there; Slurm is not asked as often as files are."""
        looks = count(1)

        def happened_or_ended() -> bool:
            return happened() or (next(looks) % 20 == 0 and self.cluster.has_ended(self.number))

        wait_until(happened_or_ended, what, self.report)
        assert happened(), f"the job ended before {what}\n{self.report()}"

    def report(self) -> str:
        return f"{self.said()}\n{self.cluster.report(self.number)}"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""
