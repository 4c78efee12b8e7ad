"""Seconds of a step on a CPU: every row of its ledger, from curves that `bench cpu` has measured.

    product      a call, and FLOPs at the rate of its shape and of its smallest dimension
    kernel       the time of its class of passes for so many bytes, with caches and threads
    both         the host's own time: Python, autograd, dispatch
    collective   the time of its kind for so many bytes, nothing beside it

A CPU does one after the other, so a step is their sum.
"""

import json
import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

from lipnext_scale.planning.ledger import Row
from lipnext_scale.utils.errors import UserError

Curve = list[list[float]]  # points (x, y), x rising
Rates = dict[str, Any]

SHAPES = ("tall", "inner", "stack")  # of products: (smallest dimension, FLOP/s)
# Of passes and collectives: (bytes, seconds).
PASSES = ("plain", "strided", "transposed", "reduction", "pool", "bytes")
# Operators that are slower than adding two tensors; places where copy_ and sub are.
CLASSES = {
    "roll": "strided",
    "sum": "reduction",
    "linalg_vector_norm": "reduction",
    "_foreach_norm": "reduction",
}


def read_rates(path: str) -> Rates:
    """What `bench cpu` has written."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        curves = [found["products"][name] for name in SHAPES]
        curves += [found["passes"][name] for name in PASSES]
        curves += list(found["collectives"].values())
        points = [[1, found["host"]], *(point for curve in curves for point in curve)]
        if all(curves) and all(x > 0 and y > 0 for x, y in points) and found["call"] >= 0:
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    right = "must be a file that `python -m lipnext_scale.bench cpu` has written"
    raise UserError(f"--rates = {path!r}: {right}")


def seconds_of(row: Row, rates: Rates) -> float:
    if row.kind == "product":
        return _product(row, rates)
    if row.kind == "kernel":
        return float(rates["host"] + _pass(rates["passes"][class_of(row)], row.bytes))
    if row.kind == "collective" and rates["collectives"]:
        kinds = rates["collectives"]
        return along(kinds.get(row.name, kinds["all_gather"]), row.bytes)
    return 0.0


def class_of(row: Row) -> str:
    if row.name in ("copy_", "sub") and row.place.startswith("manifold/"):
        return "transposed"
    if row.name == "clone" and row.place.startswith("utils/products.py"):
        return "transposed"
    if row.name == "linalg_vector_norm" and row.place.startswith("models/blocks.py"):
        return "pool"
    if row.in_block and row.name == "copy_" and not row.place.startswith("utils/products.py"):
        return "strided"  # after a roll, back into its channels
    if row.in_block and row.name in ("_to_copy", "mul_"):
        return "bytes"  # signs
    return CLASSES.get(row.name, "plain")


def _product(row: Row, rates: Rates) -> float:
    matrices, rows, inner, columns = row.shape
    shape = "stack" if matrices > 1 else "inner" if inner > max(rows, columns) else "tall"
    rate = along(rates["products"][shape], min(rows, inner, columns), proportional=False)
    added = row.read - 4 * matrices * inner * (rows + columns)
    # What the product is added to is copied to the result first, but by oneDNN.
    copies = added > 0 and row.name != "_linear_pointwise"
    copied = _pass(rates["passes"]["plain"], added + row.written) if copies else 0.0
    return float(rates["host"] + rates["call"] + row.flops / rate + copied)


def _pass(curve: Curve, moved: float) -> float:
    """Beside the call of the operator, which is all that few bytes take."""
    return along(curve, moved) - curve[0][1]


def along(curve: Curve, x: float, proportional: bool = True) -> float:
    """y at x, straight between the points of a double logarithmic plot. Before the first it stays
    the same; behind the last it does too, or is proportional to x."""
    index = bisect_left(curve, x, key=lambda point: point[0])
    if index == 0:
        return curve[0][1]
    (x0, y0) = curve[index - 1]
    if index == len(curve):
        return y0 * x / x0 if proportional else y0
    x1, y1 = curve[index]
    return y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0))
