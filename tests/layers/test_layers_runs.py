"""Runs with every layer: trained, certified and attacked on the digits; two engines; refusals."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from distributed.engine_runs import KINDS, assert_parity, run_each, train
from PIL import Image
from training.small import final_state

from lipnext_scale import attack, certify, export, plan, predict
from lipnext_scale.attacks import Attacker, AttackSettings, hunt
from lipnext_scale.certification import Certifier
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import read_samples
from lipnext_scale.models.layers import FAMILIES
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import UserError

DIGITS = """
data.train=builtin:digits/train-*.tar.gz data.test=builtin:digits/test-*.tar.gz data.batch_size=64
data.workers=0 model.depth=2 model.width=32 model.image_size=8 model.patch_size=4
model.in_channels=1 loss.epsilon=0.3 loss.radius_max=1 loss.logit_scale=12 optim.epochs=5
optim.euclidean_lr=1e-2 optim.warmup_epochs=0.5 run.log_every=100 run.eval_every=0
run.watch_every=0 run.summary=false run.checkpoint_every=0
""".split()
Trained = Callable[[str], Path]


def recipe(directory: Path, *overrides: str):
    return load_recipe(None, [*DIGITS, f"run.dir={directory}", *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of a layer, made once."""

    @cache
    def run(layer: str) -> Path:
        directory = tmp_path_factory.mktemp(layer)
        Trainer(recipe(directory, f"model.layer={layer}")).run()
        return directory

    return run


@pytest.mark.parametrize("layer", FAMILIES)
def test_every_layer_learns_and_keeps_its_certificate(layer: str, trained: Trained) -> None:
    """No attack inside a radius changes a label; most do at eight times that."""
    certifier = Certifier.load(trained(layer))
    samples = read_samples("builtin:digits/test-*.tar.gz", "data.test")
    labels, radii = certifier(samples.images)
    right = labels == samples.labels
    assert right.double().mean() > 0.7
    assert (right & (radii > 0.05)).double().mean() > 0.5
    attacker = Attacker(certifier, AttackSettings(restarts=1, steps=10))
    targets = attacker.targets(samples.images[:60], torch.arange(60))
    assert not any(len(points.labels) for points in hunt(attacker, targets))
    beyond = attacker.attack("pgd", 0, targets, 8 * targets.radii, clip=False)
    assert beyond.changed.double().mean() > 0.5


@pytest.mark.slow
def test_every_command_takes_the_run(trained: Trained, tmp_path, capsys) -> None:
    layer = "sandwich"
    run = trained(layer)
    certify.main(["--run", str(run)])
    attack.main(["--run", str(run), "--samples", "6", "--steps", "3", "--restarts", "1"])
    file = tmp_path / "model.safetensors"
    export.main(["--run", str(run), "--out", str(file)])
    certify.main(["--model", str(file), "--data", "builtin:digits/test-*.tar.gz"])
    picture = tmp_path / "digit.png"
    samples = read_samples("builtin:digits/test-*.tar.gz", "data.test")
    Image.fromarray(samples.images[0, 0].numpy()).save(picture)
    predict.main(["--model", str(file), str(picture)])
    cpus = ["--gpu", "cpu", "--gpus-per-node", "2"]
    plan.main(["--config", "builtin:digits.yaml", *cpus, f"model.layer={layer}"])
    printed = capsys.readouterr().out
    assert printed.count("Lipschitz bound K") == 2 and "violations" not in printed
    assert f"LipNeXt L6W128 ({layer})" in printed


def test_a_stopped_run_continues(tmp_path) -> None:
    """To the same bits, whatever the layer's parameters are."""
    layer = ["model.layer=sll", "optim.epochs=2"]
    Trainer(recipe(tmp_path / "whole", *layer)).run()
    for last in (17, 44):
        Trainer(recipe(tmp_path / "halves", *layer, f"run.max_steps={last}")).run()
    whole, halves = (final_state(tmp_path / name) for name in ("whole", "halves"))
    assert {"model.blocks.1.mix2.A", "exp_avg.blocks.0.mix1.log_q"} <= whole.keys()
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(halves[name], value), name


SHARDED = {
    "cholesky": ["model.layer=cholesky"],
    "sandwich": ["model.layer=sandwich"],
    "lip_reg": ["model.layer=lip_reg", "model.blocks_per_bank=2"],
    "aol": ["model.layer=aol", "parallel.engine=ddp"],
    "convolution": ["model.layer=cayley", "model.kernel_size=3", "model.blocks_per_bank=2"],
    "neck": ["model.neck=dense", "model.neck_width=8", "model.neck_depth=1", "model.head=free"],
}


@pytest.mark.slow
def test_engines_train_as_one_process_does(tmp_path) -> None:
    """FSDP, whose ranks hold some blocks each, and DDP; to rounding, in float64."""
    on_two = run_each(2, tmp_path, SHARDED)
    for name, overrides in SHARDED.items():
        layers = ("model.layer", "model.kernel", "model.neck", "model.head")
        same = [key for key in overrides if key.startswith(layers)]
        alone = train(tmp_path / f"single {name}", *same)
        assert on_two[name].engine.startswith("ddp" if name == "aol" else "fsdp 1 × 2")
        assert_parity(on_two[name], alone, KINDS if name == "neck" else KINDS - {"buffer"})
        assert alone.losses[-1] < alone.losses[0]


def test_what_a_layer_does_not_have_is_refused(trained: Trained, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"model\.layer = 'caley': must be one of manifold, "):
        recipe(tmp_path, "model.layer=caley")
    for setting in ("parallel.weight_layout=row", "parallel.engine=deepspeed"):
        with pytest.raises(ConfigError, match=r"needs model\.layer = 'manifold', not 'bro'"):
            recipe(tmp_path, "model.layer=bro", setting)
    file, layer = tmp_path / "cpl.safetensors", "model.layer=cpl"
    export.main(["--run", str(trained("cpl")), "--out", str(file)])
    with pytest.raises(UserError, match="give the run or one of its checkpoints"):
        Trainer(recipe(tmp_path / "new", layer, f"run.init_from={file}"))
    model = Trainer(recipe(tmp_path / "new", layer, f"run.init_from={trained('cpl')}")).model
    learned = final_state(trained("cpl"))["slow.blocks.0.mix1.A"]
    assert torch.equal(model.groups[0].free["A"][0, 0], learned)
    with pytest.raises(UserError, match=r"another architecture \(model\.layer = 'cpl' there"):
        Trainer(recipe(tmp_path / "other", "model.layer=sll", f"run.init_from={trained('cpl')}"))
