"""Configuration keys that something reads."""

import ast
import dataclasses
import functools
from typing import get_type_hints

import pytest
from imports_of import modules

from lipnext_scale.recipe import Recipe


def sections(kind: type = Recipe, path: str = "") -> dict[str, type]:
    """Every dataclass of the configuration by its path, those inside others too."""
    found: dict[str, type] = {}
    for name, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            found[f"{path}{name}"] = inner
            found.update(sections(inner, f"{path}{name}."))
    return found


@functools.cache
def names_read() -> set[str]:
    """Attributes that the package reads anywhere but in the `__post_init__` that checks them."""
    found = set()
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
            for inner in ast.walk(node)
        }
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and id(node) not in checks
        }
    return found


@pytest.mark.parametrize(
    "key",
    [f"{s}.{field.name}" for s, kind in sections().items() for field in dataclasses.fields(kind)],
)
def test_every_configuration_key_is_read_somewhere(key):
    """A key that only its own check looks at would be accepted and ignored."""
    assert key.rsplit(".", 1)[1] in names_read()


def test_every_section_is_a_dataclass_that_checks_itself():
    """Wrong values are refused where they are defined; frozen, so they stay what was checked."""
    for name, kind in sections().items():
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen, name
        assert "__post_init__" in vars(kind), name
