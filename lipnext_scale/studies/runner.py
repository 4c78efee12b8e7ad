"""The runs of a study as processes: so many at a time on this machine, or jobs of a Slurm array."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIGUSR1
from statistics import median
from threading import Lock

import torch

from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.studies.plan import Study, Task
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.utils.errors import RunFailed, Stopped, UserError
from lipnext_scale.utils.files import write_atomically

# A few steps at the full learning rate, whose exponentials take the longest.
TIMED = """run.max_steps=20 run.log_every=5 run.eval_every=0 run.watch_every=0 run.summary=false
run.checkpoint_every=0 run.per_depth=false run.wandb="" optim.epochs=20 optim.warmup_epochs=0"""


def run_tasks(
    tasks: list[Task], jobs: int, request: StopRequest, report: Callable[[Task, str], None]
) -> None:
    """Train and certify each. report: called when one has ended, with why it failed, if it did."""
    children = Children(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(children.work, task): task for task in tasks}
        try:
            while futures and not request.signal:
                for future in wait(futures, 0.2, FIRST_COMPLETED).done:
                    report(futures.pop(future), future.result())
        finally:
            # After a signal or a bug, some are left.
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()
    if request.signal == SIGUSR1 and (array := os.environ.get("SLURM_ARRAY_JOB_ID")):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        subprocess.run(["scontrol", "requeue", job], check=True)
    if request.signal:
        raise Stopped(request.signal, f"{request.signal.name}: the same command continues")


class Children:
    """All processes; each has its share of the machine."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._slots = jobs, SimpleQueue[int]()
        for slot in range(jobs):
            self._slots.put(slot)
        self._lock, self._ending = Lock(), False
        self._alive: set[subprocess.Popen[bytes]] = set()

    def work(self, task: Task) -> str:
        """Why it failed, if it did."""
        slot = self._slots.get()
        config = ["--config", task.study.config]
        try:
            task.run.path.mkdir(parents=True, exist_ok=True)
            if task.study.equal.seconds and not task.timing.exists():
                self._measure(task, slot, config)
            self._call(task, slot, "train", *config, *task.arguments())
            self._call(task, slot, "certify", "--model", str(task.run.path))
        except (RunFailed, UserError, OSError) as error:
            return str(error)
        finally:
            self._slots.put(slot)
        return ""

    def _measure(self, task: Task, slot: int, config: list[str]) -> None:
        """Seconds of an epoch by the median interval, without the first. Two may do so at once."""
        run = RunDirectory(task.directory / f"timing_{task.seed}")
        shutil.rmtree(run.path, ignore_errors=True)
        where = f"run.dir={run.path}"
        self._call(task, slot, "train", *config, *task.settings, *TIMED.split(), where)
        _, *records = [r for r in read_records(run.metrics) if "images_per_second" in r]
        rate = median(record["images_per_second"] for record in records)
        images = run.recipe().data.batch_size * records[-1]["step"] / records[-1]["train/epoch"]
        facts = {"images_per_second": rate, "seconds_per_epoch": images / rate}
        own = run.path / task.timing.name
        write_atomically(own, json.dumps(facts).encode())
        with suppress(FileExistsError):  # the first counts
            os.link(own, task.timing)
        shutil.rmtree(run.path)

    def _call(self, task: Task, slot: int, command: str, *arguments: str) -> None:
        words = [sys.executable, "-m", f"lipnext_scale.{command}", *arguments]
        if task.study.processes > 1:
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
            words[2:2] = [*torchrun, str(task.study.processes), "-m"]
        with task.log.open("ab") as log, self._lock:
            if self._ending:
                raise RunFailed("stopped")
            env = self._environment(slot, task.study)
            # In a session of its own, or Ctrl-C would reach it twice.
            child = subprocess.Popen(words, stdout=log, stderr=log, env=env, start_new_session=True)
            self._alive.add(child)
        code = child.wait()
        with self._lock:
            self._alive.discard(child)
        if code:
            raise RunFailed(f"{last_line(task.log) or f'exit code {code}'} ({task.log})")

    def _environment(self, slot: int, study: Study) -> dict[str, str]:
        """Threads and GPUs are divided, where the user has not chosen them."""
        own, parts = {}, self._jobs * study.processes
        if parts > 1:
            own["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parts))
        if self._jobs > 1 and (gpus := torch.cuda.device_count()) > 1:
            mine = range(slot * study.processes, (slot + 1) * study.processes)
            own["CUDA_VISIBLE_DEVICES"] = ",".join(str(number % gpus) for number in mine)
        return own | os.environ

    def end(self) -> None:
        """All save and end, and no other begins."""
        with self._lock:
            self._ending = True
            for child in self._alive:
                child.terminate()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --------------------------------------------------------------------------------------------------
# Slurm: a job of an array for each run. Five minutes before its time is over the script's process
# is warned (B:), which is the study itself: it stops the run and asks for a requeue.

SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array={array}
#SBATCH --output={directory}/slurm-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
{options}
exec {command} --task "$SLURM_ARRAY_TASK_ID"
"""


def submit(study: Study, command: list[str], name: str, numbers: list[int]) -> str:
    """Write DIR/study.slurm for the tasks of these numbers, and submit it: the job's number."""
    directory = Path(study.dir).absolute()
    path = directory / "study.slurm"
    script = SCRIPT.format(
        name=name,
        array=",".join(map(str, numbers)),
        directory=directory,
        options="\n".join(f"#SBATCH {option}" for option in study.slurm),
        command=shlex.join(command),
    )
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script.encode())
    try:
        done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"--slurm: no sbatch on this machine; {path} is written") from None
    if done.returncode:
        raise UserError(f"--slurm: sbatch {path}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
