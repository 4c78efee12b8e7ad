"""A run under fire ends with the same bits: four processes, twenty faults."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from elastic_run import STEPS, Chaos, ElasticRun
from small_disk import mounted
from training.small import assert_same, final_state

pytestmark = pytest.mark.slow
SEED = 2026
# Of each kind so many; the two checkpoints that are torn at a kill are two more.
KINDS = ["kill_data_worker"] * 2 + ["kill_and_tear"] * 4 + ["terminate"] * 2
FULL_DISKS = 4


@dataclass
class Fire:
    """A run that has come to its end through its faults, and one without any."""

    run: ElasticRun
    straight: ElasticRun
    chaos: Chaos
    on_small_disk: bool


@pytest.fixture(scope="module")
def fire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fire]:
    """On a file system of 16 MB, or where mounting is not permitted without full disks."""
    place = tmp_path_factory.mktemp("chaos")
    disk = place / "disk"
    disk.mkdir()
    with mounted(disk, "size=16m") as done:
        straight = ElasticRun(place / "straight", place / "straight.log")
        run = ElasticRun(disk / "run", place / "log")
        chaos = Chaos(run, SEED)
        kinds = [*KINDS, *(["fill_disk" if done else "kill_rank"] * FULL_DISKS)]
        random.Random(SEED).shuffle(kinds)
        try:
            straight.start()
            straight.wait_for_end()
            run.start()
            for kind in kinds:
                run.wait_for_progress()
                getattr(chaos, kind)()
            run.wait_for_end()
        finally:
            straight.end()
            run.end()
            print("\n".join(chaos.done))
        yield Fire(run, straight, chaos, done)


def test_a_run_under_fire_ends_with_the_same_bits(fire):
    """Weights, optimizer state and place are those of an undisturbed run, and every restart went
    on from the newest intact checkpoint: nothing was lost but the steps since."""
    assert len(fire.chaos.done) >= 20
    assert fire.run.continued_at() == fire.chaos.expected
    assert final_state(fire.run.directory)["step"] == STEPS
    assert_same(final_state(fire.run.directory), final_state(fire.straight.directory))


def test_full_disks_were_among_its_faults(fire):
    if not fire.on_small_disk:
        pytest.skip("a tmpfs cannot be mounted here: the run was killed more often instead")
    assert fire.chaos.done.count("disk full") == FULL_DISKS
    assert fire.run.said().count("No space left on device") >= FULL_DISKS
