"""planning/cpu.py: the seconds of a row, from curves; and the file that `bench cpu` writes."""

import json
from typing import Any

import pytest

from lipnext_scale.bench import main
from lipnext_scale.checks import cpu as measured
from lipnext_scale.planning import cpu
from lipnext_scale.planning.ledger import Row
from lipnext_scale.utils.errors import UserError, command

RATES: dict[str, Any] = {
    "products": {name: [[16, 1e9], [64, 4e9]] for name in cpu.SHAPES},
    "passes": {name: [[1e3, 1e-6], [1e5, 1e-4], [1e6, 2e-3]] for name in cpu.PASSES},
    "collectives": {name: [[1e3, 1e-4], [1e6, 1e-2]] for name in ("all_gather", "all_reduce")},
    "host": 3e-6,
    "call": 2e-6,
}


def kernel(moved: int, name: str = "add", **more: Any) -> Row:
    return Row("kernel", "step", name, more.pop("place", "?"), False, read=moved, **more)


def product(*shape: int, added: int = 0) -> Row:
    matrices, rows, inner, columns = shape
    read = 4 * matrices * inner * (rows + columns) + added
    flops, written = 2 * matrices * rows * inner * columns, 4 * matrices * rows * columns
    figures = {"flops": flops, "read": read, "written": written, "shape": shape}
    return Row("product", "step", "mm", "?", False, precision="fp32", **figures)


def test_curves_are_straight_in_logarithms_and_go_on():
    curve = [[1.0, 1.0], [100.0, 10.0], [1000.0, 1000.0]]
    found = [cpu.along(curve, x) for x in (0.1, 1, 10, 100, 1000, 3000)]
    assert found == pytest.approx([1, 1, 10**0.5, 10, 1000, 3000])
    assert cpu.along(curve, 3000, proportional=False) == 1000


def test_kernels_take_the_hosts_time_and_their_pass():
    found = [cpu.seconds_of(kernel(moved), RATES) for moved in (0, 1000, 10**5, 10**6, 10**7)]
    assert found == pytest.approx([3e-6, 3e-6, 1.02e-4, 2.002e-3, 2.0002e-2])


def test_products_take_their_flops_at_the_rate_of_the_smallest_dimension():
    found = cpu.seconds_of(product(1, 1000, 64, 64), RATES)
    assert found == pytest.approx(5e-6 + 2 * 1000 * 64**2 / 4e9)
    assert cpu.seconds_of(product(1, 1000, 32, 64), RATES) == pytest.approx(
        5e-6 + 2 * 1000 * 32 * 64 / 2e9
    )
    copied = 4 * 1000 * 64 + 1000
    assert cpu.seconds_of(product(1, 1000, 64, 64, added=1000), RATES) == pytest.approx(
        found + cpu.along(RATES["passes"]["plain"], copied) - 1e-6
    )


def test_more_never_takes_less():
    for rows in (
        [kernel(moved) for moved in range(0, 3 * 10**6, 10**5)],
        [product(1, 512, d, d) for d in range(8, 200, 8)],
        [product(k, 64, 64, 64) for k in range(1, 20)],
        [
            Row("collective", "step", "all_reduce", "?", False, read=n)
            for n in range(0, 10**7, 10**5)
        ],
    ):
        seconds = [cpu.seconds_of(row, RATES) for row in rows]
        assert seconds == sorted(seconds) and seconds[0] > 0


def test_classes():
    assert cpu.class_of(kernel(1, "copy_", place="manifold/exponential.py:175")) == "transposed"
    assert cpu.class_of(Row("kernel", "forward", "copy_", "models/fused.py:208", True)) == "strided"
    names = {cpu.class_of(kernel(1, name)) for name in (*cpu.CLASSES, "add")}
    assert names <= set(cpu.PASSES)


def test_what_bench_cpu_writes_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measured, "WIDTHS", (64, 32))
    monkeypatch.setattr(measured, "SIZES", (1 << 12, 1 << 14, 1 << 16))
    monkeypatch.setattr(measured, "SECONDS", 0.0)  # every case once
    out = tmp_path / "cpu.json"
    main(["cpu", "--out", str(out)])
    rates = cpu.read_rates(str(out))
    assert rates["device"] and rates["threads"] > 0 and rates["ranks"] == 1
    assert cpu.seconds_of(kernel(10**6), rates) > cpu.seconds_of(kernel(0), rates) > 0
    assert rates["device"] in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[1]", "no JSON", None])
def test_another_file_is_refused_in_a_line(tmp_path, capsys, text):
    path = tmp_path / "gpu.json"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        command(lambda: [cpu.read_rates(str(path))] and None)()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "gpu.json" in error and "bench cpu" in error


def test_a_rate_of_zero_is_refused(tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(RATES))
    assert cpu.read_rates(str(path)) == RATES
    passes = RATES["passes"] | {"pool": [[1000, 0]]}
    path.write_text(json.dumps(RATES | {"passes": passes}))
    with pytest.raises(UserError):
        cpu.read_rates(str(path))
