"""The scalars of a run: metrics.jsonl, TensorBoard events, Weights & Biases."""

import json
import math
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import ModuleType
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


class WandbRun:
    """The run at Weights & Biases. Its id is the run's own, so a continued run continues there."""

    def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
        wandb = import_wandb(recipe.run.wandb)
        if not run.wandb_id.is_file():
            write_atomically(run.wandb_id, uuid.uuid4().hex.encode())
        try:
            self._run = wandb.init(
                project=recipe.run.wandb,
                id=run.wandb_id.read_text(),
                resume="allow",
                name=run.path.absolute().name,
                dir=str(run.path),
                config=to_dict(recipe),
                allow_val_change=True,
                settings=wandb.Settings(console="off"),  # its capture of stdout breaks the bar
            )
        except wandb.Error as error:
            right = f"cannot start: {' '.join(str(error).split())}"
            raise ConfigError("run.wandb", recipe.run.wandb, right) from None

    def write(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:  # else an earlier process logged it, beyond its checkpoint
            self._run.log(values, step=step)

    def close(self) -> None:
        """While an error ends the run, as failed."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))


def import_wandb(project: str) -> ModuleType:
    try:
        import wandb
        from wandb import init  # noqa: F401  a directory named wandb can be imported too
    except ImportError:
        right = "the package wandb is not installed here: pip install 'lipnext_scale[wandb]'"
        raise ConfigError("run.wandb", project, right) from None
    return wandb


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
