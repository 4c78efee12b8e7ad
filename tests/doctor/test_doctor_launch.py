"""Who this process is, from what torchrun or srun put into its environment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipnext_scale.doctor.network import Launch, expand_nodes, launch_of

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "20007",
}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a1,b[9-10]-ib,c", ["a1", "b9-ib", "b10-ib", "c"]),
    ],
)
def test_names_of_nodes_are_written_out(listed, names):
    """As Slurm abbreviates them."""
    assert expand_nodes(listed) == names


@given(st.integers(0, 900), st.integers(0, 40), st.integers(1, 5))
def test_a_range_of_nodes_has_all_of_them(first, more, width):
    """Whatever its numbers and their leading zeros."""
    names = [f"n{number:0{width}}" for number in range(first, first + more + 1)]
    assert expand_nodes(f"n[{first:0{width}}-{first + more:0{width}}]") == names


def test_srun_alone_is_a_launcher():
    """The first node is where they meet, and the port is the job's own."""
    launch = launch_of(SRUN)
    assert launch == Launch(3, 4, 1, 2, "gpu08", 20007, False, ("gpu08", "gpu09"))
    assert launch.name_of(2) == "rank 2 on gpu09"
    assert not launch.speaks and launch_of({**SRUN, "SLURM_LOCALID": "0"}).speaks


def test_a_batch_script_itself_is_one_process():
    """Slurm tells it how many tasks the job has, but it has no step."""
    assert launch_of({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == Launch()


def test_torchrun_goes_before_srun():
    """srun starts a torchrun on each node, which starts the processes."""
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    own |= {"MASTER_ADDR": "gpu08", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launch = launch_of({**SRUN, **own})
    assert launch == Launch(5, 8, 1, 4, "gpu08", 29400, True, ("gpu08", "gpu09"))
