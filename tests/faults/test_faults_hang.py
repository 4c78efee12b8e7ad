"""Hangs of real processes: noticed, reported by all that can, and ended with an own exit code."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed.launch_commands import ROOT
from elastic_run import ElasticRun
from training.small import small_recipe

from lipnext_scale.training.trainer import Trainer
from lipnext_scale.training.watchdog import HANG_EXIT_CODE, Watchdog

SHORT = 3  # seconds


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[ElasticRun]:
    run = ElasticRun(tmp_path / "run", tmp_path / "log", 2, f"run.hang_timeout={SHORT}")
    run.command[run.command.index("100")] = "0"  # restarts: the end shall be seen
    run.start()
    try:
        run.wait_for_progress()
        yield run
    finally:
        run.end()


def reports(run: ElasticRun) -> dict[str, str]:
    """Those that are not empty."""
    found = {path.name: path.read_text() for path in (run.directory / "hangs").glob("*/*.txt")}
    return {name: text for name, text in found.items() if text}


@pytest.mark.slow
def test_a_data_worker_that_hangs_makes_all_report(two_ranks):
    """The rank waits for its batch, the other for the rank; one line names both places."""
    pid = two_ranks.pids()[1]
    for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(worker), signal.SIGSTOP)
    assert two_ranks.process is not None
    two_ranks.process.wait(120)
    found, said = reports(two_ranks), two_ranks.said()
    assert sorted(found) == ["rank-0.txt", "rank-1.txt"]
    waits = "_while_all_live"
    assert waits in found["rank-1.txt"].splitlines()[0]
    (line,) = [line for line in said.splitlines() if "failed: hang: " in line]
    assert "rank 0: step " in line and "rank 1: step " in line and waits in line
    assert "Thread 0x" in found["rank-0.txt"] and "trainer.py" in found["rank-0.txt"]
    assert f"exitcode  : {HANG_EXIT_CODE}" in said
    flight = next((two_ranks.directory / "hangs").glob("*/rank-0.flight"))
    entries = pickle.loads(flight.read_bytes())["entries"]
    assert entries and all(entry["profiling_name"].startswith("gloo:") for entry in entries)


WATCHED = """
import ctypes, sys, time
from pathlib import Path
from lipnext_scale.training.watchdog import watching
from lipnext_scale.utils.progress import beat
with watching(0, Path(sys.argv[1]) / "off", 0, 1):
    time.sleep(0.6)
with watching(0.5, Path(sys.argv[1]) / "on", 0, 1):
    beat('steps'); [(time.sleep(0.05), beat()) for _ in range(20)]
    beat('a slow one', slow=True); time.sleep(1)
assert not Path(sys.argv[1]).exists()
print("no hang", flush=True)
with watching(0.5, Path(sys.argv[1]) / "on", 0, 1):
    beat('step 7'); {hang}
"""


def watched(directory: Path, hang: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WATCHED.format(hang=hang), str(directory)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_what_is_a_hang_and_what_is_not(tmp_path):
    """Not beats, a slow phase within its patience, or a watchdog that is off. A library that holds
    the GIL keeps our thread from ending the process, but not faulthandler from its report."""
    silent = watched(tmp_path / "silent", "time.sleep(60)")
    held = watched(tmp_path / "held", "ctypes.PyDLL(None).usleep(20_000_000)")
    out, error = silent.communicate(timeout=60)
    assert (silent.returncode, out) == (HANG_EXIT_CODE, "no hang\n"), error
    assert "failed: hang: rank 0: step 7" in error
    assert held.stdout is not None and held.stdout.readline() == "no hang\n"
    report = tmp_path / "held" / "on" / "rank-0.txt"
    try:
        while not report.exists() or "most recent call first" not in report.read_text():
            assert held.poll() is None
            time.sleep(0.05)
    finally:
        held.kill()
        held.communicate()
    assert "Timeout" in report.read_text() and 'File "<string>", line' in report.read_text()


def test_the_summary_groups_ranks_by_place(tmp_path):
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}.txt").write_text(f"rank {rank} on h, silent for 9 s: at x\nstack")
    (tmp_path / "rank-4.txt").write_text("Timeout (0:10:00)!\nstack")
    summary = Watchdog(600, tmp_path, 1, 5)._summary()
    assert summary.startswith("hang: rank 0, 1, 3: at x; rank 2: no report: is it stopped")
    assert "rank 4: its stacks only: a library holds the GIL; stacks in " in summary


def test_the_next_start_removes_empty_reports(tmp_path):
    """Those that kill -9 left; a report with content stays."""
    hangs = tmp_path / "run" / "hangs"
    for start, text in (("killed", ""), ("hung", "rank 0 on h, silent for 9 s: at x\n")):
        (hangs / start).mkdir(parents=True)
        (hangs / start / "rank-0.txt").write_text(text)
    Trainer(small_recipe(tmp_path / "run", "run.max_steps=1", "run.eval_every=0")).run()
    assert [path.name for path in sorted(hangs.rglob("*"))] == ["hung", "rank-0.txt"]
