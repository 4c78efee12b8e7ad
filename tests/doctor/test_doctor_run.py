"""A run that could not start, or not end, and what the doctor says mends it."""

from pathlib import Path

import pytest
from faults import DIGITS, mounted, small_recipe, the

from lipnext_scale.doctor import run
from lipnext_scale.doctor.environment import gpus
from lipnext_scale.recipe import load_recipe
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.trainer import Trainer

HUGE = ["model.width=65536", "model.depth=1024"]


def test_an_unknown_key_names_the_right_one():
    """The configuration's own errors are findings."""
    recipe, found = run.configuration(DIGITS, ["model.widht=64"], {})
    assert recipe is None
    assert (found.state, found.text) == ("wrong", "model.widht = 64")
    assert "did you mean model.width?" in found.mend


def test_a_batch_that_cannot_be_shared_names_the_sizes_that_can(tmp_path):
    """The next ones below and above."""
    recipe = load_recipe(DIGITS)
    assert run.batch(recipe, 4).state == "ok"
    found = run.batch(recipe, 3)
    assert found.state == "wrong" and found.mend == "data.batch_size=63 or data.batch_size=66"
    assert run.batch(recipe, 100).mend == "data.batch_size=100"


# ---- memory --------------------------------------------------------------------------------------


def test_a_model_too_large_for_the_machine_is_wrong():
    """Nothing of it is allocated to find out."""
    assert run.memory(load_recipe(DIGITS), 1, 1).state == "ok"
    found = run.memory(load_recipe(DIGITS, HUGE), 1, 1)
    assert found.state == "wrong" and "python -m lipnext_scale.plan" in found.mend


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shares_what_its_stage_says(stage):
    """Stage 1 the optimizer's state, 2 gradients too, 3 weights too."""
    one = load_recipe(DIGITS, ["parallel.engine=deepspeed", f"parallel.zero_stage={stage}"])
    alone, of_four = (run.memory_of_rank(one, ranks, ranks) for ranks in (1, 4))
    for least_stage, part in enumerate(("optimizer", "gradients", "parameters"), start=1):
        share = 4 if stage >= least_stage else 1
        assert getattr(of_four, part) == getattr(alone, part) // share


def test_shards_of_fsdp_are_counted():
    """More processes hold less each."""
    recipe = load_recipe(DIGITS, ["parallel.engine=fsdp"])
    one, four = (run.memory_of_rank(recipe, ranks, ranks) for ranks in (1, 4))
    assert four.kept < 0.4 * one.kept


# ---- run.dir -------------------------------------------------------------------------------------


def test_a_free_directory_stays_as_it_is(tmp_path):
    """The trial leaves nothing behind, not even the directory."""
    recipe = load_recipe(DIGITS, [f"run.dir={tmp_path / 'a' / 'b'}"])
    assert run.directory(recipe).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_directory_is_wrong(tmp_path):
    """As it would be for the run."""
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run"):
        found = run.directory(load_recipe(DIGITS, [f"run.dir={tmp_path / name}"]))
        assert found.state == "wrong" and "run.dir=" in found.mend, name


def test_a_directory_that_is_mounted_read_only_is_wrong(tmp_path):
    """Root's own rights do not help there."""
    with mounted(tmp_path / "sealed", "ro,size=1m") as sealed:
        found = run.directory(load_recipe(DIGITS, [f"run.dir={sealed / 'run'}"]))
    assert found.state == "wrong" and "Read-only file system" in found.text
    assert "run.dir=" in found.mend and "mount" in found.mend


def test_the_directory_of_another_run_is_wrong(tmp_path):
    """And that of the same run is right."""
    recipe = load_recipe(DIGITS, [f"run.dir={tmp_path}"])
    RunDirectory(tmp_path).open_for(recipe, [])
    assert "holds this run" in run.directory(recipe).text
    found = run.directory(load_recipe(DIGITS, [f"run.dir={tmp_path}", "run.seed=1"]))
    assert found.state == "wrong" and "run.seed" in found.text
    assert found.mend == "choose another run.dir or remove it"


# ---- disk ----------------------------------------------------------------------------------------


def test_too_little_disk_is_wrong(tmp_path):
    """A tmpfs of 2 MB, and checkpoints of 4."""
    with mounted(tmp_path / "small", "size=2m") as small:
        found = run.disk(load_recipe(DIGITS, [f"run.dir={small / 'run'}"]), [])
    assert found.state == "wrong" and "run.keep_checkpoints=1" in found.mend


def test_a_nearly_full_disk_is_told(tmp_path):
    """Two checkpoints of 4 MB and the one that is being written have 14 MB."""
    with mounted(tmp_path / "small", "size=14m") as small:
        found = run.disk(load_recipe(DIGITS, [f"run.dir={small / 'run'}"]), [])
    assert found.state == "warn" and "run.keep_checkpoints=1" in found.mend


def test_a_huge_model_finds_no_disk(tmp_path):
    """Where nothing can be mounted, too."""
    found = run.disk(load_recipe(DIGITS, [*HUGE, f"run.dir={tmp_path}"]), [])
    assert found.state == "wrong" and "TB" in found.text and "another run.dir" in found.mend


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ([], 3),  # 1,320 steps: those of 500, 1000 and the last
        (["run.checkpoint_every=100"], 3),  # two, and the one that is being written
        (["run.checkpoint_every=100", "run.keep_checkpoints=4"], 5),
        (["run.checkpoint_every=100", "run.keep_every=200"], 9),  # 200, 400, … 1200 beside them
        (["run.checkpoint_every=0"], 1),
        (["run.max_steps=10"], 1),
    ],
)
def test_checkpoints_are_counted_as_they_are_kept(settings, kept):
    """The most that are there at one time."""
    assert run.checkpoints_kept(load_recipe(DIGITS, settings), 1437) == kept


def test_the_size_of_a_checkpoint_is_that_of_a_real_one(tmp_path):
    """The estimate, against a checkpoint on the disk, which has headers beside the tensors."""
    recipe = small_recipe(tmp_path, "model.width=256", "run.max_steps=1", "run.eval_every=0")
    Trainer(recipe).run()
    newest = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    real = sum(file.stat().st_size for file in newest.glob("*.distcp"))
    assert run.checkpoint_bytes(recipe) == pytest.approx(real, rel=0.05)


# ---- devices -------------------------------------------------------------------------------------


def test_a_gpu_that_is_asked_for_and_not_there_is_wrong():
    """Without the wish it is only told."""
    import torch

    if torch.cuda.is_available() or Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    found = the(gpus(1, load_recipe(DIGITS, ["run.device=cuda"])), "gpu")
    assert found.state == "wrong" and "run.device=auto" in found.mend
    found = the(gpus(1, load_recipe(DIGITS)), "gpu")
    assert found.state == "warn" and "--gpus all" in found.mend
