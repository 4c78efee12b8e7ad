"""What of a set is written already, so that a conversion that was killed goes on where it was.

    train.journal/plan.json      what is being written: settings, source, classes
    train.journal/000012.json    shard 12 is finished: its size, sha256, records, what was left out

A shard is noted after it is renamed into place. One without its note is written again, to the same
bytes. The journal goes when the index is there.
"""

import base64
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lipnext_scale.data.index import RECORD, ShardEntry
from lipnext_scale.errors import UserError
from lipnext_scale.files import PARTIAL, write_atomically

LOCK = ".data_prep.lock"
# Seconds. Workers of a conversion that was killed hold its lock until they have noticed.
PATIENCE = 5.0


@dataclass(frozen=True)
class ShardNote:
    """A finished shard. `changes` counts what was done to images; `skipped` are the bad ones."""

    entry: ShardEntry
    records: np.ndarray
    skipped: list[dict[str, str]] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        packed = base64.b64encode(self.records.tobytes()).decode()
        values = {"entry": asdict(self.entry), "records": packed}
        return json.dumps(values | {"skipped": self.skipped, "changes": self.changes}).encode()

    @staticmethod
    def from_json(text: bytes) -> "ShardNote":
        values = json.loads(text)
        records = np.frombuffer(base64.b64decode(values["records"]), dtype=RECORD)
        entry = ShardEntry(**values["entry"])
        return ShardNote(entry, records, values["skipped"], values["changes"])


class Journal:
    """The journal of the set `name` in the directory `out`."""

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name
        self.directory = out / f"{name}.journal"

    def plan(self) -> dict[str, Any] | None:
        """What the unfinished set here is, None if there is none."""
        damaged = UserError(f"{self.directory}: is damaged; remove it and the set's shards")
        try:
            plan = json.loads((self.directory / "plan.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise damaged from None
        if not isinstance(plan, dict):
            raise damaged
        return plan

    def begin(self, plan: dict[str, Any]) -> None:
        aside = self.directory.with_name(self.directory.name + PARTIAL)
        aside.mkdir()
        write_atomically(aside / "plan.json", json.dumps(plan).encode())
        aside.rename(self.directory)

    def note(self, shard: int, note: ShardNote) -> None:
        write_atomically(self._note_path(shard), note.to_json())

    def finished(self, shards: int) -> dict[int, ShardNote]:
        """The notes of shards that are here in their full size.

        A shard is synced before it has its name, so its bytes are not read again.
        """
        found = {}
        for shard in range(shards):
            try:
                note = ShardNote.from_json(self._note_path(shard).read_bytes())
                if (self._out / note.entry.file).stat().st_size == note.entry.bytes:
                    found[shard] = note
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                damaged = f"{self._note_path(shard)}: is damaged; remove it to write its shard anew"
                raise UserError(damaged) from None
        return found

    def remove(self) -> None:
        """Renamed first: a journal that is partly removed would have lost its plan or its notes."""
        aside = self.directory.with_name(self.directory.name + PARTIAL)
        self.directory.rename(aside)
        shutil.rmtree(aside)

    def clean(self) -> None:
        """Remove what a killed conversion of this set left half-written."""
        shutil.rmtree(self.directory.with_name(self.directory.name + PARTIAL), ignore_errors=True)
        of_set = (f"{self._name}-*.tar{PARTIAL}", f"{self._name}.index.*{PARTIAL}")
        for pattern in (*of_set, f"{self.directory.name}/*{PARTIAL}"):
            for path in self._out.glob(pattern):
                path.unlink()

    def _note_path(self, shard: int) -> Path:
        return self.directory / f"{shard:06d}.json"


@contextmanager
def only_conversion_in(out: Path) -> Iterator[None]:
    """Keep other conversions out of the directory until this one and all its workers have ended.

    Forked workers share the lock, so it is not free before the last of them is gone.
    """
    path, deadline = out / LOCK, time.monotonic() + PATIENCE
    while (descriptor := _locked(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"--out {out}: another conversion is writing there; wait for it, or give another "
                "directory"
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock. It may have been of a file that was removed meanwhile, and
    then keeps nobody out: look whether it still has its name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
