"""Hangs of real processes: noticed, reported by all that can, and ended with an own exit code."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_run import ElasticRun
from parallel.launch_commands import ROOT

from lipnext_scale.faults.watchdog import (
    HANG_EXIT_CODE,
    HangReports,
    _ranks_in_words,
    collective_timeout,
)

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
    return {path.name: path.read_text() for path in (run.directory / "hangs").glob("*/*.txt")}


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_by_the_other(two_ranks: ElasticRun) -> None:
    """It cannot speak for itself; the one that waits for it writes its stacks and ends."""
    stopped = two_ranks.pids()[1]
    os.kill(stopped, signal.SIGSTOP)
    two_ranks.wait_for(lambda: "failed: hang" in two_ranks.said(), "report of the hang")
    two_ranks.wait_for(lambda: 0 not in two_ranks.pids(), "end of rank 0")
    os.kill(stopped, signal.SIGKILL)  # as torchrun would after 30 s
    assert two_ranks.process is not None
    two_ranks.process.wait(120)
    found, said = reports(two_ranks), two_ranks.said()
    assert list(found) == ["rank-0.txt"]
    assert "rank 0 (" in found["rank-0.txt"] and "Thread 0x" in found["rank-0.txt"]
    assert "trainer.py" in found["rank-0.txt"]
    assert said.count("failed: hang: rank 0 silent for ") == 1
    assert "; rank 1: no report, is it stopped or its host gone?; stacks in " in said
    assert f"exitcode  : {HANG_EXIT_CODE}" in said
    (flight,) = (two_ranks.directory / "hangs").glob("*/rank-0.flight")
    record = pickle.loads(flight.read_bytes())
    names = {entry["profiling_name"] for entry in record["entries"]}
    assert names and all(name.startswith("gloo:") for name in names)
    places = {frame["filename"] for entry in record["entries"] for frame in entry["frames"]}
    assert any(place.endswith("lipnext_scale/trainer.py") for place in places)
    # The one that it waits in has begun and not ended.
    begun = [group["last_enqueued_collective"] for group in record["pg_status"].values()]
    ended = [group["last_completed_collective"] for group in record["pg_status"].values()]
    assert sum(begun) > sum(ended)


@pytest.mark.slow
def test_a_data_worker_that_hangs_makes_all_report(two_ranks: ElasticRun) -> None:
    """The rank waits for its batch, the other for the rank; one line says so."""
    pid = two_ranks.pids()[1]
    for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(worker), signal.SIGSTOP)
    assert two_ranks.process is not None
    two_ranks.process.wait(120)
    found, said = reports(two_ranks), two_ranks.said()
    assert sorted(found) == ["rank-0.txt", "rank-1.txt"]
    waits = "_waiting_for_workers"
    assert waits in found["rank-1.txt"].splitlines()[0]
    (line,) = [line for line in said.splitlines() if "failed: hang: " in line]
    assert "rank 0 silent for" in line and "rank 1 silent for" in line and waits in line
    assert f"exitcode  : {HANG_EXIT_CODE}" in said


WATCHED = """
import sys, time
from pathlib import Path
from lipnext_scale.faults.watchdog import watching
from lipnext_scale.heartbeat import beat
with watching({timeout}, Path(sys.argv[1]), 0, 1):
    {body}
print("done")
"""


def watched(directory: Path, timeout: float, body: str) -> subprocess.CompletedProcess[str]:
    script = WATCHED.format(timeout=timeout, body=body)
    return subprocess.run(
        [sys.executable, "-c", script, str(directory)], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_what_is_no_hang(tmp_path: Path) -> None:
    """Beats, a slow phase within its patience, and a watchdog that is switched off."""
    quiet = "beat('steps'); [(time.sleep(0.1), beat()) for _ in range(20)]"
    quiet += "; beat('a slow one', slow=True); time.sleep(2)"
    for timeout, body in ((1.0, quiet), (0, "time.sleep(1)")):
        done = watched(tmp_path / "hangs", timeout, body)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not (tmp_path / "hangs").exists()
    done = watched(tmp_path / "hangs", 0.5, "beat('step 7'); time.sleep(60)")
    assert done.returncode == HANG_EXIT_CODE and "in step 7" in done.stderr


def test_ranks_are_told_in_few_words(tmp_path: Path) -> None:
    """Those that stand at the same place together; those without a report too."""
    assert _ranks_in_words([0, 2, 3, 4, 9]) == "ranks 0, 2-4, 9"
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}.txt").write_text(f"rank {rank} (h, process 1): at x\nstack\n")
    told = HangReports(tmp_path, 1, 4)
    assert told.any_of_others() and not told.are_complete() and not told.is_ours_the_first()
    assert told.summary().startswith("hang: ranks 0-1, 3 at x; rank 2: no report")


def test_torchs_own_time_out_comes_later() -> None:
    """But never sooner than torch would have it: starts are not watched."""
    assert collective_timeout(600) == 7200 and collective_timeout(10) == 1800
    assert collective_timeout(0) is None
