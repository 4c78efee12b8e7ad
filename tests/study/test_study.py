"""`python -m lipnext_scale.study`: runs as processes; stopped, continued, one of them failing."""

import csv
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lipnext_scale.observe.metrics import read_records
from lipnext_scale.studies import runner
from lipnext_scale.studies.plan import load_tasks
from lipnext_scale.study import main
from lipnext_scale.training.signals import StopRequest
from lipnext_scale.utils.errors import Stopped

STUDY = """
config: builtin:digits.yaml
dir: {directory}
settings:
  model: {{depth: 1, width: 16}}
  data.batch_size: 20
  run: {{eval_every: 0, log_every: 10, watch_every: 0, summary: false, checkpoint_every: 0}}
rows:
  right: {{}}
  wrong: {{optim.lr: 1e30}}
equal: {{epochs: 15}}
attack: {{samples: 3, steps: 2, restarts: 1}}
"""
STEPS = 15 * (1437 // 20)


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
    study, directory = tmp_path / "two.yaml", tmp_path / "two"
    study.write_text(STUDY.format(directory=directory))
    run, wrong = directory / "right" / "seed_0", directory / "wrong" / "seed_0"
    stop_when(run)
    assert code_of(str(study)) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "SIGTERM: the same command continues\n"
    stopped = (run / "study.log").read_text().splitlines()[-1]
    step = int(stopped.split(":")[0].removeprefix("SIGTERM at step "))
    assert 10 <= step < STEPS and not wrong.exists()

    assert code_of(str(study), "--jobs", "2") == 1
    said = capsys.readouterr()
    why = (wrong / "study.log").read_text().splitlines()[-1]
    assert why.startswith("failed: step 1: ")
    assert f"/2 wrong, seed 0: exit code 1: {why} ({wrong}/study.log)\n" in said.out
    assert "/2 right, seed 0: clean " in said.out
    assert said.err == "failed: 1 of 2 runs: wrong, seed 0\n"
    assert f"continuing {run} from step {step}" in (run / "study.log").read_text()
    # What is certified and attacked is not run again; another attack is made.
    assert [task.is_finished() for task in load_tasks(str(study), [])] == [True, False]
    assert not load_tasks(str(study), ["attack.samples=4"])[0].is_finished()
    attack = json.loads((run / "attack.json").read_bytes())
    assert attack["attacked"] == 3
    # One that found a violation, or looked elsewhere, is made again.
    for other in ({"violations": [{}]}, {"inside": 0.5}, {"weights": "others"}):
        (run / "attack.json").write_text(json.dumps(attack | other))
        assert not load_tasks(str(study), [])[0].is_finished()
    (run / "attack.json").write_text(json.dumps(attack))

    with (directory / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    facts = json.loads((run / "certificate.json").read_bytes())
    assert (row["row"], float(row["steps"])) == ("right", STEPS)
    assert float(row["violations"]) == 0
    assert float(row["clean"]) == facts["clean_accuracy"]
    assert f"wrong, seed 0: no certificate: {why}" in (directory / "table.md").read_text()

    # Another study in the same directory is refused before anything runs.
    assert code_of(str(study), "equal.epochs=16") == 2
    assert "(optim.epochs = 15 there, 16 here)" in capsys.readouterr().err

    main(["compare", str(run), "--out", str(tmp_path / "compared")])
    assert (tmp_path / "compared" / "table.tex").exists()
    assert capsys.readouterr().out.splitlines()[1].startswith("all ")


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
