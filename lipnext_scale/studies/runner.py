"""The runs of a study as processes: so many at a time on this machine, or jobs of a Slurm array."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGUSR1

import torch

from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.studies.plan import Study, Task
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.utils.errors import Stopped, UserError
from lipnext_scale.utils.files import write_atomically

# A few steps at the full learning rate, whose exponentials take the longest.
TIMED = """run.max_steps=40 run.log_every=10 run.eval_every=0 run.watch_every=0 run.summary=false
run.checkpoint_every=0 run.per_depth=false run.wandb="" optim.epochs=40 optim.warmup_epochs=0"""


def run_tasks(
    tasks: list[Task], jobs: int, request: StopRequest, report: Callable[[Task, str], None]
) -> None:
    """Train, certify and attack each. report: called when one has ended, with why it failed."""
    waiting, workers = tasks[::-1], dict[int, Worker]()
    try:
        while (waiting or workers) and not request.signal:
            for slot in range(jobs):
                if slot not in workers and waiting:
                    workers[slot] = Worker(waiting.pop(), slot, jobs)
                if slot in workers and (ended := workers[slot].advance()) is not None:
                    report(workers.pop(slot).task, ended)
            time.sleep(0.1)
    finally:
        children = [worker.child for worker in workers.values() if worker.child]
        for child in children:
            child.terminate()  # a run saves first
        for child in children:
            child.wait()
    if request.signal == SIGUSR1 and (array := os.environ.get("SLURM_ARRAY_JOB_ID")):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        subprocess.run(["scontrol", "requeue", job], check=True)
    if request.signal:
        raise Stopped(request.signal, f"{request.signal.name}: the same command continues")


class Worker:
    """The processes of a task, one after the other, in a share of the machine."""

    def __init__(self, task: Task, slot: int, jobs: int) -> None:
        self.task, self._commands = task, commands(task)
        self._environment = share_of_machine(slot, jobs, task.study.processes) | os.environ
        self.child: subprocess.Popen[bytes] | None = None

    def advance(self) -> str | None:
        """None while it works; why it failed, empty if it did not."""
        if self.child and (code := self.child.poll()) is None:
            return None
        log = self.task.log
        if self.child and code:
            return f"exit code {code}: {last_line(log)} ({log})"
        try:
            words = next(self._commands, None)
        except (UserError, OSError) as error:
            return str(error)
        if words is None:
            return ""
        with log.open("ab") as out:
            # In a session of its own, or Ctrl-C would reach it twice.
            self.child = subprocess.Popen(
                words, stdout=out, stderr=out, env=self._environment, start_new_session=True
            )
        return None


def commands(task: Task) -> Iterator[list[str]]:
    """Each is started when the one before has ended well."""
    start = [sys.executable, "-m"]
    if task.study.processes > 1:
        start += ["torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(task.study.processes), "-m"]
    train = [*start, "lipnext_scale.train", "--config", task.study.config]
    task.run.path.mkdir(parents=True, exist_ok=True)
    if task.study.equal.seconds and not task.timing.exists():
        timed = RunDirectory(task.directory / f"timing_{task.seed}")
        shutil.rmtree(timed.path, ignore_errors=True)
        yield [*train, *task.settings, *TIMED.split(), f"run.dir={timed.path}"]
        keep_timing(task, timed)
        shutil.rmtree(timed.path)
    yield [*train, *task.arguments()]
    yield [*start, "lipnext_scale.certify", "--model", str(task.run.path)]
    if not task.is_attacked():
        attack, radius = task.study.attack, str(task.plain().loss.epsilon)
        how = [f"--{key}={number}" for key, number in vars(attack).items()]
        yield [*start, "lipnext_scale.attack", f"--model={task.run.path}", *how, "--radii", radius]


def keep_timing(task: Task, run: RunDirectory) -> None:
    """Seconds of an epoch by the fastest of three intervals: what disturbs one makes it slower."""
    _, *records = [r for r in read_records(run.metrics) if "images_per_second" in r]
    rate = max(record["images_per_second"] for record in records)
    images = run.recipe().data.batch_size * records[-1]["step"] / records[-1]["train/epoch"]
    facts = {"images_per_second": rate, "seconds_per_epoch": images / rate}
    own = run.path / task.timing.name
    write_atomically(own, json.dumps(facts).encode())
    with suppress(FileExistsError):  # another seed was faster
        os.link(own, task.timing)


def share_of_machine(slot: int, jobs: int, processes: int) -> dict[str, str]:
    """Threads and GPUs, divided; what the user has chosen goes over it."""
    own, parts = {}, jobs * processes
    if parts > 1:
        own["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parts))
    if jobs > 1 and (gpus := torch.cuda.device_count()) > 1:
        mine = range(slot * processes, (slot + 1) * processes)
        own["CUDA_VISIBLE_DEVICES"] = ",".join(str(number % gpus) for number in mine)
    return own


def last_line(log: Path) -> str:
    """Or the last one of ours: after it torchrun has others to say."""
    lines = log.read_text(errors="replace").splitlines()[-60:] if log.exists() else []
    ours = [line for line in lines if line.startswith(("error: ", "failed: "))]
    return next((line.strip() for line in reversed(ours or lines) if line.strip()), "")


# --------------------------------------------------------------------------------------------------
# Slurm: a job of an array for each run. Five minutes before its time is over the script's process
# is warned (B:), which is the study itself: it stops the run and asks for a requeue.

SCRIPT = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array={array}
#SBATCH --output="{directory}/slurm-%a.out"
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
    options = "\n".join(f"#SBATCH {option}" for option in study.slurm)
    where = {"directory": directory, "array": ",".join(map(str, numbers))}
    script = SCRIPT.format(name=name, options=options, command=shlex.join(command), **where)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script.encode())
    try:
        done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"--slurm: no sbatch on this machine; {path} is written") from None
    if done.returncode:
        raise UserError(f"--slurm: sbatch {path}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()
