"""`python -m lipnext_scale.watch` on runs that are whole, torn, empty, missing and alive."""

import fcntl
import json
import os
import pty
import re
import select
import selectors
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed_runs import recipe, run
from PIL import Image

from lipnext_scale import config as configuration
from lipnext_scale.metrics import read_records
from lipnext_scale.observe.live import (
    BLOCKS,
    KEPT,
    Curve,
    FollowedRun,
    Pen,
    _cut,
    render,
    sparkline,
    visible_length,
)
from lipnext_scale.observe.picture import _by_depth, draw_summary_or_say
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.watch import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its summary, stopped at the fifth step."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    run(directory, "run.summary=true", "run.eval_every=1")
    return directory


def started_run(directory: Path, *records: dict) -> Path:
    """A run directory with these records and nothing else; 14 steps an epoch, 28 in all."""
    directory.mkdir(parents=True)
    written = configuration.dump(recipe(directory, "run.log_every=2"))
    (directory / "config.yaml").write_text(written)
    for record in records:
        append(directory, record)
    return directory


def append(directory: Path, record: dict) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def logged(step: int, loss: float = 1.0) -> dict:
    told = {"train/loss": loss, "train/accuracy": 0.5, "train/epoch": step / 14}
    return {"step": step, "seconds": 10.0 * step, "images_per_second": 40.0, **told}


