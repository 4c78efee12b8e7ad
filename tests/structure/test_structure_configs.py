"""The shipped configurations: complete, of the paper's sizes, and with no key that is ignored."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lipnext_scale.config import ConfigError, as_float, from_dict, read_yaml, to_dict
from lipnext_scale.models import LipNeXt
from lipnext_scale.recipe import Recipe, load_recipe

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
SHARED = sorted((CONFIGS / "shared").glob("*.yaml"))
MEBI = 2**20
# The paper's parameter counts for L32, by width: in R and M alone.
PAPER = {1024: 64 * MEBI, 2048: 256 * MEBI, 4096: 1024 * MEBI, 5792: 2048 * MEBI}
PAPER_MODELS = {
    "cifar10_w1024": 1024,
    "cifar10_w2048": 2048,
    "cifar100_w1024": 1024,
    "cifar100_w2048": 2048,
    "tiny_imagenet_w1024": 1024,
    "tiny_imagenet_w2048": 2048,
    "imagenet_1b": 4096,
    "imagenet_1b_eps1": 4096,
    "imagenet_2b": 5792,
    "imagenet_2b_eps1": 5792,
    "cifar10_w2048_edm": 2048,
    "cifar100_w2048_edm": 2048,
    "imagenet_1b_edm2": 4096,
    "imagenet_2b_edm2": 5792,
}

each_config = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        inner = leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
        found.update(inner)
    return found


@each_config
def test_builds_on_the_meta_device_with_the_right_size(path):
    """The banks hold 2·depth·width² parameters, and not one of all parameters is materialised."""
    recipe = load_recipe(str(path))
    with torch.device("meta"):
        model = LipNeXt(recipe.model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    banks = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".bank"))
    assert banks == 2 * recipe.model.depth * recipe.model.width**2 == recipe.model.bank_parameters
    others = sum(p.numel() for p in model.parameters()) - banks
    assert others < 0.08 * banks  # biases, positions and the head


@each_config
def test_forward_has_the_shape_of_its_classes(path):
    """Images of the configured size go through, still without a number computed."""
    config = load_recipe(str(path)).model
    with torch.device("meta"):
        logits = LipNeXt(config)(
            torch.empty(2, config.in_channels, config.image_size, config.image_size)
        )
    assert logits.is_meta and logits.shape == (2, config.num_classes)


@pytest.mark.parametrize("name, width", PAPER_MODELS.items())
def test_sizes_are_those_of_the_paper(name, width):
    """L32 at its width, exactly the paper's count, and for W5792 two billion to a thousandth."""
    model = load_recipe(str(CONFIGS / f"{name}.yaml")).model
    assert (model.depth, model.width) == (32, width)
    assert model.bank_parameters == pytest.approx(PAPER[width], rel=1e-3 if width == 5792 else 0)


def test_every_shipped_configuration_is_known_here():
    """A new file is to be added to the table above, so that its size is checked."""
    assert {path.stem for path in SHIPPED} == {"digits", "cifar10_small", *PAPER_MODELS}


@pytest.mark.parametrize(
    "name, side, tokens, classes",
    [
        ("cifar10_w1024", 32, 16, 10),
        ("cifar100_w2048", 32, 16, 100),
        ("tiny_imagenet_w1024", 64, 32, 200),
        ("imagenet_2b", 224, 14, 1000),
    ],
)
def test_images_are_those_of_the_data_set(name, side, tokens, classes):
    """The sizes, token grids and classes that the paper has."""
    model = load_recipe(str(CONFIGS / f"{name}.yaml")).model
    assert (model.image_size, model.in_channels, model.num_classes) == (side, 3, classes)
    assert model.image_size // model.patch_size == tokens


@each_config
def test_run_directories_are_named_after_the_file(path):
    """No two configurations share a run directory."""
    assert load_recipe(str(path)).run.dir == f"runs/{path.stem}"


# --- no key is ignored ------------------------------------------------------------------------


@each_config
def test_every_key_has_its_value_in_the_recipe(path):
    """Each value of the YAML and its bases is found under the same key, as the number it says."""
    resolved = leaves(to_dict(load_recipe(str(path))))
    written = leaves(read_yaml(path))
    assert len(written) > 10
    for key, value in written.items():
        kept = resolved[key]
        assert kept == (as_float(value) if isinstance(kept, float) else value), key


@pytest.mark.parametrize("path", SHIPPED + SHARED, ids=lambda path: path.stem)
def test_every_key_of_a_file_is_a_key_of_the_recipe(path):
    """Renamed, every single key is refused under its new name: none of them is skipped over."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values.pop("base", None)
    whole = to_dict(load_recipe(str(SHIPPED[0])))
    for *sections, name in leaves(values):
        broken = deepcopy(whole)
        section = broken
        for part in sections:
            section = section[part]
        section[f"{name}_"] = section.pop(name)
        with pytest.raises(ConfigError) as error:
            from_dict(Recipe, broken)
        assert error.value.key == ".".join([*sections, f"{name}_"])


@pytest.mark.parametrize(
    "name, parts",
    [
        ("cifar10_w2048", (256, 0)),
        ("cifar10_w2048_edm", (64, 192)),
        ("cifar100_w2048_edm", (64, 192)),
        ("imagenet_2b", (256, 0)),
        ("imagenet_1b_edm2", (256, 256)),
        ("imagenet_2b_edm2", (256, 256)),
    ],
)
def test_batches_have_the_recipes_mixture(name, parts):
    """(real, synthetic) of the batch, and both augmented alike."""
    data = load_recipe(str(CONFIGS / f"{name}.yaml")).data
    assert data.batch_parts() == parts
    assert not parts[1] or data.augment == data.synthetic.augment


def test_every_shared_file_is_somebodys_base():
    """What no configuration inherits from would be edited in vain."""
    used = set()
    for path in SHIPPED + SHARED:
        base = yaml.safe_load(path.read_text(encoding="utf-8")).get("base")
        if base is not None:
            used.add((path.parent / base).resolve())
    assert used >= {path.resolve() for path in SHARED}


def test_a_base_is_no_configuration_of_its_own():
    """A shared part lacks what a run needs, so nobody trains it by mistake."""
    for path in SHARED:
        with pytest.raises(ConfigError, match="is required"):
            load_recipe(str(path))
