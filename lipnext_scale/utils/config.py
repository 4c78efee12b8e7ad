"""Configuration: plain dataclasses, filled from defaults < launcher < YAML < `a.b=c` arguments.

Each component keeps its dataclass beside it and checks its own values in `__post_init__`, raising
ConfigError with the bare field name; this file adds the path. `config/recipe.py` composes them.

A launcher's setting (config/launchers.py) and the user's must agree where both are given.
A YAML file may name another as `base:`, relative to itself, and then holds only what differs.
Numbers may be written as fractions (36/255).
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml

from lipnext_scale.utils.errors import UserError

T = TypeVar("T")
# Beside its own errors, PyYAML raises those of int() and datetime(): 0x_, 2024-13-45.
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)
_BUILTIN = "builtin:"  # before the name of a file of configs/, which is in the package too
_CONFIGS = Path(__file__).parents[1] / "configs"


class ConfigError(UserError, ValueError):
    """`key = value: what would be right`. value: `...` if there is none."""

    def __init__(self, key: str, value: Any, right: str) -> None:
        shown = "" if value is ... else f" = {_shown(value)}"
        super().__init__(f"{key}{shown}: {right}")
        self.key, self.value, self.right = key, value, right

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, Any, str]]:
        return ConfigError, (self.key, self.value, self.right)  # pickled for other processes

    def under(self, section: str) -> "ConfigError":
        """The same error seen from one level up."""
        return ConfigError(_join(section, self.key), self.value, self.right)


def _shown(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class LauncherSetting(NamedTuple):
    """The value that a launcher gives to a setting, and its source: `VARIABLE = its text`."""

    value: Any
    source: str


def changeable(default: Any = dataclasses.MISSING) -> Any:
    """A field that may differ between a run and its continuation: it changes the result not at all,
    or by rounding alone."""
    return dataclasses.field(default=default, metadata={"changeable": True})


def changeable_keys(cls: type, section: str = "") -> set[str]:
    """The dotted keys of all `changeable` fields of a dataclass and those inside it."""
    keys, hints = set(), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            keys |= changeable_keys(hints[field.name], _join(section, field.name))
        elif field.metadata.get("changeable"):
            keys.add(_join(section, field.name))
    return keys


# --------------------------------------------------------------------------------------------------
# Loading: files, arguments and the launcher, merged.


def load(
    cls: type[T],
    path: str | Path | None,
    overrides: list[str] | None = None,
    launcher: Mapping[str, LauncherSetting] | None = None,
) -> T:
    """Build `cls` from a YAML file (with its bases) and `a.b=c` overrides.

    launcher: `section.key` → what the launcher of this process sets.
    """
    values, launcher = read_yaml(path) if path is not None else {}, launcher or {}
    for override in overrides or []:
        _apply_override(values, override)
    try:
        return from_dict(cls, _over_launcher(values, launcher))
    except ConfigError as error:
        setting = launcher.get(error.key)
        if setting is None or setting.source in error.right:
            raise
        right = f"{error.right} (set by the launcher: {setting.source})"
        raise ConfigError(error.key, error.value, right) from None


def _over_launcher(
    values: dict[str, Any], launcher: Mapping[str, LauncherSetting]
) -> dict[str, Any]:
    """`values` with what only the launcher sets; "auto" leaves the choice to it too."""
    values = dict(values)
    for key, (value, source) in launcher.items():
        section, name = key.split(".")
        there = {} if values.get(section) is None else values[section]
        if not isinstance(there, dict):
            continue  # from_dict refuses it
        if there.get(name, "auto") == "auto":
            values[section] = {**there, name: value}
        elif not _same(there[name], value):
            right = f"the launcher says {_shown(value)} ({source}); make them agree"
            raise ConfigError(key, there[name], right)
    return values


def _same(one: Any, other: Any) -> bool:
    """3, 3.0 and the text 3 are one number."""
    numbers = as_float(one), as_float(other)
    return one == other if None in numbers else numbers[0] == numbers[1]


def read_yaml(path: str | Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML mapping merged over the files it names as `base`."""
    given = str(path)
    path = _CONFIGS / given[len(_BUILTIN) :] if given.startswith(_BUILTIN) else Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        names = sorted(entry.name for entry in path.parent.glob("*.yaml"))
        if given.startswith(_BUILTIN):
            raise UserError(f"{given}: no such file; there are {', '.join(names)}") from None
        hint = _nearest(path.name, names, f"{path.parent}/")
        raise UserError(f"{path}: no such configuration file{hint}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a YAML file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
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
    inherited = base if base.startswith(_BUILTIN) else path.parent / base
    return merge(read_yaml(inherited, (*seen, path.resolve())), values)


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
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:place]]:
                text = f"the key {key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
        return super().construct_mapping(node, deep)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        hint = f"; did you mean --config {override}?" if override.endswith(".yaml") else ""
        raise UserError(f"argument {override!r}: must have the form section.key=value{hint}")
    try:
        value = yaml.load(text, _Loader)
    except _YAML_ERRORS:
        value = text
    for depth, part in enumerate(parts[:-1], start=1):
        if values.get(part) is None:
            values[part] = {}
        if not isinstance(values[part], dict):
            section = ".".join(parts[:depth])
            right = f"{section} = {_shown(values[part])} is a value, not a section"
            raise ConfigError(key, value, right)
        values = values[part]
    values.update(merge(values, {parts[-1]: value}))


