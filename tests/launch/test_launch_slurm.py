"""The batch scripts in a real Slurm: to the end, warned and requeued, failed, and refused.

The headers are the shipped ones: the cluster claims to have the nodes that they ask for.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import ROOT, STEPS, steps_told
from slurm_cluster import SlurmCluster, slurm_cluster, wait_until, why_not
from slurm_jobs import Job
from training.small import assert_same, final_state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
# In every Python of the jobs: a rank of the fourth one ends with 3 where this file is there.
FAILS_ON_ITS_WAY_OUT = """
import atexit, os
def fail():
    if os.path.exists(os.environ["FAILS_AFTER"]):
        os._exit(3)
if os.environ.get("SLURM_ARRAY_TASK_ID") == "4" and "TORCHELASTIC_RUN_ID" in os.environ:
    atexit.register(fail)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, directory: Path) -> Path:
    run = directory / "undisturbed"
    settings = [f"run.dir={run}", "run.seed=3", "run.measure_every=1000"]  # the last: as by default
    job = Job(cluster, directory, "launch/imagenet_2b.slurm", *settings, log="first")
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    # Four processes on two nodes, and a copy of the model on each: HSDP.
    assert " on 4 × cpu (fsdp 2 × 2, bank layout, fp32), 60 steps" in job.said()
    return run


def test_two_nodes_train_to_the_end(undisturbed: Path) -> None:
    """What the user says after the script's name goes over the configuration."""
    assert steps_told(undisturbed) == list(range(1, STEPS + 1))
    assert final_state(undisturbed)["step"] == STEPS
    assert not (undisturbed / "requeue").exists()


def test_a_warning_requeues_and_no_bit_is_lost(
    cluster: SlurmCluster, directory: Path, undisturbed: Path
) -> None:
    """USR1 in the middle: all ranks save at one step, the job is queued again and goes on there.

    It is a job of an array, whose index is its seed, and reads shards that were staged.
    """
    job = Job(
        cluster,
        directory,
        "launch/imagenet_2b.slurm",
        f"run.dir={directory}/warned-%a",
        log="warned",
        flags=("--array=3",),
        LIPNEXT_STAGE_DIR=str(directory / "node"),
        LIPNEXT_MAX_RESTARTS="1",  # a stop that looked like a failure would be restarted here
    )
    run = directory / "warned-3"
    job.wait_until(lambda: len(steps_told(run)) > 5, "the sixth step")
    cluster.run("scancel", "--signal=USR1", job.number)
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    (line,) = [text for text in job.said().splitlines() if "the same command continues" in text]
    step = int(line.split(":")[0].removeprefix("SIGUSR1 at step "))
    assert 5 < step < STEPS
    assert cluster.told(job.number, "Restarts") == "1"
    assert job.said().count(f"SIGUSR1 at step {step}: saved: requeued\n") == 1
    assert job.said().count(f"continuing {run} from step {step}\n") == 1
    assert steps_told(run) == list(range(1, STEPS + 1))
    assert_same(final_state(run), final_state(undisturbed))
    assert list((directory / "node").rglob("train.tar.gz"))


def test_a_job_of_an_array_is_requeued_alone(cluster: SlurmCluster, directory: Path) -> None:
    """The last one of an array has the number of the whole array. It has saved, and is requeued
    even though its process then fails on its way out."""
    (directory / "sitecustomize.py").write_text(FAILS_ON_ITS_WAY_OUT)
    job = Job(
        cluster,
        directory,
        "launch/cifar.slurm",
        f"run.dir={directory}/array-%a",
        "optim.epochs=40",
        log="array-%a",
        flags=("--array=3,4",),
        PYTHONPATH=str(directory),
        FAILS_AFTER=str(directory / "array-4" / "requeue"),
        LIPNEXT_PROCS_PER_NODE="1",
    )
    runs = [directory / "array-3", directory / "array-4"]
    job.wait_until(lambda: all(len(steps_told(run)) > 2 for run in runs), "the third step of both")
    warned, other = f"{job.number}_4", f"{job.number}_3"
    assert cluster.told(warned, "JobId") == job.number
    cluster.run("scancel", "--signal=USR1", warned)
    assert {cluster.wait_for_end(each) for each in (warned, other)} == {"COMPLETED"}
    assert [cluster.told(each, "Restarts") for each in (warned, other)] == ["1", "0"]
    said = (directory / "array-4.log").read_text()
    assert said.count(": saved: requeued\n") == 1 and "exitcode  : 3" in said
    assert [final_state(run)["step"] for run in runs] == [200, 200]


