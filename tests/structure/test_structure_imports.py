"""Imports point downwards (DESIGN.md): who may know of whom, read from the source itself."""

import ast

import pytest
from imports_of import (
    PACKAGE,
    component_imports,
    imported_by,
    imports,
    is_under,
    module_of,
    modules,
    own_imports,
)

# component → all that it may import of the package.
ALLOWED = {
    "errors": set(),
    "cpu": set(),
    "manifold": set(),
    "config": {"errors"},
    "launch_environment": {"config", "errors"},
    "models": {"manifold", "config", "errors"},
    "losses": {"config"},
    "progress": set(),
    "data": {"config", "errors", "files", "cpu"},
    "files": set(),
    "agreement": {"errors"},
    "heartbeat": set(),
    "checkpoint": {"errors", "files", "agreement", "heartbeat"},
}
# component → what it must not import, whatever else.
FORBIDDEN = {
    "optim": {"data", "parallel", "trainer", "certify", "train"},
    "parallel": {"trainer", "train", "certify", "data", "run_state", "weights"},
    "recipe": {"trainer", "train", "run_directory"},
    "certify": {"trainer", "train"},
    "attack": {"trainer", "train"},
    "export": {"trainer", "train", "parallel", "data", "certify"},
    "metrics": {"trainer", "train"},
    "preflight": {"trainer", "train"},
    "observe": {"trainer", "train", "run_state", "weights", "attack", "export"},
    "faults": {"trainer", "train", "run_state", "run_directory"},
    "doctor": {"trainer", "train", "certify", "attack", "run_state"},
}


def test_the_reader_of_imports_finds_every_form():
    """Absolute, relative, aliased, inside functions: what the other tests stand on."""
    source = (
        "import a.b as c\nfrom d import e, f\nfrom . import g\nfrom .h import i\nfrom .. import j\n"
        "def function():\n    from k.l import m\n"
    )
    assert imported_by(source, "p.q.r") == {
        *("a.b", "d.e", "d.f", "p.q.g", "p.q.h.i", "p.j", "k.l.m"),
    }
    assert imported_by("from . import a\nfrom .b import c", "p.q", is_package=True) == {
        *("p.q.a", "p.q.b.c"),
    }
    assert (
        module_of("lipnext_scale.manifold.geometry.polar_retract")
        == "lipnext_scale.manifold.geometry"
    )
    assert module_of("torch.nn") is None
    assert "lipnext_scale.trainer" in own_imports("lipnext_scale.train")
    assert "manifold" in component_imports()["optim"]


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_only_what_is_below(name):
    """The lower components know no more of the package than this."""
    assert component_imports()[name] <= ALLOWED[name]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_does_not_import_what_is_above(name):
    """The upper components may grow, but not upwards."""
    assert not component_imports()[name] & FORBIDDEN[name]


@pytest.mark.parametrize("package", ["manifold", "models", "losses", "data", "certify"])
def test_knows_nothing_of_processes(package):
    """Distribution is put on from outside: none of these imports torch.distributed."""
    found = [name for name in modules() if is_under(name, f"{PACKAGE}.{package}")]
    assert found
    for module in found:
        assert not {name for name in imports(module) if is_under(name, "torch.distributed")}, module
        tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if is_under(name, "torch.distributed")}, module


def test_data_prep_shares_only_the_shard_format():
    """Of the package it knows how shards are named, indexed and scanned, and the package not it."""
    reading = ("index", "decode", "catalog", "source")
    known = ("errors", "files", "progress", *(f"data.{module}" for module in reading))
    allowed = ("data_prep", *(f"lipnext_scale.{x}" for x in known))
    for module in modules():
        if is_under(module, "data_prep"):
            for found in own_imports(module) - {"lipnext_scale"}:  # the package itself: its version
                assert any(is_under(found, name) for name in allowed), (module, found)
        else:
            assert not any(is_under(found, "data_prep") for found in own_imports(module)), module


def test_nothing_imports_the_commands():
    """train.py, export.py and the __main__ files are entries: they parse, build and run."""
    names = ("train", "export", "plan", "watch")
    commands = [f"lipnext_scale.{name}" for name in names]
    for module in modules():
        for found in own_imports(module):
            assert found not in commands and not found.endswith("__main__"), module


def test_no_cycles_between_components():
    """The top-level modules and packages have an order in which each imports earlier ones only."""
    left = component_imports()
    assert {"manifold", "config", "trainer", "data", "data_prep"} <= left.keys()
    while left:
        bottom = {name for name, found in left.items() if not found & left.keys()}
        assert bottom, f"a cycle among {sorted(left)}"
        left = {name: found for name, found in left.items() if name not in bottom}


@pytest.mark.parametrize(
    "name", ["matplotlib", "tensorboard", "sklearn", "accelerate", "deepspeed"]
)
def test_heavy_libraries_stay_out_of_the_mathematics(name):
    """The network, the optimizers and the losses need torch alone."""
    for module in modules():
        if module.split(".")[1:2] and module.split(".")[1] in (
            "manifold",
            "models",
            "optim",
            "losses",
        ):
            assert not {found for found in imports(module) if is_under(found, name)}, module
