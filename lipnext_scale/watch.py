"""Watch runs while they train, in a terminal.

    python -m lipnext_scale.watch RUN [RUN ...]              until Ctrl-C
    python -m lipnext_scale.watch RUN --once                 the present state, and end
    python -m lipnext_scale.watch RUN --picture summary.png  the summary, at any time

It reads what the runs write, metrics.jsonl and the names of the checkpoints, and needs nothing of
the processes that train: on another machine with the same files it works as well.
"""

import lipnext_scale.utils.passive  # noqa: F401

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lipnext_scale.checkpoint.directory import complete_checkpoints
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.observe.console import duration, epoch_of
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.utils.errors import ArgumentParser, UserError, command

HOME_AND_CLEAR = "\x1b[H\x1b[2J"
QUIET_AFTER, QUIET_INTERVALS = 60.0, 4  # seconds, and log intervals, without a record
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {  # name → (tags of which the first that exists is shown, format)
    "loss": (("train/loss",), "{:.4f}"),
    "accuracy": (("train/accuracy",), "{:.1%}"),
    "test clean": (("test/clean_accuracy", "watch/clean_accuracy"), "{:.2%}"),
    "test CRA": (("test/nominal_cra", "watch/nominal_cra"), "{:.2%}"),
    "grad norm": (("train/gradient_norm",), "{:.3g}"),
    "drift": (("drift/largest",), "{:.1e}"),
    "images/s": (("images_per_second",), "{:,.0f}"),
}
FIGURES = {
    "train/lr": "lr {:.2e}",
    "train/epsilon": "ε {:.3f}",
    "move/largest": "‖Δ‖ {:.1e}",
    "mfu": "MFU {:.1%}",
    "data/wait_share": "data wait {:.0%}",
    "memory/gpu_allocated_gb": "GPU peak {:.1f} GB",
    "memory/resident_gb": "resident {:.1f} GB",
    "data/bad_samples": "{:.0f} bad samples",
}


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.watch", description="Watch runs while they train.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, such as runs/digits")
    parser.add_argument("--once", action="store_true", help="print the present state, and end")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between looks (2)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the summary of one run into FILE")
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.every <= 3600:
        raise UserError(f"--every {arguments.every:g}: must be from 0.05 to 3600 seconds")
    if arguments.picture and not arguments.picture.endswith(".png"):
        raise UserError(f"--picture {arguments.picture}: must end in .png")
    if arguments.picture and len(arguments.runs) > 1:
        raise UserError(f"--picture {arguments.picture}: shows one run; name one")
    runs = [RunDirectory(path) for path in arguments.runs]
    if arguments.picture:
        _draw(runs[0], Path(arguments.picture))
    elif arguments.once or not sys.stdout.isatty():
        print(render(runs))
    else:
        with suppress(KeyboardInterrupt):
            while True:
                text = render(runs)
                print(f"{HOME_AND_CLEAR}{text}", flush=True)
                time.sleep(arguments.every)


def _draw(run: RunDirectory, path: Path) -> None:
    from lipnext_scale.observe.picture import draw_summary  # matplotlib is slow to import

    run.recipe()  # refuses what is no run
    try:
        draw_summary(run, path)
    except OSError as error:
        raise UserError(f"--picture {path}: cannot be written: {error.strerror}") from None
    print(path)


def render(runs: list[RunDirectory]) -> str:
    """A panel for each run, in lines that fit the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    panels = ["\n".join(line[:width] for line in panel(run, width)) for run in runs]
    return "\n\n".join(panels)


def panel(run: RunDirectory, width: int) -> Iterator[str]:
    recipe = run.recipe()  # refuses what is no run
    records, checkpoint, saved = read_records(run.metrics), _checkpoint(run), "no checkpoint yet"
    if checkpoint:
        saved = f"checkpoint of step {checkpoint[0]:,}, {duration(checkpoint[1])} ago"
    logged = [record for record in records if "train/loss" in record]
    if not logged:
        yield from (f"{run.path}: waiting for the first record"[-width:], saved)
        return
    last, epochs = logged[-1], recipe.optim.epochs
    total = round(epochs * last["step"] / last["train/epoch"])
    total = min(total, recipe.run.max_steps or total)
    # A stop between two records leaves a checkpoint, but no record.
    step = max(records[-1]["step"], checkpoint[0] if checkpoint else 0)
    pace = recipe.data.batch_size / last["images_per_second"]  # seconds a step
    age = time.time() - run.metrics.stat().st_mtime
    state = f"running, last record {duration(age)} ago"
    if step >= total:
        state = "finished"
    elif age > max(QUIET_AFTER, QUIET_INTERVALS * recipe.run.log_every * pace):
        state = f"silent for {duration(age)}: stopped?"
    yield f"{run.path}: {state}"[-width:]
    epoch = epoch_of(last["train/epoch"], epochs)
    after = f" {step / total:4.0%}  epoch {epoch}/{epochs}  step {step:,}/{total:,}"
    after += f"  ETA {duration((total - step) * pace)}" if step < total else ""
    room = max(4, width - len(after))
    full = min(room, round(room * step / total))
    yield "█" * full + "░" * (room - full) + after
    yield from _curves(records, width)
    yield "  ".join(form.format(last[tag]) for tag, form in FIGURES.items() if tag in last)
    yield saved


def _curves(records: list[dict[str, Any]], width: int) -> Iterator[str]:
    for name, (tags, form) in CURVES.items():
        tag = next((tag for tag in tags if any(tag in record for record in records)), None)
        if tag is None:
            continue
        values = [record[tag] for record in records if tag in record]
        subset = " (subset)" if tag.startswith("watch/") else ""
        line = sparkline(values, max(4, width - 21 - len(subset)))
        yield f"{name:<10}{form.format(values[-1]):>9}  {line}{subset}"


def _checkpoint(run: RunDirectory) -> tuple[int, float] | None:
    """(step, age in seconds) of the newest complete one."""
    try:
        found = complete_checkpoints(run.checkpoints)
        return max((step, time.time() - path.stat().st_mtime) for step, path in found.items())
    except (OSError, ValueError):  # there is none, or it has just been removed for a newer one
        return None


def sparkline(values: list[float], width: int) -> str:
    """Means of the values in at most `width` blocks, from the least to the largest."""
    columns = min(width, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    parts = [values[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    means = [math.fsum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


if __name__ == "__main__":
    main()