def test_a_mistake_is_told_once_and_not_tried_again(cluster: SlurmCluster, directory: Path) -> None:
    """In the first line, by one of two nodes; no process group was made, nothing is requeued. Also
    where sbatch is told to pass on little of the environment, which srun would imitate."""
    job = Job(
        cluster,
        directory,
        "launch/imagenet_1b.slurm",
        f"run.dir={directory}/mistaken",
        "model.widht=64",
        log="mistaken",
        flags=("--export=PATH,SLURM_CONF,LIPNEXT_CONFIG,LIPNEXT_PYTHON,LIPNEXT_PROCS_PER_NODE",),
        LIPNEXT_FAILURE_REQUEUES="3",
        LIPNEXT_MAX_RESTARTS="3",
    )
    assert job.end() == ("FAILED", "2:0"), job.said()
    message = "error: model.widht = 64: unknown key; did you mean model.width?"
    assert job.said().splitlines()[0] == message and job.said().count("widht") == 1
    assert cluster.told(job.number, "Restarts") == "0"
    assert not (directory / "mistaken").exists()


def test_a_mistake_of_one_node_is_one(cluster: SlurmCluster, directory: Path) -> None:
    """Its Python is not there. srun ends the other node, whose exit code is higher."""
    site = directory / "site.sh"
    site.write_text("[[ $SLURM_NODEID == 0 ]] || export LIPNEXT_PYTHON=/none/python\n")
    job = Job(
        cluster,
        directory,
        "launch/imagenet_1b.slurm",
        f"run.dir={directory}/one-sided",
        log="one-sided",
        LIPNEXT_SITE=str(site),
    )
    assert job.end() == ("FAILED", "2:0"), job.said()
    assert "error: LIPNEXT_PYTHON = /none/python: no such program on " in job.said()


