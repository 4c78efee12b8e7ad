"""The batch scripts in a real Slurm: to the end, warned and requeued, failed, refused, in an image.

The headers are the shipped ones: the cluster claims to have the nodes that they ask for. In place
of Apptainer there is a script that is as strict. test_launch_signals.py has a node by itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import STEPS, steps_told
from slurm_cluster import SlurmCluster, slurm_cluster, why_not
from slurm_jobs import Job
from training.small import assert_same, final_state

# Like the real one it mounts nothing that is not there; and all else of the machine is seen inside.
APPTAINER = """\
#!/usr/bin/env bash
[[ $1 == exec && $2 == --nv && $3 == --bind && $5 == --pwd ]] || exit 64
IFS=, read -ra mounts <<<"$4"
for mount in "${mounts[@]}"; do
  [[ -e ${mount%%:*} ]] || { echo "FATAL: ${mount%%:*} doesn't exist" >&2; exit 255; }
done
echo "$4" >>"${0%/*}/../mounted"
cd "$6" && shift 7 && exec "$@"
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]


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
    settings = [f"run.dir={run}", "run.seed=3"]
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


def contained(cluster: SlurmCluster, directory: Path, *overrides: str, **variables: str) -> Job:
    """A job of two nodes in an image."""
    program = directory / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)
    return Job(
        cluster,
        directory,
        "launch/imagenet_2b.slurm",
        f"run.dir={directory}/run",
        "run.max_steps=2",
        *overrides,
        log="log",
        PATH=f"{program.parent}:{cluster.environment['PATH']}",
        LIPNEXT_APPTAINER_IMAGE="image.sif",
        LIPNEXT_PROCS_PER_NODE="1",
        **variables,
    )


def test_the_stage_directory_is_made_before_it_is_mounted(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """On every node, outside the container; the shards are copied there."""
    stage = tmp_path / "of" / "the node"
    job = contained(cluster, tmp_path, LIPNEXT_STAGE_DIR=str(stage))
    assert job.end() == ("COMPLETED", "0:0"), job.said()
    assert f",{stage}:{stage}\n" in (tmp_path / "mounted").read_text()
    assert list(stage.rglob("train.tar.gz"))
    assert final_state(tmp_path / "run")["step"] == 2
