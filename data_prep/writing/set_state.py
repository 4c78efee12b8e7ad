"""What lies where a set is to be written: nothing, a part of it, all of it, or something else."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.writing.journal import Journal, ShardNote
from lipnext_scale.data.index import SetIndex, index_paths, read_index
from lipnext_scale.errors import UserError


@dataclass(frozen=True)
class SetState:
    """`complete`: the index of the finished set. Else `notes`: the shards that are finished."""

    complete: SetIndex | None = None
    unfinished: bool = False
    notes: dict[int, ShardNote] = field(default_factory=dict)


def find_state(out: Path, name: str, identity: dict[str, Any], shards: int) -> SetState:
    """What is there of the set that `identity` describes; of anything else, a UserError."""
    journal = Journal(out, name)
    plan = journal.plan()
    if plan is not None:
        _require_same(journal.directory, "an unfinished set", plan, identity)
        return SetState(unfinished=True, notes=journal.finished(shards))
    path = index_paths(out, name)[0]
    if path.exists():
        index = read_index(path)
        _require_same(path, "another set", _identity_of(index), _without_version(identity))
        _require_shards(path, index)
        return SetState(complete=index)
    for stray in sorted(out.glob(f"{name}-*.tar*")):
        raise UserError(
            f"{stray}: is in the way and of no known set; remove it, or give another --out"
        )
    return SetState()


def _identity_of(index: SetIndex) -> dict[str, Any]:
    converter = {key: index.converter.get(key) for key in ("name", "settings")}
    return {"converter": converter, "source": index.source, "classes": index.classes}


def _without_version(identity: dict[str, Any]) -> dict[str, Any]:
    """A finished set may be an earlier version's; an unfinished one must not become two's."""
    converter = {key: value for key, value in identity["converter"].items() if key != "version"}
    return identity | {"converter": converter}


def _require_same(where: Path, what: str, there: dict[str, Any], identity: dict[str, Any]) -> None:
    asked = _flat(json.loads(json.dumps(identity)))
    found = _flat(there)
    names = [name for name in {**asked, **found} if asked.get(name) != found.get(name)]
    if names:
        told = ", ".join(_difference(name, found.get(name), asked.get(name)) for name in names)
        raise UserError(
            f"{where}: {what} is there: {told}; give another --out, or remove it with its shards"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _difference(name: str, found: Any, asked: Any) -> str:
    if name == "classes":
        return "its classes differ"
    if name == "source.fingerprint":
        return "the names, labels or sizes in its source differ"
    short = name.removeprefix("converter.").removeprefix("settings.")
    return f"its {short} is {found}, asked for {asked}"


def _require_shards(path: Path, index: SetIndex) -> None:
    for shard in index.shards:
        file = path.parent / shard.file
        if not file.exists() or file.stat().st_size != shard.bytes:
            raise UserError(
                f"{file}: is missing or not of the size in {path.name}; remove {path.name} and the "
                "set's shards to convert it again"
            )
