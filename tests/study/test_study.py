"""`python -m lipnext_scale.study`: runs as processes; stopped, continued, one of them failing."""

import csv
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from lipnext_scale.observe.metrics import read_records
from lipnext_scale.studies import runner
from lipnext_scale.study import main
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.utils.errors import Stopped

ROOT = Path(__file__).parents[2]
STUDY = """
config: builtin:digits.yaml
dir: {directory}
settings:
  model: {{depth: 1, width: 16}}
  data.batch_size: 200
  run: {{eval_every: 0, log_every: 10, watch_every: 0, summary: false}}
rows:
  quick: {{run.checkpoint_every: 0}}
  slow: {{data.batch_size: 20, run.checkpoint_every: 0}}
  wrong: {{optim.lr: 1e30}}
equal: {{epochs: 15}}
"""
SLOW_STEPS = 15 * (1437 // 20)


def code_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def stop_when(run: Path) -> None:
    """SIGTERM to this process when the run has made a record."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while not read_records(run / "metrics.jsonl") and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.slow
def test_stopped_half_way_continued_and_a_row_that_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, directory = tmp_path / "three.yaml", tmp_path / "three"
    study.write_text(STUDY.format(directory=directory))
    slow = directory / "slow" / "seed_0"
    stop_when(slow)
    assert code_of(str(study)) == 128 + signal.SIGTERM
    said = capsys.readouterr()
    assert "\n1/3 quick, seed 0: clean " in said.out and "slow" not in said.out
    assert said.err == "SIGTERM: the same command continues\n"
    certified = directory / "quick" / "seed_0" / "certificate.json"
    before = certified.stat().st_mtime_ns
    stopped = (slow / "study.log").read_text().splitlines()[-1]
    step = int(stopped.split(":")[0].removeprefix("SIGTERM at step "))
    assert 10 <= step < SLOW_STEPS and not (directory / "wrong").exists()

    assert code_of(str(study), "--jobs", "2") == 1
    said = capsys.readouterr()
    log = directory / "wrong" / "seed_0" / "study.log"
    why = log.read_text().splitlines()[-1]
    assert why.startswith("failed: step 1: ")
    assert f"3 wrong, seed 0: exit code 1: {why} ({log})\n" in said.out
    assert said.err == "failed: 1 of 3 runs: wrong, seed 0\n"
    assert f"continuing {slow} from step {step}" in (slow / "study.log").read_text()
    assert certified.stat().st_mtime_ns == before
    with (directory / "table.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["quick", "slow"]
    assert float(rows["slow"]["steps"]) == SLOW_STEPS
    for name, row in rows.items():
        facts = json.loads((directory / name / "seed_0" / "certificate.json").read_bytes())
        assert float(row["clean"]) == facts["clean_accuracy"]
    assert f"wrong, seed 0: no certificate: {why}" in (directory / "table.md").read_text()
    for picture in ("curves.png", "tradeoffs.png"):
        assert Image.open(directory / picture).width > 900

    # Another study in the same directory is refused before anything runs.
    assert code_of(str(study), "equal.epochs=16") == 2
    assert "(optim.epochs = 15 there, 16 here)" in capsys.readouterr().err

    runs = [str(directory / name / "seed_0") for name in ("quick", "slow")]
    main(["compare", *runs, "--out", str(tmp_path / "compared")])
    assert (tmp_path / "compared" / "table.tex").exists()
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[1:3]] == ["batch_size=200", "batch_size=20"]


def test_a_job_that_slurm_warns_is_requeued(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    with pytest.raises(Stopped) as stopped:
        runner.run_tasks([], 1, StopRequest(signal.SIGUSR1), lambda *_: None)
    assert stopped.value.exit_code == 0
    assert (tmp_path / "asked").read_text() == "requeue 7_2\n"
