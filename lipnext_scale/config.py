"""Configuration: plain dataclasses, filled from defaults < launcher < YAML < `a.b=c` arguments.

Each component keeps its dataclass beside it and checks its own values in `__post_init__`, raising
ConfigError with the bare field name; this file adds the path. `recipe.py` composes them.

What a launcher says (launch_environment.py) and what the user says must agree where both speak.
A YAML file may name another as `base:`, relative to itself, and then holds only what differs.
Numbers may be written as fractions (36/255).
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from lipnext_scale.errors import UserError

T = TypeVar("T")
# Beside its own errors, PyYAML lets those of int() and datetime() through: 0x_, 2024-13-45.
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


class _Missing:
    """Stands for a value that was not given. (A class is the same in every process.)"""


class ConfigError(UserError, ValueError):
    """`key = value: what would be right`."""

    def __init__(self, key: str, value: Any, right: str) -> None:
        shown = "" if value is _Missing else f" = {_shown(value)}"
        super().__init__(f"{key}{shown}: {right}")
        self.key, self.value, self.right = key, value, right

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, Any, str]]:
        return ConfigError, (self.key, self.value, self.right)  # on its way to other processes

    def under(self, section: str) -> "ConfigError":
        """The same error seen from one level up."""
        return ConfigError(f"{section}.{self.key}" if section else self.key, self.value, self.right)


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class LauncherSetting(NamedTuple):
    """What a launcher says about a setting, and where: `VARIABLE = its text`."""

    value: Any
    source: str


def load(
    cls: type[T],
    path: str | Path | None,
    overrides: list[str] | None = None,
    launcher: Mapping[str, LauncherSetting] | None = None,
) -> T:
    """Build `cls` from a YAML file (with its bases) and `a.b=c` overrides.

    launcher: `section.key` → what was told to the process about it.
    """
    values, launcher = read_yaml(path) if path is not None else {}, launcher or {}
    for override in overrides or []:
        _apply_override(values, override)
    try:
        return from_dict(cls, _over_launcher(values, launcher))
    except ConfigError as error:
        told = launcher.get(error.key)
        if told is None or told.source in error.right:
            raise
        right = f"{error.right} (the launcher says so: {told.source})"
        raise ConfigError(error.key, error.value, right) from None


def _over_launcher(
    values: dict[str, Any], launcher: Mapping[str, LauncherSetting]
) -> dict[str, Any]:
    """`values` with what only the launcher speaks of; "auto" leaves the choice to it too."""
    values = dict(values)
    for key, told in launcher.items():
        section, name = key.split(".")
        there = {} if values.get(section) is None else values[section]
        if not isinstance(there, dict):
            continue  # which is refused with all else that is wrong
        if there.get(name, "auto") == "auto":
            values[section] = {**there, name: told.value}
        elif not _same(there[name], told.value):
            right = f"the launcher says {_shown(told.value)} ({told.source}); make them agree"
            raise ConfigError(key, there[name], right)
    return values


def _same(one: Any, other: Any) -> bool:
    """3, 3.0 and the text 3 are one number."""
    numbers = as_float(one), as_float(other)
    return one == other if None in numbers else numbers[0] == numbers[1]


def from_dict(cls: type[T], values: Any, section: str = "") -> T:
    """A dataclass from nested dictionaries; unknown keys and wrong types are refused by name."""
    assert dataclasses.is_dataclass(cls)
    if not isinstance(values, dict):
        raise ConfigError(section or "configuration", values, "must be a mapping of keys to values")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    # Settings that are no more, in files of older runs: with the value that is now the only one, or
    # (...) with any.
    retired = getattr(cls, "RETIRED", {})
    values = {k: v for k, v in values.items() if k not in retired or retired[k] not in (v, ...)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(_join(section, str(key)), value, _unknown_key(str(key), cls, section))
    hints = get_type_hints(cls)
    arguments = {
        key: _convert(value, hints[key], _join(section, key)) for key, value in values.items()
    }
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in arguments:
            if not dataclasses.is_dataclass(hints[name]):
                raise ConfigError(_join(section, name), _Missing, "is required and was not given")
            arguments[name] = _convert({}, hints[name], _join(section, name))  # names what it lacks
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise error.under(section) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The nested dictionaries that `from_dict` turns back into the same configuration."""
    return {
        field.name: to_dict(value) if dataclasses.is_dataclass(value) else _plain(value)
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }


def dump(config: Any) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=False)


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two configurations differ, as dotted key → (one's value, other's)."""
    first, second = _leaves(to_dict(one)), _leaves(to_dict(other))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def read_yaml(path: str | Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML mapping merged over the files it names as `base`."""
    path = Path(path)
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file{_similar_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except _YAML_ERRORS as error:
        raise UserError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    if path.resolve() in seen:
        raise UserError(f"{path}: inherits from itself through `base`")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a mapping of sections, holds a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError("base", base, "must be the path of another YAML file")
    return merge(read_yaml(path.parent / base, (*seen, path.resolve())), values)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, section by section; an empty section changes nothing."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and (value is None or isinstance(value, dict)):
            merged[key] = merge(old, value or {})
        else:
            merged[key] = value
    return merged


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"argument {override!r}: must have the form section.key=value")
    try:
        value = _parse(text)
    except _YAML_ERRORS:
        value = text
    for depth, part in enumerate(parts[:-1], start=1):
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            section = ".".join(parts[:depth])
            raise ConfigError(
                key, value, f"{section} = {_shown(values[part])} is a value, not a section"
            )
        values = values[part]
    values.update(merge(values, {parts[-1]: value}))


def _convert(value: Any, hint: Any, key: str) -> Any:
    """Check `value` against a type hint; only harmless conversions are made."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, {} if value is None else value, key)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(value, inner, key)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(str(argument) for argument in arguments)
            raise ConfigError(
                key, value, f"must be one of {choices}{_nearest(str(value), arguments)}"
            )
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(item, arguments[0], key) for item in items)
        if len(items) != len(arguments):
            raise ConfigError(key, value, f"must be a list of {len(arguments)} values")
        return tuple(_convert(item, kind, key) for item, kind in zip(items, arguments, strict=True))
    return _convert_scalar(value, hint, key)


def _convert_scalar(value: Any, hint: type, key: str) -> Any:
    if hint is float:
        number = as_float(value)
        if number is None:
            raise ConfigError(key, value, "must be a number")
        return number
    if hint is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise ConfigError(key, value, "must be a whole number")
        return int(value)
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")
    if hint is str and not isinstance(value, str):
        raise ConfigError(key, value, "must be text")
    return value


def as_float(value: Any) -> float | None:
    """A finite number from 3, 1e-3 (text to YAML 1.1) or 36/255."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, str) and value.count("/") == 1:
            above, below = value.split("/")
            number = float(above) / float(below)
        else:
            number = float(value)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _unknown_key(key: str, cls: Any, section: str) -> str:
    names = [field.name for field in dataclasses.fields(cls)]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if close:
        return f"unknown key; did you mean {_join(section, close[0])}?"
    return f"unknown key; {section or 'the configuration'} has {', '.join(names)}"


def _nearest(word: str, choices: tuple[Any, ...]) -> str:
    close = difflib.get_close_matches(word, [str(choice) for choice in choices], n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (and no directory {path.parent})"
    names = [entry.name for entry in path.parent.glob("*.yaml")]
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _leaves(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        path = _join(section, key)
        leaves.update(_leaves(value, path) if isinstance(value, dict) else {path: value})
    return leaves


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key
