"""Progress of long work: a bar on a terminal, plain lines in a log."""

import sys
import time

from tqdm import tqdm


class Progress:
    """A bar on a terminal; in a log plain lines, at most one every `log_seconds` (0: none).

    silent: show nothing, as all processes but the first.
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
        self._terminal = sys.stderr.isatty() and not silent
        self._logs = bool(log_seconds) and not self._terminal and not silent
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            desc=title,
            disable=not self._terminal,
            dynamic_ncols=True,
        )
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
            if made := self._done - self._begun:  # before that nobody knows how long it takes
                rate = made / (now - self._start)
                line += f", {rate:.0f}/s, {(self._total - self._done) / rate:.0f} s to go"
            print(line, flush=True)

    @property
    def left(self) -> int:
        return self._total - self._done

    def say(self, line: str) -> None:
        if self._silent:
            return
        if self._terminal:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        self._bar.close()
