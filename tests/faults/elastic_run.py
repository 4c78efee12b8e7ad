"""A small run of four processes that torchrun starts again whenever one fails, and its faults."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from distributed.launch_commands import ROOT, end, workers
from small_disk import fill

from lipnext_scale.checkpoint.directory import complete_checkpoints

# A fault costs some ten steps. Few records: checkpoints shall meet the full disk.
RANKS, STEPS, EVERY = 4, 200, 5
SETTINGS = f"""
data.train=builtin:digits/test-*.tar.gz data.test=builtin:digits/test-*.tar.gz
data.batch_size=72 data.workers=1 model.depth=2 model.width=16 model.image_size=8
model.patch_size=4 model.in_channels=1 parallel.engine=fsdp optim.epochs={STEPS // 5}
optim.warmup_epochs=1 optim.lookahead=3 loss.logit_scale=8 run.eval_every=0 run.summary=false
run.log_every=1000 run.checkpoint_every={EVERY} run.keep_checkpoints=3
""".split()
PATIENCE = 240  # seconds, for one thing to happen on a busy machine


class ElasticRun:
    """The launcher, started as often as need be; what it says goes to one log."""

    def __init__(self, directory: Path, log: Path, ranks: int = RANKS, *overrides: str) -> None:
        self.directory, self.log = directory, log
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--max-restarts", "100", "--nproc-per-node", str(ranks)]
        settings = [*SETTINGS, f"run.dir={directory}", *overrides]
        self.command = [*launcher, "-m", "slowed_train", *settings]
        self.ranks = ranks
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
                "OMP_NUM_THREADS": "1",
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
            },
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for_end(self) -> None:
        """By itself, and well."""
        assert self.process is not None
        assert self.process.wait(PATIENCE) == 0, self.said()[-3000:]

    def end(self) -> None:
        """Nothing is left of it."""
        if self.process is not None:
            end(self.process)

    def pids(self) -> dict[int, int]:
        assert self.process is not None
        return workers(self.process.pid)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def continued_at(self) -> list[int]:
        return [int(step) for step in re.findall(r"continuing \S+ from step (\d+)", self.said())]

    def newest(self) -> int:
        return max(complete_checkpoints(self.directory / "checkpoints"), default=0)

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        assert self.process is not None
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.said()[-3000:]}"
            time.sleep(0.05)

    def wait_for_progress(self) -> None:
        """A checkpoint that is newer than the newest now, on processes that are all there."""
        before = self.newest()
        self.wait_for(lambda: self.newest() > before, f"checkpoint after step {before}")
        self.wait_for(lambda: len(self.pids()) == self.ranks, "process of every rank")


class Chaos:
    """Faults of a seeded generator, done to a run one by one and written to its log."""

    def __init__(self, run: ElasticRun, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.done: list[str] = []
        self.expected: list[int] = []  # where the run had to continue, restart by restart

    def note(self, fault: str) -> None:
        self.done.append(fault)
        with self.run.log.open("a") as log:
            print(f"--- fault {len(self.done)}: {fault}", file=log)

    def kill_rank(self) -> None:
        rank, pid = self.random.choice(sorted(self.run.pids().items()))
        self._restart(f"kill -9 of rank {rank}", lambda: os.kill(pid, signal.SIGKILL))

    def kill_data_worker(self) -> None:
        rank, pid = self.random.choice(sorted(self.run.pids().items()))
        children = Path(f"/proc/{pid}/task/{pid}/children")
        self.run.wait_for(lambda: bool(children.read_text().split()), "data worker")
        worker = int(children.read_text().split()[0])
        self._restart(f"data worker of rank {rank}", lambda: os.kill(worker, signal.SIGKILL))

    def kill_and_tear(self) -> None:
        """Three faults: while the run is down its two newest checkpoints are damaged."""
        directory = self.run.directory / "checkpoints"
        self.run.wait_for(lambda: len(complete_checkpoints(directory)) >= 3, "third checkpoint")
        self.kill_rank()
        there = sorted(complete_checkpoints(directory).items())
        for _, path in there[-2:]:
            how = self.random.choice(["cut short", "flipped", "removed"])
            file = self.random.choice(sorted(path.iterdir()))
            tear(file, how)
            self.note(f"{path.name}/{file.name} {how}")
        self.expected[-1] = there[-3][0]

    def terminate(self) -> None:
        """SIGTERM to the launcher, and the same command again."""
        process = self.run.process
        assert process is not None
        self.note("SIGTERM to torchrun")
        process.terminate()
        process.wait(PATIENCE)
        self.expected.append(self.run.newest())
        self.run.start()

    def fill_disk(self) -> None:
        """Until a checkpoint could not be written; the run goes on, or is started again."""
        before = self.run.said().count("No space left on device")
        newest, restarts = self.run.newest(), len(self.run.continued_at())
        self.note("disk full")
        filler = self.run.directory / "filler"

        def complained() -> bool:
            fill(filler)  # again and again: an older checkpoint that goes leaves room for a new one
            return self.run.said().count("No space left on device") > before

        try:
            self.run.wait_for(complained, "complaint")
        finally:
            filler.unlink()
        self.run.wait_for_progress()
        further = self.run.continued_at()[restarts:]
        assert all(step >= newest for step in further)
        self.expected += further

    def _restart(self, fault: str, strike: Callable[[], None]) -> None:
        """Strike, and note the newest checkpoint once all old processes have gone."""
        before = set(self.run.pids().values())
        self.note(fault)
        strike()
        self.run.wait_for(lambda: not before & set(self.run.pids().values()), "end of all ranks")
        self.expected.append(self.run.newest())


def tear(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "removed":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
