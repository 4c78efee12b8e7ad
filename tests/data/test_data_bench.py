"""python -m lipnext_scale.bench data: what it measures; mistakes in asking for any bench."""

import re
from pathlib import Path

import pytest

from lipnext_scale.bench import main

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")


def test_every_row_has_its_figure(capsys):
    """On the digits: as many samples as there are, and rates that fit together."""
    main(["data", "--config", DIGITS, "--seconds", "0.3", "--ranks", "2", "data.workers=2"])
    lines = capsys.readouterr().out.splitlines()
    rows = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines)
    assert rows["samples"] == "1,437 in 1 shards"
    rate, bare = float(rows["images/s, 2 workers"]), float(rows["decoding alone, 2 process(es)"])
    assert rate > 0 and float(rows["share of that"]) == pytest.approx(rate / bare, abs=0.01)
    for stage in ("read", "decode", "augment"):
        assert float(rows[f"{stage}, images/s of one process"]) > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["network", "--config", DIGITS], "network"),
        (["data", "--config", DIGITS, "--seconds", "0"], "argument --seconds: 0 must be above 0"),
        (["data", "--config", DIGITS, "--ranks", "7"], "data.batch_size = 64"),
        (["gpu", "--config", DIGITS], "torch sees no GPU"),  # tests are of CPUs
        (["gpu", "--config", DIGITS, "--predicted", "none.json"], "--predicted"),
        (["data", "--config", DIGITS, "data.train=none-*.tar"], "data.train = 'none-*.tar'"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    written = capsys.readouterr().err
    assert ended.value.code == 2 and message in written
    assert written.startswith("error: ") and written.count("\n") == 1
