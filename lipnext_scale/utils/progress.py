"""Progress of long work: a bar or log lines for people, heartbeats for the watchdog."""

import sys
import time
from dataclasses import dataclass

from tqdm import tqdm


@dataclass
class Life:
    """beats: so far; doing: what is under way; slow: it may take long."""

    beats: int = 0
    doing: str = "the start"
    slow: bool = True


# Global, so that code deep in a checkpoint needs no reference to the watchdog.
LIFE = Life()


def beat(doing: str | None = None, slow: bool = False) -> None:
    """A piece of work is finished; if given, `doing` begins now."""
    if doing is not None:
        LIFE.doing, LIFE.slow = doing, slow
    LIFE.beats += 1


class Progress:
    """A bar on a terminal; in a log plain lines, at most one every `log_seconds` (0: none).

    silent: show nothing, as on all ranks but 0.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        unit: str = "step",
        title: str = "",
        log_seconds: float = 0,
        silent: bool = False,
    ) -> None:
        self._silent = silent
        hidden = silent or not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit=unit, desc=title, disable=hidden, dynamic_ncols=True
        )
        self._logs = hidden and not silent and log_seconds > 0
        self._total, self._unit, self._title = total, unit, title
        self._done = self._begun = done
        self._log_seconds, self._start, self._logged = log_seconds, time.time(), time.time()

    def advance(self, by: int = 1) -> None:
        self._bar.update(by)
        self._done += by
        now = time.time()
        if self._logs and now - self._logged >= self._log_seconds:
            self._logged = now
            line = f"{self._title}: {self._done}/{self._total} {self._unit}s"
            if made := self._done - self._begun:
                rate = made / (now - self._start)
                line += f", {rate:.0f}/s, {(self._total - self._done) / rate:.0f} s to go"
            print(line, flush=True)

    @property
    def left(self) -> int:
        return self._total - self._done

    def say(self, line: str) -> None:
        if not self._bar.disable:
            self._bar.write(line)
        elif not self._silent:
            print(line, flush=True)

    def close(self) -> None:
        self._bar.close()
