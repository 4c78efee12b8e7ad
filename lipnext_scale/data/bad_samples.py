"""Keeping account of samples that could not be used: each is named once, and not for ever."""

from lipnext_scale.data.source import BadReport
from lipnext_scale.errors import RunFailed

NAMED_AT_ONCE = 10


class BadSamples:
    """All ranks add the same reports, so they agree on when there are too many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, reports: list[BadReport]) -> list[str]:
        """Lines that name the new ones, at most NAMED_AT_ONCE; too many in all end the run."""
        new = {(bad.source, bad.sample): bad for bad in reports}
        lines = []
        for key, bad in new.items():
            if key not in self._known:
                self._known.add(key)
                lines.append(f"{bad.source}: {bad.name} {bad.reason}: another one stands in for it")
        if len(self._known) > self._limit:
            raise RunFailed(
                f"{len(self._known)} bad samples, more than data.bad_sample_limit = {self._limit}; "
                f"the last: {lines[-1]}"
            )
        if len(lines) > NAMED_AT_ONCE:
            more = f"… and {len(lines) - NAMED_AT_ONCE} more bad samples at once"
            lines = [*lines[:NAMED_AT_ONCE], more]
        return lines
