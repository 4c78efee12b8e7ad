"""Learning curves of runs side by side, as a picture.

python -m benchmarks.curves RUN [RUN ...] --out curves.png [--titles "real" "real and synthetic"]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "train/loss": "training loss",
    "train/accuracy": "training accuracy (augmented)",
    "test/clean_accuracy": "test accuracy",
    "test/nominal_cra": "test accuracy at loss.epsilon, K taken as 1",
}


def read_metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--titles", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    titles = arguments.titles or [run.name for run in arguments.runs]
    figure, grid = plt.subplots(2, 2, figsize=(10, 6.4), dpi=110, layout="constrained")
    for run, title in zip(arguments.runs, titles, strict=True):
        records = read_metrics(run)
        for axes, (key, name) in zip(grid.flat, PANELS.items(), strict=True):
            points = [(record["step"], record[key]) for record in records if key in record]
            marker = "o" if key.startswith("test") else None
            axes.plot(*zip(*points, strict=True), label=title, marker=marker, markersize=4)
            axes.set(title=name, xlabel="step")
            axes.grid(alpha=0.3)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].legend()
    figure.savefig(arguments.out)


if __name__ == "__main__":
    main()
