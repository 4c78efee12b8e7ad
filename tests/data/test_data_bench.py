"""python -m lipnext_scale.bench data: what it measures, and mistakes in asking for it."""

import re
from pathlib import Path

import numpy as np
import pytest
from sets_making import make_source, write_set

from lipnext_scale.bench import loading
from lipnext_scale.bench.__main__ import main
from lipnext_scale.data.source import SampleStore

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_has_its_figure(capsys, workers):
    """On the digits: as many samples as there are, and rates that fit together."""
    main(
        ["data", "--config", DIGITS, "--seconds", "0.3", "--ranks", "2", f"data.workers={workers}"]
    )
    lines = capsys.readouterr().out.splitlines()
    rows = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines)
    assert rows["samples"] == "1,437 in 1 shards"
    opened = next(name for name in rows if name.startswith("opened in "))
    assert rows[opened] == "64, of it here 32"
    rate = float(rows[f"images/s, {workers} workers"])
    bare = float(rows[f"decoding alone, {max(1, workers)} process(es)"])
    assert rate > 0 and float(rows["share of that"]) == pytest.approx(rate / bare, abs=0.01)
    for stage in ("read", "decode", "augment"):
        assert float(rows[f"{stage}, images/s of one process"]) > 0
    assert 0 <= float(rows["batches ready when asked for"]) <= 2 * workers
    found, ideal = re.match(r"(.*) bits; at random (.*)", rows["class entropy of a batch"]).groups()
    assert float(found) == pytest.approx(float(ideal), abs=0.1) and 2.9 < float(ideal) <= 3.33
    assert re.fullmatch(r"\d+\.\d{3} s; first batch \d+\.\d{3} s", rows["put to step 100,000"])
    assert len(rows) == len(lines) == 11


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["data"], "--config"),
        (["--config", DIGITS], "what"),
        (["network", "--config", DIGITS], "network"),
        (["data", "--config", "none.yaml"], "none.yaml"),
        (["data", "--config", DIGITS, "--seconds", "0"], "--seconds and --ranks must be positive"),
        (["data", "--config", DIGITS, "--ranks", "7"], "data.batch_size = 64"),
        (["data", "--config", DIGITS, "data.train=none-*.tar"], "data.train = 'none-*.tar'"),
        (["data", "--config", DIGITS, "data.wrokers=2"], "data.wrokers"),
    ],
)
def test_mistakes_are_told_in_a_line(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and said in told
    assert told.startswith("error: ") and told.count("\n") == 1


def test_bare_decoding_uses_its_memory_again(tmp_path: Path, monkeypatch):
    """As the loader does: what it is measured against must not be slower for want of it."""
    source = make_source(write_set(tmp_path, [20], kind="jpeg", shape=(16, 16, 3)), 4, size=8)
    decoded: list[np.ndarray] = []
    decode = SampleStore.decode

    def noted(store: SampleStore, *arguments: object) -> np.ndarray:
        decoded.append(decode(store, *arguments))
        return decoded[-1]

    def twice(work, processes: int, seconds: float) -> float:
        monkeypatch.setattr(SampleStore, "decode", noted)
        work(0), work(1)
        return 1.0

    monkeypatch.setattr(loading, "rate_in_processes", twice)
    loading.bare_rate(source, 1, 1.0)
    assert len(decoded) == 2 and np.shares_memory(*decoded)
