"""What a run tells: metrics.jsonl, TensorBoard events, a progress bar or plain lines."""

import json
import sys
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lipnext_scale.files import write_atomically


class Metrics:
    """Scalars by step to metrics.jsonl and TensorBoard. Flushed by the line: a kill loses none.

    A run that continues from step s first drops what an earlier process wrote beyond s. `seconds`
    counts from the start of the process.
    """

    def __init__(self, jsonl: Path, tensorboard: Path, start_step: int) -> None:
        kept = [line for line in _lines(jsonl) if json.loads(line)["step"] <= start_step]
        write_atomically(jsonl, "".join(line + "\n" for line in kept).encode())
        self._file = jsonl.open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(tensorboard), purge_step=start_step + 1)
        self._started = time.time()

    def write(self, step: int, values: dict[str, float]) -> None:
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._writer.close()


def _lines(path: Path) -> list[str]:
    """The complete records of a file; a line that a kill cut off is dropped."""
    if not path.exists():
        return []
    complete = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            complete.append(line)
    return complete


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
        if not self._terminal and self._log_seconds and now - self._logged >= self._log_seconds:
            self._logged = now
            rate = (self._done - self._begun) / (now - self._start)
            print(
                f"{self._title}: {self._done}/{self._total} {self._unit}s, {rate:.0f}/s, "
                f"{(self._total - self._done) / rate:.0f} s to go",
                flush=True,
            )

    def say(self, line: str) -> None:
        if self._silent:
            return
        if self._terminal:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        self._bar.close()