def test_a_failure_is_requeued_as_often_as_allowed(cluster: SlurmCluster, directory: Path) -> None:
    """Once here; then the job ends with the failure."""
    run = directory / "failed"
    job = Job(
        cluster,
        directory,
        "launch/cifar.slurm",
        f"run.dir={run}",
        "optim.euclidean_lr=1e30",
        "optim.clip_norm=1e30",
        log="failed",
        LIPNEXT_FAILURE_REQUEUES="1",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    state, code = job.end()
    assert state == "FAILED" and code != "0:0", job.said()
    assert job.said().count("\nfailed: step ") == 2
    assert job.said().count("failed with exit code 1, 1 of 1 times at most: requeued\n") == 1
    assert cluster.told(job.number, "Restarts") == "1"


def test_the_failure_of_one_node_is_that_of_the_job(cluster: SlurmCluster, directory: Path) -> None:
    """srun sends SIGTERM to the other node, which must not look like somebody's wish."""
    run = directory / "one-failed"
    job = Job(
        cluster,
        directory,
        "launch/imagenet_2b.slurm",
        f"run.dir={run}",
        "optim.epochs=100000",
        log="one-failed",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 1, "the second step")
    for process, command, environment in cluster.processes():
        if b"-m" in command and b"SLURM_NODEID=1" in environment:  # torchrun and its rank
            os.kill(process, signal.SIGKILL)
    assert job.end() == ("FAILED", "137:0"), job.said()


def test_a_cancelled_job_saves_and_is_not_requeued(cluster: SlurmCluster, directory: Path) -> None:
    """To torchrun SIGTERM is a failure like others; to us it is somebody's wish."""
    run = directory / "cancelled"
    job = Job(
        cluster,
        directory,
        "launch/cifar.slurm",
        f"run.dir={run}",
        "optim.epochs=100000",
        log="cancelled",
        LIPNEXT_FAILURE_REQUEUES="1",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 1, "the second step")
    cluster.run("scancel", job.number)
    assert job.end()[0] == "CANCELLED", job.said()
    wait_until(lambda: "SIGTERM at step" in job.said(), "its last word", job.report)
    assert f"SIGTERM at step {final_state(run)['step']}: saved; " in job.said()
    assert "requeued" not in job.said() and cluster.state(job.number) == "CANCELLED"


def test_a_preempted_job_is_requeued_and_has_not_failed(
    cluster: SlurmCluster, directory: Path
) -> None:
    """In GraceTime it saves and ends: Slurm by itself would take that for a failure."""
    run = directory / "preempted"
    job = Job(
        cluster,
        directory,
        "launch/imagenet_2b.slurm",
        f"run.dir={run}",
        log="preempted",
        LIPNEXT_FAILURE_REQUEUES="1",
        LIPNEXT_MAX_RESTARTS="1",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 5, "the sixth step")
    flags = ["--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null"]
    cluster.submit(*flags, "--wrap=true", cwd=directory)
    job.wait_until(lambda: "requeued" in job.said(), "the end of the step")
    assert f"SIGTERM at step {final_state(run)['step']}: saved; " in job.said()
    assert "\npreempted: requeued\n" in job.said() and not (run / "failures").exists()
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    assert cluster.told(job.number, "Restarts") == "1" and final_state(run)["step"] == STEPS


def test_a_job_that_is_sent_sigterm_ends(cluster: SlurmCluster, directory: Path) -> None:
    """Not preempted: it is a wish, and no failure that would be tried again."""
    run = directory / "ended"
    job = Job(
        cluster,
        directory,
        "launch/cifar.slurm",
        f"run.dir={run}",
        "optim.epochs=100000",
        log="ended",
        LIPNEXT_FAILURE_REQUEUES="1",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 1, "the second step")
    cluster.run("scancel", "--signal=TERM", job.number)
    assert job.end() == ("FAILED", "143:0"), job.said()
    assert f"SIGTERM at step {final_state(run)['step']}: saved; " in job.said()
    assert "requeued" not in job.said() and not (run / "failures").exists()


def test_submitted_from_elsewhere(cluster: SlurmCluster, directory: Path) -> None:
    """Slurm runs a copy of the script: it says what it lacks."""
    script = str(ROOT / "launch" / "imagenet_2b.slurm")
    job = Job(cluster, directory, script, log="elsewhere", cwd=directory)
    assert job.end() == ("FAILED", "2:0"), job.said()
    assert job.said() == (
        f"error: {directory}/launch/shared/slurm_job.sh: not there; "
        "submit from the repository, or set LIPNEXT_ROOT to it\n"
    )


def test_a_missing_file_of_the_site_is_a_mistake(cluster: SlurmCluster, directory: Path) -> None:
    """A relative one is looked for in the repository."""
    variables = {"LIPNEXT_SITE": "no/site.sh", "LIPNEXT_FAILURE_REQUEUES": "3"}
    job = Job(cluster, directory, "launch/cifar.slurm", log="site", **variables)
    assert job.end() == ("FAILED", "2:0"), job.said()
    message = f"error: LIPNEXT_SITE = {ROOT}/no/site.sh: no such file on {os.uname().nodename}"
    assert job.said() == f"{message}, or not readable\n"


def test_the_jobs_of_an_array_do_not_share_a_directory(
    cluster: SlurmCluster, directory: Path
) -> None:
    """Two of them would overwrite each other's checkpoints."""
    arguments = ["launch/cifar.slurm", f"run.dir={directory}/one"]
    job = Job(cluster, directory, *arguments, log="array", flags=("--array=0",))
    assert job.end() == ("FAILED", "2:0"), job.said()
    assert job.said() == (
        f"error: run.dir={directory}/one: the jobs of an array need directories of their own; "
        "put %a into it\n"
    )
