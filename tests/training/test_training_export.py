"""Exports hold the slow weights under names that do not depend on the banks."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small import assert_same, final_state, small_recipe

from data_prep.digits import png_bytes, write_shard
from lipnext_scale.certification import lipschitz_bound, load_model
from lipnext_scale.certify import main as certify_main
from lipnext_scale.checkpoint import CheckpointWriter, StateShard
from lipnext_scale.checkpoint.exports import load_export, save_export
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.export import main
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import merge, to_dict
from lipnext_scale.utils.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in the middle of a Lookahead period, where fast and slow weights differ."""
    directory = tmp_path_factory.mktemp("export") / "run"
    Trainer(small_recipe(directory, "run.max_steps=8")).run()
    return directory


def test_a_run_and_its_export_are_the_same_model(run, tmp_path):
    main(["--run", str(run), "--out", str(tmp_path / "model.safetensors")])
    from_run, from_export = load_model(run), load_model(tmp_path / "model.safetensors")
    assert_same(dict(from_run.state_dict()), dict(from_export.state_dict()))


def test_the_slow_weights_are_exported(run):
    """Not the fast ones that training goes on with; W = M·Rᵀ is rounded once in every export."""
    trainer = Trainer(small_recipe(run, "run.max_steps=8"))
    exported = load_model(run)
    assert not torch.equal(trainer.model.groups[0].bank, exported.groups[0].bank)
    with trainer.optimizers.slow_weights():
        shown, bank = dict(trainer.model.state_dict()), trainer.model.groups[0].bank
        factor = trainer.optimizers.manifold.state[bank]["factor"]
        once = (factor.double() @ bank.detach()[:, 0].double().mT).float()
        torch.testing.assert_close(bank.detach()[:, 1], once, rtol=0, atol=1e-6)
        shown["groups.0.bank"] = torch.stack([bank.detach()[:, 0], once], 1)
        assert_same(shown, dict(exported.state_dict()))


