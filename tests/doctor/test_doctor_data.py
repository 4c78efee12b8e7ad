"""Shards that are missing, damaged or not what the model takes, and what mends them."""

from argparse import Namespace

from faults import mounted, small_recipe, the

from lipnext_scale.data import DataSets
from lipnext_scale.doctor.__main__ import examine_run
from lipnext_scale.doctor.network import Launch
from lipnext_scale.doctor.run import room_for_copies, shards
from lipnext_scale.trainer import Trainer

VERIFY = "python -m data_prep.verify"


def test_whole_sets_are_counted(tmp_path):
    """And the run is said to compare their checksums."""
    findings, catalogs = shards(small_recipe(tmp_path))
    assert [f.state for f in findings] == ["ok", "ok", "ok"]
    assert "12 samples in 2 shards" in the(findings, "data.train").text
    assert "the run compares them" in the(findings, "checksums").text
    assert [len(catalog) for catalog in catalogs] == [12, 4]


def test_a_missing_shard_is_named(tmp_path):
    """One that the index lists, of several; the other sets are still looked at."""
    recipe = small_recipe(tmp_path)
    (tmp_path / "data" / "train-000001.tar").unlink()
    findings, catalogs = shards(recipe)
    found = the(findings, "data.train")
    assert found.state == "wrong" and "train-000001.tar: is missing" in found.text
    assert found.mend
    assert the(findings, "data.test").state == "ok" and len(catalogs) == 1


def test_no_shards_at_all_name_the_pattern(tmp_path):
    """The key is what is wrong."""
    recipe = small_recipe(tmp_path, f"data.train={tmp_path}/nowhere/train-*.tar")
    found = the(shards(recipe)[0], "data.train")
    assert found.state == "wrong" and "data.train = " in found.text and "no shard" in found.text
    assert found.mend.startswith("set data.train=")


def test_a_truncated_index_is_told_how_to_be_written_anew(tmp_path):
    """Half of the records are gone."""
    recipe = small_recipe(tmp_path)
    index = tmp_path / "data" / "train.index.npy"
    index.write_bytes(index.read_bytes()[:100])
    found = the(shards(recipe)[0], "data.train")
    assert found.state == "wrong" and str(index) in found.text
    assert f"{VERIFY} {tmp_path / 'data'}" in found.mend
    assert "python -m data_prep.index --force" in found.mend


def test_an_index_that_is_none_is_told(tmp_path):
    """A file that was cut off."""
    recipe = small_recipe(tmp_path)
    (tmp_path / "data" / "train.index.json").write_text('{"name": "tra')
    found = the(shards(recipe)[0], "data.train")
    assert found.state == "wrong" and "is not an index" in found.text
    assert "python -m data_prep.index" in found.mend


def test_a_truncated_shard_is_named(tmp_path):
    """Its size is compared, whatever its checksum."""
    recipe = small_recipe(tmp_path)
    shard = tmp_path / "data" / "test-000000.tar"
    shard.write_bytes(shard.read_bytes()[:1024])
    found = the(shards(recipe)[0], "data.test")
    assert found.state == "wrong" and f"{shard}: has 1024 bytes" in found.text
    assert VERIFY in found.mend


def test_other_images_than_the_model_takes_are_wrong(tmp_path):
    """Labels and sizes are looked at."""
    found = the(shards(small_recipe(tmp_path, "model.num_classes=3"))[0], "data.train")
    assert found.state == "wrong" and "labels from 0 to 6" in found.text
    assert found.mend.startswith("set model.num_classes=")


def test_shards_without_an_index_are_told_of_it(tmp_path):
    """They work, and start slowly."""
    recipe = small_recipe(tmp_path)
    for path in (tmp_path / "data").glob("train.index.*"):
        path.unlink()
    found = the(shards(recipe)[0], "data.train")
    assert found.state == "warn"
    assert found.mend == f"python -m data_prep.index '{recipe.data.train}'"


def test_a_run_that_does_not_compare_is_told_of_it(tmp_path):
    """data.verify = false."""
    found = the(shards(small_recipe(tmp_path, "data.verify=false"))[0], "checksums")
    assert (found.state, found.mend) == ("warn", "data.verify=true")


