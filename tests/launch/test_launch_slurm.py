"""The batch scripts in a real Slurm of two nodes: to the end, and warned, requeued and continued.

The headers are the shipped ones: the cluster claims to have the nodes that they ask for. And a
study as an array.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from distributed.launch_commands import steps_logged
from launched_runs import ROOT, SETTINGS, STEPS, VARIABLES
from slurm_cluster import SlurmCluster, slurm_cluster, wait_until, why_not
from training.small import assert_same, final_state

from lipnext_scale.data.catalog import BUILTIN
from lipnext_scale.study import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
SCRIPT = "launch/imagenet_2b.slurm"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs, logs and shards, on what would be a shared file system."""
    path = tmp_path_factory.mktemp("slurm")
    shutil.copy(BUILTIN / "digits" / "test-000000.tar.gz", path / "train.tar.gz")
    return path


@pytest.fixture(scope="module")
def undisturbed(cluster: SlurmCluster, directory: Path) -> Path:
    run, log = directory / "undisturbed", directory / "first.log"
    settings = [*SETTINGS, f"data.train={directory}/train.tar.gz", f"run.dir={run}", "run.seed=3"]
    job = cluster.submit(f"--output={log}", SCRIPT, *settings, cwd=ROOT, **VARIABLES)
    assert cluster.wait_for_end(job) == ("COMPLETED", "0:0"), log.read_text()
    # Four processes on two nodes, and a copy of the model on each: HSDP.
    assert " on 4 × cpu (fsdp 2 × 2, bank layout, fp32), 60 steps" in log.read_text()
    return run


def test_two_nodes_train_to_the_end(undisturbed: Path) -> None:
    """What the user says after the script's name goes over the configuration."""
    assert steps_logged(undisturbed) == list(range(1, STEPS + 1))
    assert final_state(undisturbed)["step"] == STEPS
    assert not (undisturbed / "requeue").exists()


def test_a_warning_requeues_and_no_bit_is_lost(
    cluster: SlurmCluster, directory: Path, undisturbed: Path
) -> None:
    """USR1 in the middle: all ranks save at one step, the job is queued again and goes on there.

    It is a job of an array, whose index is its seed, and reads shards that were staged.
    """
    run, log = directory / "warned-3", directory / "warned.log"
    settings = [*SETTINGS, f"data.train={directory}/train.tar.gz", f"run.dir={directory}/warned-%a"]
    # A stop that looked like a failure would be restarted here.
    variables = {"LIPNEXT_STAGE_DIR": str(directory / "node"), "LIPNEXT_MAX_RESTARTS": "1"}
    flags = ["--array=3", f"--output={log}"]
    job = cluster.submit(*flags, SCRIPT, *settings, cwd=ROOT, **VARIABLES | variables)
    looks = count(1)

    def started_or_ended() -> bool:  # Slurm is not asked as often as files are
        ended = next(looks) % 20 == 0 and cluster.has_ended(job)
        return len(steps_logged(run)) > 5 or ended

    wait_until(started_or_ended, "the sixth step", lambda: cluster.report(job))
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait_for_end(job) == ("COMPLETED", "0:0"), log.read_text()
    said = log.read_text()
    (line,) = [text for text in said.splitlines() if "the same command continues" in text]
    step = int(line.split(":")[0].removeprefix("SIGUSR1 at step "))
    assert 5 < step < STEPS
    assert cluster.field(job, "Restarts") == "1"
    assert said.count(f"SIGUSR1 at step {step}: saved: requeued\n") == 1
    assert said.count(f"continuing {run} from step {step}\n") == 1
    assert steps_logged(run) == list(range(1, STEPS + 1))
    assert_same(final_state(run), final_state(undisturbed))
    assert list((directory / "node").rglob("train.tar.gz"))


def test_a_study_is_an_array_of_jobs(
    cluster: SlurmCluster,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two rows with equal seconds, each measured by its own job; then their table."""
    runs, study = directory / "a study", directory / "widths.yaml"
    facts = {
        "config": "builtin:digits.yaml",
        "dir": str(runs),
        "settings": {"model.depth": 1, "run.eval_every": 0, "run.watch_every": 0},
        "grid": {"model.width": [16, 64]},
        "equal": {"seconds": 0.5},
        "slurm": ["--cpus-per-task=2"],
    }
    study.write_text(json.dumps(facts))
    monkeypatch.chdir(ROOT)
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    main([str(study), "--slurm"])
    (job,) = re.fullmatch(r"job (\d+): 2 of 2 runs; .*\n", capsys.readouterr().out).groups()
    wait_until(lambda: cluster.has_ended(job), "the end", lambda: cluster.report(job), every=0.5)
    logs = [path.read_text() for path in sorted(runs.glob("slurm-*.out"))]
    main([str(study), "--table"])
    with (runs / "table.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["width=16", "width=64"], logs
    for row in rows:
        seconds = json.loads((runs / row / "timing.json").read_bytes())["seconds_per_epoch"]
        epochs = max(1, round(0.5 / seconds))
        assert float(rows[row]["steps"]) == 22 * epochs
        assert f"{row} {epochs}" in (runs / "table.md").read_text()
        assert not list((runs / row).glob("timing_*"))
