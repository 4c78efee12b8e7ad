"""What a run tells: metrics.jsonl and TensorBoard events."""

import json
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

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
