"""What is certified: the samples of the run, from where the run has them."""

import argparse
import shutil
from pathlib import Path

from sets_making import write_set

from lipnext_scale.certify.target import add_arguments, open_target
from lipnext_scale.recipe import load_recipe
from lipnext_scale.trainer import Trainer

SETTINGS = [
    "data.batch_size=4",
    "model.depth=1",
    "model.width=16",
    "model.image_size=8",
    "model.patch_size=2",
    "model.num_classes=7",
    "optim.epochs=1",
    "optim.warmup_epochs=0",
    "run.max_steps=1",
    "run.eval_every=0",
    "run.summary=false",
]


def test_copies_of_the_run_are_used_where_they_are(tmp_path: Path) -> None:
    """data.stage_dir of the run; on a machine without it the shards are read where they lie."""
    shards, node = write_set(tmp_path / "set", [5, 3]), tmp_path / "node"
    of_data = [f"data.train={shards}", f"data.test={shards}", f"data.stage_dir={node}"]
    Trainer(load_recipe(None, [*SETTINGS, *of_data, f"run.dir={tmp_path}/run"])).run()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--run", str(tmp_path / "run")])
    there = open_target(arguments)
    assert all(Path(s.path).is_relative_to(node) for s in there.test.catalog.shards)
    shutil.rmtree(node)
    here = open_target(arguments)
    assert all(Path(s.path).parent == tmp_path / "set" for s in here.test.catalog.shards)
    assert not node.exists() and here.identity() == there.identity()
