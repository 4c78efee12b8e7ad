"""Processes that meet, and those that do not: really started, really cut off."""

import json
import os
import socket
import subprocess
import sys

import pytest
from faults import DIGITS, ROOT

from lipnext_scale.doctor.network import gloo_mend, local_gloo

pytestmark = pytest.mark.slow
NOWHERE = "nowhere0"  # no interface has this name
# What every process of a launch does, without looking at its machine too.
MEETING = """
import os
from lipnext_scale.doctor.network import launch_of
from lipnext_scale.doctor.network import Together
together = Together(launch_of(os.environ), {seconds})
found = together.answers()
if all(finding.state == "ok" for finding in found):
    found += together.reaches() + together.sums("gloo")
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
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING.format(seconds=seconds)],
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                **(of_last if rank == ranks[-1] else {}),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    return [process.communicate(timeout=120)[0] for process in started]


def test_two_processes_of_this_machine_meet():
    """A rendezvous at a free port and a sum."""
    found = local_gloo(30)
    assert found.state == "ok", found
    assert "two processes of this machine sum 1 MB" in found.text


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    """gloo itself fails on it; the interfaces that are there are offered."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", NOWHERE)
    found = local_gloo(10)
    assert found.state == "wrong" and "two processes of this machine: " in found.text
    assert found.mend == gloo_mend() and f"GLOO_SOCKET_IFNAME = '{NOWHERE}'" in found.mend
    assert "lo" in found.mend


def test_all_nodes_reach_each_other():
    """Two processes as on two nodes: they answer, connect, and sum over gloo."""
    first, second = meet([0, 1], 2, 30)
    assert "ok     processes: 2 answer" in first
    assert "ok     hosts: all 2 reach each other" in first
    assert "ok     gloo of all: 2 processes sum 1 MB" in first
    assert second.startswith("ok     processes: 2 answer") and "gloo" not in second


def test_a_host_that_does_not_answer_is_named():
    """By the name that Slurm has for it; and nobody waits longer than asked."""
    for told in meet([0, 1], 3, 8):
        assert "wrong  processes: no answer within 8 s from rank 2 on gpu10" in told
        assert "nc -vz 127.0.0.1" in told


def test_a_host_that_answers_and_cannot_be_talked_to_is_named():
    """One process finds no interface: the sum fails, and whose fault it is can be read."""
    first, _ = meet([0, 1], 2, 12, GLOO_SOCKET_IFNAME=NOWHERE)
    assert "ok     hosts" in first and "wrong  gloo of all" in first
    assert f"rank 1 on {socket.gethostname()}: " in first and "GLOO_SOCKET_IFNAME" in first


def test_under_torchrun_one_process_speaks_for_all(tmp_path):
    """The whole command on two processes: one report, and exit code 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [
        "-m",
        "lipnext_scale.doctor",
        "--json",
        "--config",
        DIGITS,
        f"run.dir={tmp_path}/run",
    ]
    done = subprocess.run(
        [*launcher, *command],
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
