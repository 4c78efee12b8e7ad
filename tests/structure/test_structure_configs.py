"""The shipped configurations: they build, inherit, and have no key that is ignored."""

import ast
import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from imports_of import modules

from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.config import ConfigError, as_float, read_yaml, to_dict

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
SHARED = sorted((CONFIGS / "shared").glob("*.yaml"))
# The paper's parameter counts for L32, by width: in R and M alone.
PAPER = {1024: 64 << 20, 2048: 256 << 20, 4096: 1024 << 20, 5792: 2048 << 20}
OURS = ("digits", "cifar10_small", "cifar10_night", "own_images")  # not the paper's


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = leaves(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
        found.update(inner)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration(path):
    """It builds without memory, takes images of its size, and is of the paper's size."""
    recipe = load_recipe(str(path))
    config = recipe.model
    with torch.device("meta"):
        model = LipNeXt(config)
        images = torch.empty(2, config.in_channels, config.image_size, config.image_size)
        assert model(images).shape == (2, config.num_classes)
    banks = sum(p.numel() for name, p in model.named_parameters() if name.endswith(".bank"))
    assert banks == config.bank_parameters == 2 * config.depth * config.width**2
    if path.stem not in OURS:
        assert config.depth == 32 and banks == pytest.approx(PAPER[config.width], rel=1e-3)
    assert recipe.run.dir == f"runs/{path.stem}"  # no two share one
    real, synthetic = recipe.data.batch_parts()
    assert not synthetic or recipe.data.augment == recipe.data.synthetic.augment
    # Each value of the YAML and its bases is found under the same key, as the number it says.
    resolved = leaves(to_dict(recipe))
    for key, value in leaves(read_yaml(path)).items():
        assert resolved[key] == (as_float(value) if isinstance(resolved[key], float) else value)


def test_every_shared_file_is_a_base_and_no_configuration_of_its_own():
    """What no configuration inherits from would be edited in vain."""
    bases = {
        (path.parent / base).resolve()
        for path in SHIPPED + SHARED
        if (base := yaml.safe_load(path.read_text(encoding="utf-8")).get("base"))
    }
    assert bases >= {path.resolve() for path in SHARED}
    for path in SHARED:
        with pytest.raises(ConfigError, match="is required"):
            load_recipe(str(path))


def sections(kind: type = Recipe, path: str = "") -> dict[str, type]:
    """Every dataclass of the configuration by its path, those inside others too."""
    found: dict[str, type] = {}
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            found[f"{path}{name}"] = inner
            found.update(sections(inner, f"{path}{name}."))
    return found


def names_read() -> set[str]:
    """Attributes that the package reads anywhere but in the `__post_init__` that checks them."""
    found = set()
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                node.body = []
        found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


def test_every_configuration_key_is_checked_and_read():
    """A key that only its own check reads would be accepted and ignored."""
    read = names_read()
    for name, kind in sections().items():
        assert kind.__dataclass_params__.frozen and "__post_init__" in vars(kind), name
        for field in dataclasses.fields(kind):
            assert field.name in read, f"{name}.{field.name}"
