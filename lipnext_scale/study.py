"""Run a study, rows of settings × seeds: train, certify and attack each, and make one table.

    python -m lipnext_scale.study studies/small/digits_lr.yaml [--jobs 2] [key=value ...]
    python -m lipnext_scale.study studies/cifar10_shift.yaml --slurm    as an array job
    python -m lipnext_scale.study studies/cifar10_shift.yaml --table    of what is certified so far
    python -m lipnext_scale.study compare RUN RUN ...                   of runs that exist

Runs are in DIR/ROW/seed_S; the same command continues, and runs nothing again that is finished.
Writes table.md, table.csv, table.tex and pictures into DIR (docs/study.md).
"""

import lipnext_scale.utils.passive  # noqa: F401

import sys
from pathlib import Path

from lipnext_scale.config.recipe import CHANGEABLE
from lipnext_scale.studies import comparison, plan, runner
from lipnext_scale.studies.comparison import Groups, Run, share_at
from lipnext_scale.studies.plan import Task
from lipnext_scale.training.signals import stop_requests
from lipnext_scale.utils.errors import ArgumentParser, RunFailed, UserError, command, positive
from lipnext_scale.utils.progress import Progress


@command
def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        compare(argv[1:])
        return
    arguments = _parser().parse_intermixed_args(argv)
    tasks = plan.load_tasks(arguments.study, arguments.overrides)
    study, name = tasks[0].study, Path(arguments.study).stem
    if (number := arguments.task) is not None:
        if not 0 <= number < len(tasks):
            raise UserError(f"--task {number}: must be from 0 to {len(tasks) - 1}")
        tasks = [tasks[number]]
    left = [number for number, task in enumerate(tasks) if not task.is_finished()]
    if arguments.slurm and left:
        words = [sys.executable, "-m", "lipnext_scale.study", arguments.study]
        job = runner.submit(study, [*words, *arguments.overrides], name, left)
        print(f"job {job}: {len(left)} of {len(tasks)} runs; when it has ended, say --table")
        return
    failed = [] if arguments.table else run(tasks, left, arguments.jobs)
    if arguments.task is None:
        table(tasks, name)
    if failed:
        raise RunFailed(f"{len(failed)} of {len(tasks)} runs: {'; '.join(failed)}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lipnext_scale.study", description=__doc__.split("\n")[0])
    parser.add_argument("study", metavar="STUDY.yaml", help="or: compare RUN RUN ...")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set over the file")
    what = "runs at a time, which share cores and GPUs (1)"
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help=what)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--slurm", action="store_true", help="submit an array, a job for each run")
    ways.add_argument("--task", type=int, metavar="I", help="the run of this number alone")
    ways.add_argument("--table", action="store_true", help="run nothing")
    return parser


def run(tasks: list[Task], numbers: list[int], jobs: int) -> list[str]:
    """The tasks of these numbers; the names of those that failed."""
    progress = Progress(len(tasks), len(tasks) - len(numbers), "run", "study")
    failed: list[str] = []

    def report(task: Task, failure: str) -> None:
        progress.advance()
        if failure:
            failed.append(task.name)
        done = f"{len(tasks) - progress.left}/{len(tasks)}"
        progress.say(f"{done} {task.name}: {failure or scores(task)}")

    look = f"python -m lipnext_scale.watch {tasks[0].study.dir}/*/seed_*"
    progress.say(f"{len(numbers)} of {len(tasks)} runs, {jobs} at a time; a live view: {look}")
    try:
        with stop_requests() as request:
            runner.run_tasks([tasks[number] for number in numbers], jobs, request, report)
    finally:
        progress.close()
    return failed


def scores(task: Task) -> str:
    found = comparison.read_run(task.run.path, task.name)
    shown = [share_at(0.0, "clean"), share_at(found.recipe.loss.epsilon)]
    return ", ".join(f"{one.title} {one.text(one.of(found))}" for one in shown)


def table(tasks: list[Task], title: str) -> None:
    study, groups, notes = tasks[0].study, Groups(), []
    if study.equal.seconds:
        gave = {task.row: str(task.epochs()) for task in tasks if task.timing.exists()}
        epochs = ", ".join(f"{row} {number}" for row, number in gave.items())
        notes = [f"equal: {study.equal.seconds:g} s of steps, as measured before; epochs: {epochs}"]
    for task in tasks:
        if task.run.config.exists() and task.run.certificate.exists():
            groups.setdefault(task.row, []).append(comparison.read_run(task.run.path, task.name))
        elif line := runner.last_line(task.log):
            notes.append(f"{task.name}: no certificate: {line}")
    if waiting := [task.name for task in tasks if not task.log.exists()]:
        notes.append(f"not run yet: {'; '.join(waiting)}")
    if not groups:
        raise RunFailed(f"{study.dir}: no run is certified, so there is no table; {notes[-1]}")
    print("\n".join(comparison.write_tables(Path(study.dir), title, groups, notes)))


def compare(argv: list[str]) -> None:
    parser = ArgumentParser(prog="lipnext_scale.study compare", description="Compare runs.")
    parser.add_runs("comparison")
    arguments = parser.parse_args(argv)
    groups = by_settings(comparison.read_runs(arguments.runs))
    print("\n".join(comparison.write_tables(arguments.out, "Comparison", groups, [])))


def by_settings(runs: list[Run]) -> Groups:
    """Together: runs that differ in the seed alone, and in what changes no result."""
    settings, ignored = comparison.differing(runs), CHANGEABLE | {"run.seed"}
    groups: Groups = {}
    for number, one in enumerate(runs):
        point = {key: values[number] for key, values in settings.items() if key not in ignored}
        groups.setdefault(plan.described(point) or "all", []).append(one)
    return groups


if __name__ == "__main__":
    main()
