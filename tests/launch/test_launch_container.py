"""Jobs in a container: a real Slurm, and in place of Apptainer a script that is as strict."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster, why_not
from slurm_jobs import Job
from training.small import final_state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


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


def test_a_stage_directory_that_cannot_be_made_is_a_mistake(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    job = contained(cluster, tmp_path, LIPNEXT_STAGE_DIR=f"{tmp_path}/file/below")
    assert job.end() == ("FAILED", "2:0"), job.said()
    message = f"error: LIPNEXT_STAGE_DIR = {tmp_path}/file/below: cannot be made, see above"
    assert job.said().splitlines()[-1] == message


def test_the_sites_file_is_read_in_the_container(cluster: SlurmCluster, tmp_path: Path) -> None:
    """So it is mounted; what it exports over the job's own environment is seen."""
    site = tmp_path / "site.sh"
    site.write_text("export LIPNEXT_PYTHON=/none/of/the/site\n")
    job = contained(cluster, tmp_path, LIPNEXT_SITE=str(site))
    assert job.end() == ("FAILED", "2:0"), job.said()
    assert "error: LIPNEXT_PYTHON = /none/of/the/site: no such program" in job.said()
    mounted = (tmp_path / "mounted").read_text().splitlines()
    assert len(mounted) == 2 and all(line.endswith(f",{site}:{site}") for line in mounted)