# --------------------------------------------------------------------------------------------------
# Between dataclasses and plain values.


def from_dict(cls: type[T], values: Any, section: str = "") -> T:
    """A dataclass from nested dictionaries; unknown keys and wrong types are refused by name."""
    assert dataclasses.is_dataclass(cls)
    if not isinstance(values, dict):
        raise ConfigError(section or "configuration", values, "must be a mapping of keys to values")
    values = _moved(values, getattr(cls, "MOVED", {}))
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    # Retired settings in files of older runs: taken with the only value left, or (...) with any.
    retired = getattr(cls, "RETIRED", {})
    values = {k: v for k, v in values.items() if k not in retired or retired[k] not in (v, ...)}
    hints, arguments = get_type_hints(cls), {}
    for key, value in values.items():
        if key not in fields:
            hint = _nearest(str(key), fields, _join(section, ""))
            hint = hint or f"; {section or 'the configuration'} has {', '.join(fields)}"
            raise ConfigError(_join(section, str(key)), value, f"unknown key{hint}")
        arguments[key] = _convert(value, hints[key], _join(section, key))
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in arguments:
            if not dataclasses.is_dataclass(hints[name]):
                raise ConfigError(_join(section, name), ..., "is required and was not given")
            arguments[name] = _convert({}, hints[name], _join(section, name))  # names what it lacks
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise error.under(section) from None


def _moved(values: dict[str, Any], moved: Mapping[str, str]) -> dict[str, Any]:
    """Settings that files of older runs have in another section: `section.key` → its new place."""
    for old, new in moved.items():
        (there, key), (section, name) = old.split("."), new.split(".")
        old_section, new_section = values.get(there), values.get(section) or {}
        if isinstance(old_section, dict) and key in old_section and isinstance(new_section, dict):
            value, other = old_section[key], new_section.get(name, old_section[key])
            if other != value:
                raise ConfigError(old, value, f"is {new} now, which is {_shown(other)}")
            rest = {k: v for k, v in old_section.items() if k != key}
            values = {**values, there: rest, section: {**new_section, name: value}}
    return values


def _convert(value: Any, hint: Any, key: str) -> Any:
    """Check `value` against a type hint; only harmless conversions are made."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, {} if value is None else value, key)  # type: ignore[arg-type]
    if origin is Literal:
        if value not in arguments:
            choices = list(map(str, arguments))
            right = f"must be one of {', '.join(choices)}{_nearest(str(value), choices)}"
            raise ConfigError(key, value, right)
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_convert(item, arguments[0], key) for item in items)
        if len(items) != len(arguments):
            raise ConfigError(key, value, f"must be a list of {len(arguments)} values")
        return tuple(_convert(item, kind, key) for item, kind in zip(items, arguments, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(key, value, "must be a mapping of names to values")
        return {k: _convert(v, arguments[1], _join(key, str(k))) for k, v in value.items()}
    return value if hint is Any else _convert_scalar(value, hint, key)


_SCALARS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}


def _convert_scalar(value: Any, hint: type, key: str) -> Any:
    converted = value
    if hint is float:
        converted = as_float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        converted = int(value)
    if not isinstance(converted, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(key, value, f"must be {_SCALARS[hint]}")
    return converted


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


def to_dict(config: Any) -> Any:
    """The nested dictionaries that `from_dict` turns back into the same configuration."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return list(config) if isinstance(config, tuple) else config


def dump(config: Any) -> str:
    """The resolved configuration as YAML."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, default_flow_style=False)


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """The leaves in which two configurations differ, as dotted key → (one's value, other's)."""
    first, second = leaves(to_dict(one)), leaves(to_dict(other))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


def leaves(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = _join(section, key)
        found.update(leaves(value, path) if isinstance(value, dict) else {path: value})
    return found


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
