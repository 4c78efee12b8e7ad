"""What a ledger's rows cost on an H100 at least, and the figures that have budgets.

A time is the sum over operators of the longer of arithmetic and memory: collectives are taken to
hide behind it, launches to be quicker than what they launch. So it is a bound from below.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lipnext_scale.planning.ledger import UNPRICED, Row
from lipnext_scale.planning.walk import IMAGENET

TERA = 1e12
# The share of the data sheet's number that good kernels reach.
FLOPS_PER_SECOND = {
    "bf16": 0.65 * 989 * TERA,
    "tf32": 0.70 * 495 * TERA,
    "fp32": 0.80 * 67 * TERA,
    "fp64": 0.80 * 34 * TERA,
}
BYTES_PER_SECOND = 0.80 * 3.35 * TERA


def seconds(rows: Iterable[Row]) -> float:
    return sum(_seconds(row) for row in rows if row.kind in ("product", "kernel"))


def _seconds(row: Row) -> float:
    arithmetic = row.flops / FLOPS_PER_SECOND[row.precision] if row.flops else 0.0
    return max(arithmetic, row.bytes / BYTES_PER_SECOND)


def figures(rows: list[Row], width: int, depth: int, batch: int, entries: int) -> dict[str, Any]:
    """entries: numbers in the matrices that this rank moves."""
    kernels = [row for row in rows if row.kind == "kernel"]
    block = [row for row in kernels if row.in_block]
    manifold = [row for row in kernels if row.phase == "manifold"]
    manifold_bytes = sum(row.bytes for row in manifold)
    waits = Counter(f"{r.phase}: {r.name}, {r.place}" for r in rows if r.kind == "wait")
    of_phase: dict[str, list[Row]] = {}
    for row in rows:
        of_phase.setdefault(row.phase, []).append(row)
    return {
        "tflop": {name: flops / TERA for name, flops in _flops(rows).items()},
        "square_products": _square_products(rows, width),
        "waits": sum(waits.values()),
        "wait_places": dict(waits),
        "launches_per_block": len(block) / depth,
        "bytes_per_block": sum(row.bytes for row in block) / depth,
        "manifold_launches": len(manifold),
        "manifold_bytes": manifold_bytes,
        "manifold_bytes_per_entry": manifold_bytes / entries,
        "launches": len(kernels) + sum(row.kind == "product" for row in rows),
        "collective_bytes": _collectives(rows),
        "milliseconds": {phase: 1e3 * seconds(found) for phase, found in of_phase.items()},
        "minutes_per_epoch": seconds(rows) * IMAGENET / batch / 60,
        "unpriced": sorted({row.name for row in kernels if row.name in UNPRICED}),
    }


def _flops(rows: list[Row]) -> Counter[str]:
    flops: Counter[str] = Counter()
    for row in rows:
        if row.flops:
            flops[row.precision] += row.flops
    return flops


def _square_products(rows: list[Row], width: int) -> Counter[str]:
    """Products of width × width matrices.

    passes: forward and backward, where they are those of M and R with each other. fp32: anywhere.
    """
    count = Counter({"passes": 0, "fp32": 0})
    for row in rows:
        if row.squares and row.shape[1] == width:
            count["fp32"] += row.squares if row.precision == "fp32" else 0
            count["passes"] += row.squares if row.phase in ("forward", "backward") else 0
    return count


def _collectives(rows: list[Row]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        if row.kind == "collective":
            total[row.name] += row.bytes
    return total
