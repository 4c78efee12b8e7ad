"""What a run tells: metrics.jsonl, TensorBoard events, a progress bar or plain lines."""

import json
import sys
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class Metrics:
    """Scalars by step to metrics.jsonl and TensorBoard. Flushed line by line: a killed run keeps them.

    A run that continues from step s first drops what an earlier process wrote beyond s.
    """

    def __init__(self, jsonl: Path, tensorboard: Path, start_step: int) -> None:
        kept = [line for line in _lines(jsonl) if json.loads(line)["step"] <= start_step]
        jsonl.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
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
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue
        complete.append(line)
    return complete


class Progress:
    """A bar on a terminal; without one, a line whenever there is something to say."""

    def __init__(self, total: int, done: int = 0, unit: str = "step", title: str = "") -> None:
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            desc=title,
            disable=not self._terminal,
            dynamic_ncols=True,
        )

    def advance(self, by: int = 1) -> None:
        self._bar.update(by)

    def say(self, line: str) -> None:
        if self._terminal:
            self._bar.write(line)
        else:
            print(line, flush=True)

    def close(self) -> None:
        self._bar.close()
