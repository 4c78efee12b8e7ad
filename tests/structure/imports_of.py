"""The imports of the repository's files, read from their source."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lipnext_scale"


def python_files() -> list[Path]:
    """Every Python file of the repository; environments, caches and runs are not part of it."""
    return sorted(
        path
        for path in ROOT.rglob("*.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in ("runs", "build", "dist")
    )


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Name → file of what is installed: lipnext_scale and data_prep."""
    return {
        module_name(path): path
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in (PACKAGE, "data_prep")
    }


def imported_by(source: str, name: str, is_package: bool = False) -> set[str]:
    """Everything that a module's source imports anywhere in it, as absolute dotted names.

    `from a import b` counts as a.b: b may be a module. What is there for a type checker counts
    too: whoever reads the file depends on it.
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


def component_imports() -> dict[str, set[str]]:
    """component → the other components that any of its modules imports, its command left out: that
    stands above all of them, and nothing imports it."""
    graph: dict[str, set[str]] = {}
    for module in modules():
        if module.endswith(".__main__"):
            continue
        graph.setdefault(component(module), set()).update(
            component(found) for found in own_imports(module)
        )
    # `from lipnext_scale import manifold` is an import of manifold, not of the package's own file.
    return {name: found - {name, PACKAGE} for name, found in graph.items()}
