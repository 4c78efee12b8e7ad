"""The train command inside this process, and a set of data small enough to start it many times."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.digits import png_bytes, write_shard
from lipnext_scale.train import main

CONFIG = """\
run:
  dir: {tmp}/run
data:
  train: {tmp}/train-{{000..001}}.tar.gz
  test: {tmp}/test-*.tar.gz
  batch_size: 4
model:
  depth: 1
  width: 8
  image_size: 8
  patch_size: 2
  in_channels: 1
  num_classes: 3
optim:
  epochs: 2
  warmup_epochs: 0
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run_train(*argv: str) -> Outcome:
    """Any exception but SystemExit gets through: the user would see its traceback."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(argv))
        except SystemExit as exit_:
            assert isinstance(exit_.code, int)
            code = exit_.code
    return Outcome(code, out.getvalue(), err.getvalue())


def write_images(path: Path, count: int, shape: tuple[int, ...] = (8, 8), classes: int = 3) -> None:
    """A shard of random images with labels 0, 1, … in turn."""
    generator = np.random.default_rng(0)
    write_shard(
        path,
        (
            (f"{i:03d}", png_bytes(generator.integers(0, 256, shape, dtype=np.uint8)), i % classes)
            for i in range(count)
        ),
    )


def prepare(tmp: Path) -> Path:
    """Write shards and a configuration that trains on them; returns the configuration's path."""
    write_images(tmp / "train-000.tar.gz", 6)
    write_images(tmp / "train-001.tar.gz", 6)
    write_images(tmp / "test-000.tar.gz", 3)
    config = tmp / "small.yaml"
    config.write_text(CONFIG.format(tmp=tmp), encoding="utf-8")
    return config


def contents(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its bytes, and every directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def assert_refused(outcome: Outcome, *said: str) -> None:
    """Exit code 2 and nothing but one line on stderr, which holds all of `said`."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.endswith("\n") and outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("error: ") and "Traceback" not in outcome.err
    for words in said:
        assert words in outcome.err, outcome.err


def assert_refused_before_writing(tmp: Path, arguments: list[str], *said: str) -> None:
    """And every file is as it was before the command."""
    before = contents(tmp)
    assert_refused(run_train(*arguments), *said)
    assert contents(tmp) == before
