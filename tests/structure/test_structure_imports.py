"""Imports point downwards (docs/design.md): read from the source itself."""

import ast

import pytest
from imports_of import PACKAGE, component, imports, is_under, modules, own_imports

# From bottom to top: a component imports those before it. Commands come last, and nothing imports
# them but tests and users.
LAYERS = [
    "utils",
    "manifold",
    "models",
    "losses",
    "optim",
    "checkpoint",
    "data",
    "distributed",
    "config",
    "certification",
    "attacks",
    "observe",
    "training",
    "planning",
    "checks",
    "studies",
]
COMMANDS = ["train", "certify", "attack", "predict", "compare", "study", "export"]
COMMANDS += ["doctor", "plan", "bench", "watch", "cli"]


def test_every_component_is_in_the_order():
    found = {component(name) for name in modules()} - {PACKAGE, "data_prep"}
    assert found == {*LAYERS, *COMMANDS}


def test_components_import_only_what_is_below_them():
    for module in modules():
        here = component(module)
        if here in (PACKAGE, "data_prep"):
            continue
        below = {*LAYERS[: LAYERS.index(here) + 1]} if here in LAYERS else {*LAYERS}
        for found in own_imports(module) - {PACKAGE, module}:
            assert component(found) in below, f"{module} imports {found}"


def test_no_cycles_between_modules():
    """Every module, commands included, comes after those that it imports. A package's own names
    are imported from its __init__, which re-exports them: that is not a cycle."""
    left = {name: own_imports(name) - {name} for name in modules()}
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    left = {
        name: {x for x in found if not (x in packages and is_under(name, x))}
        for name, found in left.items()
    }
    while left:
        bottom = {name for name, found in left.items() if not found & left.keys()}
        assert bottom, f"a cycle among {sorted(left)}"
        left = {name: found for name, found in left.items() if name not in bottom}


@pytest.mark.parametrize("package", ["manifold", "models", "losses", "data", "certification"])
def test_knows_nothing_of_processes(package):
    """Distribution is put on from outside: none of these imports torch.distributed."""
    found = [name for name in modules() if is_under(name, f"{PACKAGE}.{package}")]
    assert found
    for module in found:
        assert not {name for name in imports(module) if is_under(name, "torch.distributed")}, module
        tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if is_under(name, "torch.distributed")}, module


def test_data_prep_shares_the_shard_format_alone():
    """data_prep writes what data/ reads, and the package does not know it."""
    allowed = ("data_prep", "lipnext_scale.data", "lipnext_scale.utils")
    for module in modules():
        found = own_imports(module) - {PACKAGE}  # the package itself: its version
        if is_under(module, "data_prep"):
            assert all(any(is_under(x, name) for name in allowed) for x in found), module
        else:
            assert not any(is_under(x, "data_prep") for x in found), module
