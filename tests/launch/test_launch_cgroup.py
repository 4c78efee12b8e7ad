"""A real Slurm with proctrack/cgroup, as clusters have it: signals reach a node's task alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import STEPS, steps_told
from slurm_cluster import SlurmCluster, slurm_cluster, wait_until, why_not
from slurm_jobs import Job
from training.small import final_state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not("cgroup") is not None, reason=why_not("cgroup") or ""),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster("cgroup") as running:
        yield running


def test_a_warning_reaches_the_ranks_of_all_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """They save at one step, and the job goes on there when it is queued again."""
    run = tmp_path / "run"
    job = Job(
        cluster,
        tmp_path,
        "launch/imagenet_2b.slurm",
        f"run.dir={run}",
        log="warned",
        LIPNEXT_MAX_RESTARTS="1",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 5, "the sixth step")
    cluster.run("scancel", "--signal=USR1", job.number)
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    assert cluster.told(job.number, "Restarts") == "1"
    assert job.said().count(": saved: requeued\n") == 1
    assert steps_told(run) == list(range(1, STEPS + 1)) and final_state(run)["step"] == STEPS


def test_a_cancelled_job_saves(cluster: SlurmCluster, tmp_path: Path) -> None:
    """SIGTERM has to go through the task as well."""
    run = tmp_path / "run"
    job = Job(
        cluster,
        tmp_path,
        "launch/cifar.slurm",
        f"run.dir={run}",
        "optim.epochs=100000",
        log="cancelled",
        LIPNEXT_PROCS_PER_NODE="1",
    )
    job.wait_until(lambda: len(steps_told(run)) > 1, "the second step")
    cluster.run("scancel", job.number)
    assert job.end()[0] == "CANCELLED", job.said()
    wait_until(lambda: "SIGTERM at step" in job.said(), "its last word", job.report)
    assert f"SIGTERM at step {final_state(run)['step']}: saved; " in job.said()
