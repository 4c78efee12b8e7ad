"""The imports of the repository's files, read from their source."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lipnext_scale"


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Name → file of what is installed: lipnext_scale and data_prep."""
    return {
        module_name(path): path
        for package in (PACKAGE, "data_prep")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imported_by(source: str, name: str, is_package: bool = False) -> set[str]:
    """Everything that a module's source imports anywhere in it, as absolute dotted names.

    `from a import b` counts as a.b: b may be a module. What is there for a type checker counts
    too: the file depends on it.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


@cache
def imports(module: str) -> frozenset[str]:
    path = modules()[module]
    source = path.read_text(encoding="utf-8")
    return frozenset(imported_by(source, module, path.name == "__init__.py"))


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_of(name: str) -> str | None:
    """The module of ours that an imported name is, or is in; None for others."""
    while name:
        if name in modules():
            return name
        name = name.rpartition(".")[0]
    return None


def own_imports(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    return {found for name in imports(module) if (found := module_of(name)) is not None}


def component(module: str) -> str:
    """lipnext_scale.optim.optimizers → optim; lipnext_scale itself → lipnext_scale."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else parts[0]