def once(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([*map(str, arguments), "--once"])
    return capsys.readouterr().out


def test_a_run_at_its_end(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = once(capsys, trained)
    assert "finished" in told.splitlines()[0] and "step 5/5" in told
    assert "checkpoint of step 5, 0:" in told and "test CRA" in told and "(subset)" in told
    last = read_records(trained / "metrics.jsonl")[-1]
    assert f"{last['train/loss']:.4f}" in told and "\x1b" not in told


def test_a_run_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten seconds a step, 20 steps to go; silent for long, it is said to be."""
    directory = started_run(tmp_path / "run", *(logged(step) for step in (2, 4, 6, 8)))
    told = once(capsys, directory)
    assert "running, told 0:0" in told and "29%  epoch 1/2  step 8/28  ETA 3:20" in told
    assert "no checkpoint yet" in told
    long_ago = time.time() - 3600
    os.utime(directory / "metrics.jsonl", (long_ago, long_ago))
    assert "silent for 1:00:0" in once(capsys, directory)


def test_a_torn_last_line_is_waited_for(tmp_path: Path) -> None:
    directory = started_run(tmp_path / "run", logged(2), logged(4))
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')
    followed = FollowedRun(directory)
    followed.refresh()
    assert followed.step == 4
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.25}\n')
    followed.refresh()
    assert followed.step == 6 and followed.latest["train/loss"] == 0.25


def test_a_run_that_goes_back_to_its_checkpoint_is_read_anew(tmp_path: Path) -> None:
    """The continued run writes the file again without what lay beyond; its clock begins anew."""
    directory = started_run(tmp_path / "run", logged(2), logged(4), logged(6))
    followed = FollowedRun(directory)
    followed.refresh()
    (directory / "new").write_text(json.dumps(logged(2)) + "\n")
    (directory / "new").replace(directory / "metrics.jsonl")
    append(directory, {**logged(4), "seconds": 1.0})
    append(directory, {**logged(6), "seconds": 3.0})
    followed.refresh()
    assert followed.curves["train/loss"].steps == [2, 4, 6]
    assert followed.seconds_per_step == 1.0


@pytest.mark.parametrize("content", [None, "", "\n\n", "{}\n[1]\nnonsense\n", '{"step": 3, "tr'])
def test_a_run_without_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    directory = started_run(tmp_path / "run")
    if content is not None:
        (directory / "metrics.jsonl").write_text(content)
    told = once(capsys, directory)
    assert "waiting for the first record" in told and "nothing recorded yet" in told


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere"], "nowhere: no such run directory"),
        (["."], ": is not a run directory (it has no config.yaml)"),
        (["nowhere", "--every", "0"], "--every 0: must be from 0.05 to 3600 seconds"),
        (["a", "b", "--picture", "p.png"], "--picture p.png: shows one run; name one"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ") and said in line


def test_runs_beside_and_below_each_other(tmp_path: Path) -> None:
    """No line is longer than the terminal is wide, and every run is there."""
    runs = []
    for name in ("one", "two", "three"):
        runs.append(FollowedRun(started_run(tmp_path / name, logged(2), logged(4, 2.0))))
        runs[-1].refresh()
    heights = {}
    for width in (20, 60, 125, 200):
        lines = render(runs, width, colour=True)
        assert max(visible_length(line) for line in lines) <= max(width, 20)
        heights[width] = len(lines)
        plain = re.sub("\x1b\\[[0-9]*m", "", "\n".join(lines))
        assert plain.count("loss") == 3
    assert heights[200] < heights[125] < heights[60] == heights[20]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32)), st.integers(1, 50))
def test_a_sparkline_goes_from_the_least_to_the_largest(values: list[float], width: int) -> None:
    line = sparkline(Curve(list(range(len(values))), values), width)
    assert len(line) == min(width, len(values)) and set(line) <= {*BLOCKS, "?"}
    finite = [value for value in values if abs(value) < float("inf")]
    if len(values) <= width and len(set(finite)) > 1:
        assert line[values.index(max(finite))] == BLOCKS[-1]
        assert line[values.index(min(finite))] == BLOCKS[0]


@given(st.text("ab é█", max_size=20), st.text("xy", max_size=20), st.integers(0, 45))
def test_cutting_counts_what_is_seen(plain: str, styled: str, width: int) -> None:
    text = plain + Pen(True)("bold", styled) + plain
    assert visible_length(text) == 2 * len(plain) + len(styled)
    assert visible_length(_cut(text, width)) == min(width, visible_length(text))


def test_a_long_curve_is_thinned(tmp_path: Path) -> None:
    curve = Curve()
    for step in range(10 * KEPT):
        curve.add(step, 1.0)
    assert KEPT / 2 <= len(curve.steps) <= KEPT and curve.steps[-1] == 10 * KEPT - 1


# ---- live ----------------------------------------------------------------------------------------


def read_until(terminal: int, words: str, seconds: float = 60) -> str:
    """What a terminal shows until some words have been in it."""
    text, deadline = "", time.monotonic() + seconds
    while words not in text:
        with selectors.DefaultSelector() as selector:
            selector.register(terminal, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        assert ready, f"{words!r} did not come; there was {text!r}"
        text += os.read(terminal, 65536).decode(errors="replace")
    return text


@contextmanager
def live_view(directory: Path, every: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process, and the terminal that it is in."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lipnext_scale.watch", str(directory), "--every", every]
    # readline, which pytest imports, puts LINES and COLUMNS into the environment of processes.
    env = {name: text for name, text in os.environ.items() if name not in ("LINES", "COLUMNS")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_the_live_view_follows_a_run_and_ends_cleanly(tmp_path: Path) -> None:
    """In a real terminal: new records appear, Ctrl-C gives the screen back, the exit code is 0."""
    directory = started_run(tmp_path / "run", logged(2), logged(4))
    with live_view(directory, "0.1") as (process, terminal):
        assert "\x1b[?1049h" in read_until(terminal, "step 4/28")
        append(directory, logged(6, 0.125))
        assert "0.1250" in read_until(terminal, "step 6/28") + read_until(terminal, "0.1250")
        process.send_signal(signal.SIGINT)
        end = read_until(terminal, "\x1b[?1049l")
        assert process.wait(timeout=60) == 0 and "Traceback" not in end


@pytest.mark.slow
def test_the_live_view_takes_another_size_at_once(tmp_path: Path) -> None:
    """Long before its next look, and however often: somebody may be dragging the window."""
    directory = started_run(tmp_path / "run", logged(2), logged(4))
    with live_view(directory, "3600") as (process, terminal):
        read_until(terminal, "no checkpoint yet")
        for _ in range(3000):
            process.send_signal(signal.SIGWINCH)
            time.sleep(0.0003)
            while selectable(terminal):
                os.read(terminal, 65536)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 80, 0, 0))
        process.send_signal(signal.SIGWINCH)
        read_until(terminal, "more lines")
        process.send_signal(signal.SIGINT)
        read_until(terminal, "\x1b[?1049l")
        assert process.wait(timeout=60) == 0


def selectable(terminal: int) -> bool:
    return bool(select.select([terminal], [], [], 0)[0])


# ---- the picture ---------------------------------------------------------------------------------


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 1000
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return {tuple(int(part) for part in pixel) for pixel in np.unique(pixels, axis=0)}


def test_the_summary_is_drawn_at_the_end(trained: Path) -> None:
    """Not blank: both colours of curves are in it, and many more of the blocks."""
    found = colours(trained / "summary.png")
    assert {(0x1F, 0x5F, 0xA8), (0xC4, 0x45, 0x2C)} <= found and len(found) > 100


def test_the_summary_is_drawn_when_asked_for(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(trained), "--picture", str(tmp_path / "asked.png")])
    assert capsys.readouterr().out == f"{tmp_path / 'asked.png'}\n"
    assert len(colours(tmp_path / "asked.png")) > 100
    with pytest.raises(SystemExit):
        main([str(trained), "--picture", str(tmp_path / "no" / "asked.png")])
    assert "--picture" in capsys.readouterr().err


def test_a_number_that_is_not_finite_is_a_gap(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not recorded (`Metrics`) of one block, at one step: the others are drawn as they are."""
    whole = read_records(trained / "metrics.jsonl")
    torn = [dict(record) for record in whole]
    del torn[1]["gradient/block_01"], torn[1]["drift/block_00"]
    directory = started_run(tmp_path / "run", *torn)
    main([str(directory), "--picture", str(tmp_path / "torn.png")])
    assert len(colours(tmp_path / "torn.png")) > 100
    steps, values, names = _by_depth(torn, "gradient")
    expected = _by_depth(whole, "gradient")[1]
    assert names[1] == "gradient/block_01" and np.isnan(values).sum() == 1
    assert np.isnan(values[1, list(steps).index(torn[1]["step"])])
    assert np.array_equal(values, np.where(np.isnan(values), np.nan, expected), equal_nan=True)
    assert "most drift in block" in once(capsys, directory)


def test_a_summary_that_cannot_be_drawn_is_said(trained: Path, tmp_path: Path) -> None:
    """It does not fail a run that has come to its end."""
    heard: list[str] = []
    draw_summary_or_say(RunDirectory(trained), tmp_path / "no" / "summary.png", heard.append)
    assert len(heard) == 1 and "the summary was not drawn" in heard[0]