def test_names_and_values_do_not_depend_on_the_bank_size(tmp_path):
    config = LipNeXtConfig(5, 16, 8, 2, 1, 10)
    files = []
    for per_bank in (0, 1, 2):
        model = LipNeXt(dataclasses.replace(config, blocks_per_bank=per_bank), seed=3)
        save_export(model, tmp_path / f"{per_bank}.safetensors")
        files.append((tmp_path / f"{per_bank}.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]
    names = {f"blocks.{i}.{part}" for i in range(5) for part in ("R", "W", "bias", "pos")}
    assert set(load_file(tmp_path / "0.safetensors")) == names | {"head.weight", "head.bias"}
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(load_export(tmp_path / "1.safetensors")(x), model(x))


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing"])
def test_a_broken_export_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    model = LipNeXt(LipNeXtConfig(1, 16, 8, 2, 1, 10), seed=0)
    save_export(model, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"w": torch.zeros(2)}, path)
    else:
        path.unlink()
    with pytest.raises(UserError, match="model.safetensors"):
        load_model(path)


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        ("export", "model: {width: 32}", "step-000000008: "),
        ("certify", "model: {width: 2}", "config.yaml: model.width = 2"),
        ("certify", "data: {test: TEST}", "10: data.test has labels from 0 to 11"),
    ],
)
def test_a_run_that_was_tampered_with_is_refused_in_one_line(
    run, tmp_path, capsys, line, said, command
):
    copied = tmp_path / "run"
    shutil.copytree(run, copied, symlinks=True)
    image = png_bytes(np.zeros((8, 8), dtype=np.uint8))
    write_shard(tmp_path / "test.tar.gz", [(f"{i}", image, i) for i in range(12)])
    change = yaml.safe_load(line.replace("TEST", str(tmp_path / "test.tar.gz")))
    merged = merge(yaml.safe_load((copied / "config.yaml").read_text()), change)
    (copied / "config.yaml").write_text(yaml.safe_dump(merged))
    with pytest.raises(SystemExit) as stopped:
        if command == "export":
            main(["--run", str(copied), "--out", str(tmp_path / "x.safetensors")])
        else:
            certify_main(["--run", str(copied)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(("factor", "outcome"), [(1.01, None), (float("nan"), "not finite")])
def test_weights_that_left_the_manifold_are_judged_by_their_bound(run, tmp_path, factor, outcome):
    """Stored matrices 1 % too large load and get the K they deserve; NaN gets none."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied, symlinks=True)
    state = final_state(copied)
    facts = {key: state[key] for key in ("loader", "optimizers", "rng")}
    shards = {
        name: StateShard.full(value * factor if name[-2:] in (".R", ".M") else value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    CheckpointWriter(copied / "checkpoints", keep_last=1).save(9, shards, facts, asynchronous=False)
    model = load_model(copied)
    if outcome is None:
        # Two blocks of the product form: R twice and M once in each, six factors.
        assert 1.01**6 * (1 - 1e-6) <= lipschitz_bound(model) <= 1.01**6 * 1.001
    else:
        with pytest.raises(UserError, match=outcome):
            lipschitz_bound(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depth": 3}, r"model\.depth = 3 there, 2 here\); model\.num_classes alone may differ"),
        ({"activation": "minmax"}, r"model\.activation = 'minmax' there"),
        ({}, r"blocks\.1\.W is not orthogonal"),
    ],
)
def test_a_run_does_not_start_from_an_export_that_does_not_fit(tmp_path, change, said):
    """Another architecture, or weights that are no start for the optimizer."""
    recipe = small_recipe(tmp_path / "run", f"run.init_from={tmp_path / 'export'}")
    model = LipNeXt(dataclasses.replace(recipe.model, **change), seed=1)
    if not change:
        with torch.no_grad():
            model.groups[0].bank[1, 1] *= 1.5
    save_export(model, tmp_path / "export")
    with pytest.raises(UserError, match=said):
        Trainer(recipe)
    assert not (tmp_path / "run").exists()  # free for the corrected command


def test_a_suffix_that_is_not_written_is_refused(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--run", str(run), "--out", str(tmp_path / "x.pt")])
    said = f"error: --out {tmp_path}/x.pt: must be a file NAME.safetensors, or a directory"
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith(said)
    assert not list(tmp_path.iterdir())


def test_a_run_starts_from_another(run, tmp_path, capsys):
    """Longer, from its weights; with other classes from its backbone, and the first line says so"""
    longer = ["optim.epochs=6", f"run.init_from={run}"]
    with pytest.raises(UserError, match=rf"optim.epochs = 4 there, 6 here.*run.init_from={run} to"):
        Trainer(small_recipe(run, "optim.epochs=6"))
    trainer = Trainer(small_recipe(tmp_path / "longer", *longer))
    close = {"rtol": 0, "atol": 1e-5}  # M is W·R, and W is M·Rᵀ again
    origin = dict(load_model(run).state_dict())
    torch.testing.assert_close(dict(trainer.model.state_dict()), origin, **close)
    classes = ["model.num_classes=12", "run.max_steps=1"]
    trainer = Trainer(small_recipe(tmp_path / "other", f"run.init_from={run}", *classes))
    torch.testing.assert_close(trainer.model.groups[0].bank, origin["groups.0.bank"], **close)
    fresh = LipNeXt(trainer.model.config, seed=0).head
    assert_same(dict(trainer.model.head.state_dict()), dict(fresh.state_dict()))
    trainer.run()
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(f"; backbone of {run}, and a new head: 12 classes, not 10")


def test_an_export_as_a_directory(run, tmp_path):
    """model.safetensors, and a config.json for people."""
    out = tmp_path / "digits"
    main(["--run", str(run), "--out", str(out)])
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(dict(load_model(out).state_dict()), dict(load_model(run).state_dict()))


# --- from when a network stored M, W = M·Rᵀ ---------------------------------------------------


@pytest.mark.parametrize("parametrisation", ["product", "merged"])
def test_an_older_export_is_the_same_function(tmp_path, parametrisation):
    """One with M computes with W = M·Rᵀ; a run can start from it, in either form."""
    recipe = small_recipe(tmp_path / "run", f"run.init_from={tmp_path / 'old.safetensors'}")
    model, generator = LipNeXt(recipe.model, seed=1), torch.Generator().manual_seed(0)
    save_export(model, tmp_path / "new.safetensors")
    tensors = load_file(tmp_path / "new.safetensors")
    with torch.no_grad():
        for index, (rotation, weight) in enumerate(model.groups[0].bank):
            second = random_orthogonal(16, generator).contiguous()
            weight.copy_(second @ rotation.mT if parametrisation == "product" else second)
            del tensors[f"blocks.{index}.W"]
            letter = "M" if parametrisation == "product" else "W"
            tensors[f"blocks.{index}.{letter}"] = second
    old = json.dumps({**to_dict(recipe.model), "parametrisation": parametrisation})
    save_file(tensors, tmp_path / "old.safetensors", metadata={"model": old})
    loaded, images = load_export(tmp_path / "old.safetensors"), torch.rand(4, 1, 8, 8)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(loaded(images), model(images), **close)
    trainer = Trainer(recipe)
    torch.testing.assert_close(trainer.model.groups[0].bank, model.groups[0].bank, **close)
    # Stored anew it is an export of today.
    save_export(loaded, tmp_path / "again.safetensors")
    again = load_export(tmp_path / "again.safetensors")
    assert_same(dict(again.state_dict()), dict(loaded.state_dict()))


@pytest.mark.parametrize("parametrisation", ["product", "merged"])
def test_an_older_run_has_its_parametrisation_in_the_model(run, tmp_path, parametrisation):
    """model.parametrisation of its config.yaml is optim.parametrisation."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied, symlinks=True)
    values = yaml.safe_load((copied / "config.yaml").read_text())
    assert values["optim"].pop("parametrisation") == "product"
    values["model"]["parametrisation"] = parametrisation
    (copied / "config.yaml").write_text(yaml.safe_dump(values))
    recipe, before = (load_recipe(str(path / "config.yaml")) for path in (copied, run))
    optim = dataclasses.replace(before.optim, parametrisation=parametrisation)
    assert recipe == dataclasses.replace(before, optim=optim)
    if parametrisation == "product":
        assert_same(dict(load_model(copied).state_dict()), dict(load_model(run).state_dict()))
