"""Keeping account of samples that could not be used: each is named once, and not for ever."""

from pathlib import Path

from lipnext_scale.data.source import BadReport
from lipnext_scale.errors import RunFailed
from lipnext_scale.files import write_atomically

NAMED_AT_ONCE = 10


class BadSamples:
    """All ranks add the same reports, so they agree on when there are too many.

    listed: the file that names each of them once, whatever a log has room for and however often
    the run is started. writes: this rank is the one that keeps it.
    """

    def __init__(self, limit: int, listed: Path, writes: bool = True) -> None:
        self._limit, self._listed, self._writes = limit, listed, writes
        self._known: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, reports: list[BadReport]) -> list[str]:
        """Lines for the log on the new ones, at most NAMED_AT_ONCE and how many more there are;
        too many in all end the run."""
        new = {(bad.source, bad.sample): bad for bad in reports}
        names = [
            f"{bad.source}: {bad.name} {bad.reason}"
            for key, bad in new.items()
            if key not in self._known
        ]
        self._known |= new.keys()
        if names and self._writes:
            names = self._write(names)
        if len(self._known) > self._limit:
            raise RunFailed(
                f"{len(self._known)} bad samples, more than data.bad_sample_limit = {self._limit}; "
                f"{self._listed} names them"
            )
        lines = [f"{name}: another one stands in for it" for name in names[:NAMED_AT_ONCE]]
        if more := len(names[NAMED_AT_ONCE:]):
            lines.append(f"… and {more} more bad samples at once: {self._listed} names all")
        return lines

    def _write(self, names: list[str]) -> list[str]:
        """Add names to the list; those that an earlier start of the run has not put there."""
        there = self._listed.read_text("utf-8").splitlines() if self._listed.exists() else []
        new = [name for name in names if name not in set(there)]
        if new:
            write_atomically(self._listed, "".join(f"{name}\n" for name in there + new).encode())
        return new
