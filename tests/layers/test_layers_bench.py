"""python -m lipnext_scale.bench layers: a row for every family, in a narrow network."""

import csv

import pytest

from lipnext_scale.bench import main
from lipnext_scale.checks import layers
from lipnext_scale.models.layers import FAMILIES, Gated

WIDTH = 32


def test_every_family_has_its_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layers, "SECONDS", 0)
    monkeypatch.setattr(layers, "ROUNDS", 2)
    out = tmp_path / "layers.csv"
    main(["layers", "--widths", str(WIDTH), "--device", "cpu", "--out", str(out)])
    with out.open() as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["manifold", *FAMILIES]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split() for line in printed[1:]] == [list(row.values()) for row in rows.values()]
    tokens = layers.IMAGES * layers.SIDE**2
    for layer, row in rows.items():
        assert row["width"] == str(WIDTH) and float(row["unit_ms"]) > 0
        assert float(row["unit_mb"]) == pytest.approx(2 * 4 * tokens * WIDTH / 1e6, rel=1e-3)
        assert float(row["training"]) > 0 and float(row["frozen"]) > 0
        # X + pos, what the mixers make of it, and where they are gated what σ makes.
        assert float(row["memory"]) > (2.5 if isinstance(FAMILIES.get(layer), Gated) else 1.5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--widths", "64,none"], "argument --widths: none must be a whole number from 1"),
        (["--out", "no/such/layers.csv"], "argument --out: no/such/layers.csv"),
    ],
)
def test_mistakes_end_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["layers", *arguments])
    written = capsys.readouterr().err
    assert ended.value.code == 2 and message in written and written.count("\n") == 1
