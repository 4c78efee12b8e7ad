"""Processes that meet, and those that do not: really started, really cut off."""

import json
import os
import socket
import subprocess
import sys

import pytest
from faults import DIGITS, ROOT

from lipnext_scale.checks.network import local_gloo

pytestmark = pytest.mark.slow
NOWHERE = "nowhere0"  # no interface has this name
# What every process of a launch does, without checking its machine too.
MEETING = """
import os
from lipnext_scale.checks.network import Together, launch_of
if __name__ == "__main__":
    together = Together(launch_of(os.environ), {seconds})
    found = [together.answers()]
    if found[0].state == "ok":
        found += together.sums("gloo")
    print("\\n".join(finding.line() for finding in found))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(ranks: list[int], world_size: int, seconds: int, **of_last: str) -> list[str]:
    """Some processes of a launch, each as on a node of its own; what each prints.

    of_last: environment variables of the last process alone.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    common |= {"SLURM_STEP_NODELIST": "gpu[08-11]", "PYTHONPATH": str(ROOT)}
    started = []
    for rank in ranks:
        own = {"RANK": str(rank), **(of_last if rank == ranks[-1] else {})}
        command = [sys.executable, "-c", MEETING.format(seconds=seconds)]
        environment = {**os.environ, **common, **own}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
    return [process.communicate(timeout=120)[0] for process in started]


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    """gloo itself fails on it; the interfaces that are there are offered."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", NOWHERE)
    found = local_gloo(10)
    assert found.state == "wrong" and "rank 1 on this machine: " in found.text
    assert "export GLOO_SOCKET_IFNAME=ONE, of lo" in found.fix and NOWHERE in found.fix


def test_a_host_that_does_not_answer_is_named():
    """By the name that Slurm has for it; and no process waits longer than asked."""
    for text in meet([0, 1], 3, 8):
        assert "wrong  processes: no answer within 8 s from rank 2 on gpu10" in text
        assert "nc -vz 127.0.0.1" in text


def test_a_host_that_answers_and_cannot_be_reached_is_named():
    """One process finds no interface: the sum fails, and the cause can be read."""
    first, _ = meet([0, 1], 2, 12, GLOO_SOCKET_IFNAME=NOWHERE)
    assert "ok     processes: 2 answer" in first and "wrong  gloo of all" in first
    assert f"rank 1 on {socket.gethostname()}: " in first and "GLOO_SOCKET_IFNAME" in first


def test_under_torchrun_rank_0_reports_for_all(tmp_path):
    """The whole command on two processes: one report, and exit code 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "lipnext_scale.doctor", "--json", "--config", DIGITS]
    done = subprocess.run(
        [*launcher, *command, f"run.dir={tmp_path}/run"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    findings = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert findings["gloo of all"]["text"].startswith("2 processes sum 1 MB")
    assert "32 images for each of 2 process(es)" in findings["batch"]["text"]
    assert not (tmp_path / "run").exists()
