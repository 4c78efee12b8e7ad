"""Progress in a log: plain lines, now and then, from one process."""

import pytest

from lipnext_scale import progress
from lipnext_scale.progress import Progress


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch):
    """A clock that goes on by so many seconds whenever it is told to."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])

    def seconds(count: float) -> None:
        now[0] += count

    return seconds


def test_lines_tell_rate_and_rest_at_their_time(passing, capsys):
    told = Progress(100, done=20, unit="image", title="train", log_seconds=10)
    for _ in range(8):
        passing(4)
        told.advance(5)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "train: 35/100 images, 1/s, 52 s to go",
        "train: 50/100 images, 1/s, 40 s to go",
    ]


def test_nothing_done_yet_has_no_rate(passing, capsys):
    """A slow beginning: whoever asks for progress may have none to tell."""
    told = Progress(100, title="train", log_seconds=10)
    passing(11)
    told.advance(0)
    assert capsys.readouterr().out == "train: 0/100 steps\n"


def test_silent_is_silent(passing, capsys):
    """All ranks but the first, in a log too."""
    told = Progress(100, title="train", log_seconds=10, silent=True)
    passing(11)
    told.advance(50)
    told.say("half of it")
    told.close()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
