"""`python -m lipnext_scale.watch` on runs that are complete, under way, torn, empty and missing."""

import json
import os
import pty
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed_runs import recipe, run
from PIL import Image

from lipnext_scale.observe.metrics import read_records
from lipnext_scale.utils import config as configuration
from lipnext_scale.watch import BLOCKS, main, sparkline


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its summary, stopped at the fifth step."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    run(directory, "run.summary=true", "run.eval_every=1")
    return directory


def started_run(directory: Path, *records: dict) -> Path:
    """A run directory with these records and nothing else; 14 steps an epoch, 28 in all."""
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(configuration.dump(recipe(directory)))
    append(directory, *records)
    return directory


def append(directory: Path, *records: dict) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def logged(step: int, loss: float = 1.0) -> dict:
    values = {"train/loss": loss, "train/accuracy": 0.5, "train/epoch": step / 14}
    return {"step": step, "seconds": 10.0 * step, "images_per_second": 10.0, **values}


def once(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([*map(str, arguments), "--once"])
    return capsys.readouterr().out


def test_a_run_at_its_end(trained, capsys):
    text = once(capsys, trained)
    assert "finished" in text.splitlines()[0] and "step 5/5" in text
    assert "checkpoint of step 5, 0:" in text and "test CRA" in text and "(subset)" in text
    last = read_records(trained / "metrics.jsonl")[-1]
    assert f"{last['train/loss']:.4f}" in text and "\x1b" not in text


def test_runs_under_way(tmp_path, capsys, monkeypatch):
    """Batches of 100 at 10 images a second, 20 steps to go; a torn line is left out; no line is
    wider than the terminal; a long silence is shown."""
    monkeypatch.setenv("COLUMNS", "70")
    one = started_run(tmp_path / "one", *(logged(step) for step in (2, 4, 6, 8)))
    other = started_run(tmp_path / "other", logged(2), logged(4), logged(8))
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "train/lo')
    text = once(capsys, one, other)
    assert text.count("running, last record 0:0") == 2 and text.count("no checkpoint yet") == 2
    assert text.count("29%  epoch 1/2  step 8/28  ETA 3:20") == 2
    assert max(map(len, text.splitlines())) <= 70
    long_ago = time.time() - 3600
    os.utime(one / "metrics.jsonl", (long_ago, long_ago))
    assert "silent for 1:00:0" in once(capsys, one)


@pytest.mark.parametrize("content", [None, "\n\n", '{}\n[1]\nnonsense\n{"step": 3, "tr'])
def test_a_run_without_a_record(tmp_path, capsys, content):
    directory = started_run(tmp_path / "run")
    (directory / "metrics.jsonl").unlink()
    if content is not None:
        (directory / "metrics.jsonl").write_text(content)
    assert "waiting for the first record" in once(capsys, directory)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere: no such run directory"),
        (["."], ": is not a run directory (it has no config.yaml)"),
        (["nowhere", "--every", "0"], "--every 0: must be from 0.05 to 3600 seconds"),
        (["a", "b", "--picture", "p.png"], "--picture p.png: shows one run; name one"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ") and message in line


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1), st.integers(1, 50))
def test_a_sparkline_goes_from_the_least_to_the_largest(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values)) and set(line) <= set(BLOCKS)
    if len(values) <= width and max(values) - min(values) > 1e-3:
        assert line[values.index(max(values))] == BLOCKS[-1]
        assert line[values.index(min(values))] == BLOCKS[0]


@pytest.mark.slow
def test_the_live_view_follows_a_run_and_ends_cleanly(tmp_path):
    """In a real terminal: new records appear; Ctrl-C ends it with exit code 0."""
    directory = started_run(tmp_path / "run", logged(2), logged(4))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lipnext_scale.watch", str(directory), "--every", "0.1"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        read_until(ours, "step 4/28")
        append(directory, logged(6, 0.125))
        read_until(ours, "0.1250")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, words: str, seconds: float = 60) -> None:
    text, deadline = "", time.monotonic() + seconds
    while words not in text:
        with selectors.DefaultSelector() as selector:
            selector.register(terminal, selectors.EVENT_READ)
            assert selector.select(max(0.0, deadline - time.monotonic())), text
        text += os.read(terminal, 65536).decode(errors="replace")


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 1000
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return {tuple(int(part) for part in pixel) for pixel in np.unique(pixels, axis=0)}


def test_the_summary_is_drawn_at_the_end_and_when_asked_for(trained, tmp_path, capsys):
    """Not blank: both colours of curves are in it, and many more of the blocks. One that cannot be
    drawn does not fail a run."""
    main([str(trained), "--picture", str(tmp_path / "asked.png")])
    assert capsys.readouterr().out == f"{tmp_path / 'asked.png'}\n"
    for path in (trained / "summary.png", tmp_path / "asked.png"):
        found = colours(path)
        assert {(0x1F, 0x5F, 0xA8), (0xC4, 0x45, 0x2C)} <= found and len(found) > 100
    with pytest.raises(SystemExit):
        main([str(trained), "--picture", str(tmp_path / "no" / "asked.png")])
    assert "--picture" in capsys.readouterr().err
    (tmp_path / "run" / "summary.png.partial").mkdir(parents=True)
    run(tmp_path / "run", "run.summary=true", "run.max_steps=1")
    assert "summary.png: the summary was not drawn: IsADirectoryError" in capsys.readouterr().out
