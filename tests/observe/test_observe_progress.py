"""Progress in a log: plain lines, now and then, from rank 0."""

import pytest

from lipnext_scale.utils import progress
from lipnext_scale.utils.progress import Progress


@pytest.mark.parametrize("silent", [False, True])
def test_lines_have_rate_and_rest(silent, monkeypatch, capsys):
    """At most one in ten seconds; none on other ranks, and no rate before anything is done."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    bar = Progress(100, done=20, unit="image", title="train", log_seconds=10, silent=silent)
    for done in (0, 0, 5, 5, 5, 5):
        now[0] += 6
        bar.advance(done)
    bar.say("a line")
    bar.close()
    out, error = capsys.readouterr()
    lines = ["train: 20/100 images", "train: 30/100 images, 0/s, 168 s to go"]
    lines += ["train: 40/100 images, 1/s, 108 s to go", "a line"]
    assert out.splitlines() == ([] if silent else lines) and error == ""
