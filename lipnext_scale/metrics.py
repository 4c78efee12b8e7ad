"""What a run tells: metrics.jsonl and TensorBoard events."""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from lipnext_scale.files import write_atomically

# Several curves in one chart, in TensorBoard's tab "Custom Scalars": name → tags or patterns.
CHARTS = {
    "accuracy": {
        "whole test set": ["test/clean_accuracy", "test/nominal_cra"],
        "watched subset": ["watch/clean_accuracy", "watch/nominal_cra"],
    },
    "by block": {
        "distance from O(d)": ["drift/block_.*"],
        "size of the step": ["move/block_.*"],
        "gradient": ["gradient/.*"],
    },
}


class Metrics:
    """Scalars by step to metrics.jsonl and TensorBoard. Flushed by the line: a kill loses none.

    A run that continues from step s first drops what an earlier process wrote beyond s. `seconds`
    counts from the start of the process.
    """

    def __init__(self, jsonl: Path, tensorboard: Path, start_step: int, config: str = "") -> None:
        kept = [line for line in _lines(jsonl) if json.loads(line)["step"] <= start_step]
        write_atomically(jsonl, "".join(line + "\n" for line in kept).encode())
        self._file = jsonl.open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(tensorboard), purge_step=start_step + 1)
        charts = {
            title: {name: ["Multiline", tags] for name, tags in named.items()}
            for title, named in CHARTS.items()
        }
        self._writer.add_custom_scalars(charts)
        if config:
            indented = "".join(f"    {line}\n" for line in config.splitlines())
            self._writer.add_text("config.yaml", indented, start_step)
        self._started = time.time()

    def write(self, step: int, values: dict[str, float]) -> None:
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # as JSON
        record = {"step": step, "seconds": round(time.time() - self._started, 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        # One event for all: `add_scalar` would write one each, at a tenth of a millisecond.
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        events = self._writer.file_writer
        assert events is not None, "it is open until `close`"
        events.add_summary(Summary(value=scalars), step)

    def close(self) -> None:
        """What could not be written has been told by `write`, and is not tried again."""
        for file in (self._file, self._writer):
            with suppress(OSError):
                file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl, which somebody may be writing."""
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """The complete records of a file; a line that a kill cut off is dropped."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if parse_record(line) is not None]


def parse_record(line: str) -> dict[str, Any] | None:
    """None for what is no record, such as a line that is not complete yet."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