def test_what_a_run_has_checked_is_known(tmp_path):
    """Its next start reads nothing again; but a shard that was written to since is new."""
    recipe = small_recipe(tmp_path, "run.max_steps=1", "run.eval_every=0")
    Trainer(recipe).run()
    assert "all 3 shards were found whole" in the(shards(recipe)[0], "checksums").text
    shard = tmp_path / "data" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes())
    assert the(shards(recipe)[0], "checksums").text.startswith("1 shards")


def test_a_remote_set_is_not_copied(tmp_path):
    """Only listed: opening it would bring all of it here."""
    pattern = f"file://{tmp_path}/data/train-*.tar"
    cache = tmp_path / "cache"
    recipe = small_recipe(tmp_path, f"data.train={pattern}", f"data.cache_dir={cache}")
    found = the(shards(recipe)[0], "data.train")
    assert found.state == "ok" and found.text.startswith("2 shards elsewhere")
    assert found.text.endswith(f"copies them into {cache}")
    staged = small_recipe(tmp_path, f"data.train={pattern}", f"data.stage_dir={tmp_path}/node")
    assert the(shards(staged)[0], "data.train").text.endswith(f"into {tmp_path}/node")
    assert not cache.exists()


# ---- room for copies -----------------------------------------------------------------------------


def test_without_copies_there_is_nothing_to_say(tmp_path):
    """Shards of this machine are read where they are."""
    assert room_for_copies(small_recipe(tmp_path)) == []
    assert room_for_copies(small_recipe(tmp_path, "data.cache_dir=/nowhere")) == []


def test_a_stage_directory_without_room_is_wrong(tmp_path):
    """Three shards of 51 kB in all, and disks of 49 and 61 kB."""
    for size, state in (("48k", "wrong"), ("60k", "warn")):
        with mounted(tmp_path / size, f"size={size}") as small:
            recipe = small_recipe(tmp_path, f"data.stage_dir={small / 'stage'}")
            found = the(room_for_copies(recipe), "data.stage_dir")
            assert found.state == state and "another data.stage_dir=" in found.mend
            assert found.text.startswith("3 of 3 shards are to be copied, 51.2 kB; ")
            assert list(small.iterdir()) == []


def test_what_has_been_copied_needs_no_more_room(tmp_path):
    """But a shard that was written to since is copied again."""
    recipe = small_recipe(tmp_path, f"data.stage_dir={tmp_path / 'stage'}")
    DataSets(recipe.data, 8, 3, 7)
    assert "0 of 3 shards are to be copied" in the(room_for_copies(recipe), "data.stage_dir").text
    shard = tmp_path / "data" / "train-000000.tar"
    shard.write_bytes(shard.read_bytes())
    found = the(room_for_copies(recipe), "data.stage_dir")
    assert found.state == "ok" and "1 of 3 shards are to be copied, 20.5 kB" in found.text


def test_a_stage_directory_that_cannot_be_written_is_wrong(tmp_path):
    """Root's own rights do not help there."""
    with mounted(tmp_path / "sealed", "ro,size=1m") as sealed:
        recipe = small_recipe(tmp_path, f"data.stage_dir={sealed / 'stage'}")
        found = the(room_for_copies(recipe), "data.stage_dir")
    assert found.state == "wrong" and "Read-only file system" in found.text


def test_remote_shards_need_room_in_the_cache(tmp_path):
    """They tell their size; a pipe does not."""
    remote = f"data.train=file://{tmp_path}/data/train-*.tar"
    with mounted(tmp_path / "cache", "size=36k") as cache:
        recipe = small_recipe(tmp_path, remote, f"data.cache_dir={cache}")
        found = the(room_for_copies(recipe), "data.cache_dir")
    assert found.state == "wrong" and "2 of 2 shards are to be copied, 41.0 kB" in found.text
    piped = small_recipe(tmp_path, "data.train=pipe:cat x", f"data.cache_dir={tmp_path}/cache")
    found = the(room_for_copies(piped), "data.cache_dir")
    assert "1 of 1 shards are to be copied, 0.0 kB and 1 whose size is not told" in found.text


def test_the_command_looks_at_the_room_for_copies(tmp_path):
    """With all else of a run."""
    recipe = small_recipe(tmp_path, f"data.stage_dir={tmp_path / 'stage'}")
    found = examine_run(recipe, Launch(), Namespace(ranks=0, ranks_per_node=0))
    assert the(found, "data.stage_dir").state == "ok"
