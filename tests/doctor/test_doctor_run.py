"""A run that could not start, or not end, and what the doctor says fixes it."""

from pathlib import Path

import pytest
from faults import DIGITS, mounted, small_recipe, the

from lipnext_scale.checks.run import data, disk, examine_run, memory
from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.planning.fit import checkpoint_bytes
from lipnext_scale.training.trainer import Trainer

HUGE = ["model.width=65536", "model.depth=8"]


def test_every_mistake_is_a_finding_of_its_own(tmp_path):
    """Those of preflight: batch, device, engine, data and directory, with what would be right."""
    recipe = small_recipe(tmp_path, "run.device=cuda", "parallel.shard_size=2", "model.depth=2")
    (tmp_path / "data" / "train-000001.tar").unlink()
    (tmp_path / "run").write_text("")
    findings = examine_run(recipe, 3, 3)
    for check, text, fix in (
        ("batch", "data.batch_size = 4", "must be a multiple of 3 process"),
        ("device", "run.device = 'cuda'", "no GPU is visible here"),
        ("memory of the run", "parallel.shard_size = 2", "must divide the number of processes"),
        ("data", "train-000001.tar: is missing", "python -m data_prep.verify"),
        ("run.dir", "cannot be written", "choose another run.dir"),
    ):
        found = the(findings, check)
        assert found.state == "wrong" and text in found.text and fix in found.fix, found


def test_a_sound_run_has_nothing_wrong_and_stays_as_it_is(tmp_path):
    recipe = small_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    findings = examine_run(recipe, 2, 2)
    assert {f.state for f in findings} == {"ok"}
    assert "data.train: 12 samples in 2 shard(s)" in the(findings, "data").text
    assert sorted(tmp_path.rglob("*")) == before


# ---- memory --------------------------------------------------------------------------------------


def test_a_model_too_large_for_the_machine_is_wrong():
    """Nothing of it is allocated to find out."""
    found = memory(load_recipe(DIGITS, HUGE), 1, 1)
    assert found.state == "wrong" and "python -m lipnext_scale.plan" in found.fix


def test_what_cannot_be_walked_is_not_wrong():
    offloaded = ["parallel.engine=deepspeed", "parallel.offload_optimizer=true"]
    found = memory(load_recipe(DIGITS, offloaded), 1, 1)
    assert found.state == "ok" and "is not known" in found.text


# ---- data ----------------------------------------------------------------------------------------


def test_shards_without_an_index_are_a_warning(tmp_path):
    """They work, and start slowly."""
    recipe = small_recipe(tmp_path)
    for path in (tmp_path / "data").glob("train.index.*"):
        path.unlink()
    found = data(recipe)
    assert found.state == "warn"
    assert found.fix == f"python -m data_prep.index '{recipe.data.train}'"


def test_a_remote_set_is_not_copied(tmp_path):
    cache = tmp_path / "cache"
    remote = f"data.train=file://{tmp_path}/data/train-*.tar"
    found = data(small_recipe(tmp_path, remote, f"data.cache_dir={cache}"))
    assert found.text == f"2 remote shards, which a run copies into {cache}"
    assert not cache.exists()


# ---- disks ---------------------------------------------------------------------------------------


def in_directory(path: Path, *overrides: str) -> Recipe:
    return load_recipe(DIGITS, [f"run.dir={path}", *overrides])


def test_the_directory_of_another_run_is_wrong(tmp_path):
    """And that of the same run is right."""
    RunDirectory(tmp_path).open_for(in_directory(tmp_path), [])
    assert "holds this run" in the(examine_run(in_directory(tmp_path), 1, 1), "run.dir").text
    found = the(examine_run(in_directory(tmp_path, "run.seed=1"), 1, 1), "run.dir")
    assert found.state == "wrong" and "run.seed" in found.text
    assert "choose another run.dir" in found.fix


def test_too_little_disk_is_wrong(tmp_path):
    """Two checkpoints of 4 MB and the one that is being written have 2 MB, or 14 MB."""
    for room, state in (("2m", "wrong"), ("14m", "warn")):
        with mounted(tmp_path / room, f"size={room}") as small:
            found = disk(in_directory(small / "run"))
        assert found.state == state and "run.keep_checkpoints=1" in found.fix
    found = disk(in_directory(tmp_path, *HUGE))
    assert found.state == "wrong" and "TB" in found.text


def test_the_size_of_a_checkpoint_is_that_of_a_real_one(tmp_path):
    """The real one has headers beside the tensors."""
    recipe = small_recipe(tmp_path, "model.width=256", "run.max_steps=1", "run.eval_every=0")
    Trainer(recipe).run()
    newest = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    real = sum(file.stat().st_size for file in newest.glob("*.distcp"))
    assert checkpoint_bytes(recipe) == pytest.approx(real, rel=0.05)
