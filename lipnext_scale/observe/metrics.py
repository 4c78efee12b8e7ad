"""The scalars of a run: metrics.jsonl, TensorBoard events, Weights & Biases."""

import json
import math
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.utils.config import ConfigError, to_dict
from lipnext_scale.utils.files import write_atomically

# Several curves in one chart, in TensorBoard's tab "Custom Scalars": name → tags or patterns.
CHARTS = {
    "accuracy": {
        "full test set": ["Multiline", ["test/clean_accuracy", "test/nominal_cra"]],
        "subset": ["Multiline", ["watch/clean_accuracy", "watch/nominal_cra"]],
    },
    "by block": {
        "distance from O(d)": ["Multiline", ["drift/block_.*"]],
        "size of the step": ["Multiline", ["move/block_.*"]],
        "gradient": ["Multiline", ["gradient/.*"]],
    },
}


class Metrics:
    """Scalars by step to metrics.jsonl and TensorBoard. Flushed by the line: a kill loses none.

    A run that continues from step s first drops what an earlier process wrote beyond s. `seconds`
    counts from the start of the process.
    """

    def __init__(self, run: RunDirectory, start_step: int, config: str = "") -> None:
        kept = [record for record in read_records(run.metrics) if record["step"] <= start_step]
        content = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(run.metrics, content.encode())
        self._file = run.metrics.open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(run.tensorboard), purge_step=start_step + 1)
        self._writer.add_custom_scalars(CHARTS)
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
        """`write` has raised what could not be written; it is not tried again."""
        for file in (self._file, self._writer):
            with suppress(OSError):
                file.close()


def open_wandb(run: RunDirectory, recipe: Recipe) -> Any:
    """The run at Weights & Biases, under an id of its own: where it continues, it does so there."""
    import wandb

    if not run.wandb_id.is_file():
        write_atomically(run.wandb_id, uuid.uuid4().hex.encode())
    project, settings = recipe.run.wandb, wandb.Settings(console="off")  # the bar is no log
    how: dict[str, Any] = {"resume": "allow", "allow_val_change": True, "dir": str(run.path)}
    how |= {"id": run.wandb_id.read_text(), "name": run.path.absolute().name}
    try:
        return wandb.init(project=project, config=to_dict(recipe), settings=settings, **how)
    except Exception as error:  # also pydantic's: WANDB_MODE misspelt, say
        right = f"cannot start: {' '.join(str(error).split())}"
        raise ConfigError("run.wandb", project, right) from None


def require_wandb(project: str) -> None:
    try:
        from wandb import init  # noqa: F401  a directory of that name has none
    except ImportError:
        right = "the package wandb is not installed here: pip install 'lipnext_scale[wandb]'"
        raise ConfigError("run.wandb", project, right) from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl; a line that a kill or a full disk cut is dropped."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records
