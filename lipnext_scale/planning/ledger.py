"""Writes down every operator on the device: what it is, where it is called, what it costs.

    product      a matrix product: FLOPs in the precision of its operands
    kernel       any other operator, ours (`lipnext::`) too: a launch and its bytes
    collective   the bytes that a rank sends to the others of its group
    copy         between host and device, while the host goes on
    wait         the host waits for the device
    record, stream_wait   an event on a stream; a stream waits for it

Memory is written down too: each storage from its first tensor to its last.

Fake tensors have no values: where the host reads one, `answer` makes it up.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lipnext_scale
from lipnext_scale.manifold import kernels
from lipnext_scale.planning.memory import Memory

PACKAGE = str(Path(lipnext_scale.__file__).parent) + "/"
OURS = str(Path(__file__).parent) + "/"
DEEPSPEED = "/site-packages/deepspeed/runtime/"
BLOCKS = "models/fused.py"  # what blocks do passes through it, forward and backward

# Left and right operand by argument name, and what the product is added to.
PRODUCTS = {
    "mm": ("self", "mat2", None),
    "bmm": ("self", "mat2", None),
    "addmm": ("mat1", "mat2", "self"),
    "addmm_": ("mat1", "mat2", "self"),
    "_addmm_activation": ("mat1", "mat2", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
    "baddbmm_": ("batch1", "batch2", "self"),
    "_linear_pointwise": ("X", "W", "B"),  # of oneDNN
}
COLLECTIVES = ("c10d", "_c10d_functional")
# Memory, views of it and bookkeeping: nothing is launched.
NO_LAUNCH = {
    "_pin_memory",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
    "wait_tensor",
}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
# Their result has other numbers than what they are given to write into.
WRITE_ONLY = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_"}
# Dear, and without a FLOP count here: a step that has one of them is named, not priced.
UNPRICED = {"linalg_matrix_exp", "_linalg_svd", "linalg_qr", "_linalg_eigh"}


@dataclass(frozen=True)
class Row:
    kind: str
    phase: str
    name: str
    place: str  # in the package
    in_block: bool
    flops: int = 0
    precision: str = ""
    read: int = 0
    written: int = 0
    shape: tuple[int, ...] = ()  # of a product: matrices, rows, inner length, columns
    stream: int = 0
    event: int = 0
    ranks: int = 1  # of a collective's group
    across: bool = False  # whether they are on several nodes
    waited: bool = True  # whether its stream waits for a collective at once

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def squares(self) -> int:
        """Of products of square matrices: how many."""
        return self.shape[0] if len(set(self.shape[1:])) == 1 else 0


@dataclass(frozen=True)
class Place:
    """The innermost line of the package, or of DeepSpeed, that is running."""

    line: str = "?"
    function: str = "?"
    in_block: bool = False

    @classmethod
    def here(cls) -> "Place":
        line = function = "?"
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if inside := _inside(frame.f_code.co_filename):
                if line == "?":
                    line = f"{inside}:{frame.f_lineno}"
                if function[0] in "?<":  # nothing yet, or <genexpr> and the like
                    function = frame.f_code.co_name
                if inside == BLOCKS:
                    return cls(line, function, True)
            frame = frame.f_back
        return cls(line, function)


def _inside(file: str) -> str:
    """The file's path in the package; `deepspeed/…` in DeepSpeed; "" elsewhere."""
    if file.startswith(PACKAGE) and not file.startswith(OURS):
        return file.removeprefix(PACKAGE)
    return "".join(file.rpartition("deepspeed/")[1:]) if DEEPSPEED in file else ""


# --------------------------------------------------------------------------------------------------
# Values for what the host reads: a training that goes well.

ORDINARY_STEP, LOOKAHEAD_STEP = 60_001, 60_000  # of the paper's settings
# By the function that reads. 1e-3 is what a matrix drifts in an epoch at most; no signal came.
FLOATS = {"require_orthogonal": 1e-6, "polar_retract": 1e-3, "train_step": 0.0}
# "Is any matrix far from O(d)?", "is the norm not finite?"; elsewhere "are all finite?".
FALSE_IN = {"polar_retract", "is_invalid_grad_norm"}
# Those that read the optimizers' step counters. Other whole numbers are words of the row layout's
# owners, 0 where nothing failed.
COUNTING = {"step", "_step_in_phases", "_step_on_tensor_cores"}


# --------------------------------------------------------------------------------------------------


class Ledger(TorchDispatchMode):
    """device: whose operators count. per_node: ranks of a node."""

    def __init__(self, device: str = "cuda", per_node: int = 8) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.device, self.per_node = device, per_node
        self.memory = Memory(device)
        self.phase = "build"
        self.stream = self.events = 0
        self.step = ORDINARY_STEP  # what counters on the host say
        self.exponent = 0.1  # the size that picks the products of an exponential

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def name_phase(self, phase: str, owner: Any, method: str) -> None:
        """All that a method of an object does, with what it calls, is of this phase."""
        function: Callable[..., Any] = getattr(owner, method)

        def named(*args: Any, **kwargs: Any) -> Any:
            with self.during(phase):
                return function(*args, **kwargs)

        setattr(owner, method, named)

    def note(self, kind: str, name: str, place: Place | None = None, **figures: Any) -> None:
        place = place or Place.here()
        figures = {"stream": self.stream} | figures
        self.rows.append(Row(kind, self.phase, name, place.line, place.in_block, **figures))

    def read_values(self, tensor: Tensor, name: str = "item") -> bool | int | float:
        """The host reads a tensor; the value that all its entries are taken to have."""
        place = Place.here()
        if self.device == "cuda" and tensor.device.type != "cuda":
            return self.step if tensor.dtype != torch.bool else True
        if self.device == "cuda":
            self.note("wait", name, place, read=_size(tensor))
        return self._answer(place.function, tensor.dtype)

    def _answer(self, function: str, dtype: torch.dtype) -> bool | int | float:
        """What the host finds in a number on the device."""
        if dtype == torch.bool:
            return function not in FALSE_IN
        if dtype.is_floating_point and function in ("_step_in_phases", "step", *FLOATS):
            return FLOATS.get(function, self.step if function == "step" else self.exponent)
        if dtype.is_floating_point:
            return 0.5
        return self.step if function in COUNTING else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the rank's own tensors
        namespace, name = func._schema.name.split("::")
        if name == "_local_scalar_dense":
            return self.read_values(args[0])
        named, place = _by_name(func, args, kwargs), Place.here()
        if name in PRODUCTS:
            out = _product_of(func, named) if "dtype" in func._overloadname else None
            out = func(*args, **kwargs) if out is None else out
            if out.device.type == self.device:
                self.note("product", name, place, **_product_figures(name, named, out))
                self.memory.see([out], self.phase, place.line)
            return out
        out = func(*args, **kwargs)
        tensors, made = _tensors(list(named.values())), _tensors(out)
        self.memory.see(made, self.phase, place.line)
        devices = {tensor.device.type for tensor in tensors + made}
        if self.device not in devices or func.is_view or name in NO_LAUNCH or namespace == "prim":
            return out
        if name in COPIES and len(devices) > 1:
            self._note_copy(name, named, tensors)
        elif namespace in COLLECTIVES:
            self._note_collective(name, named, place)
        else:
            shown = name if namespace == "aten" else f"{namespace}::{name}"
            read, written = _traffic(func, named, made)
            self.note("kernel", shown, place, read=read, written=written)
        return out

    def _note_copy(self, name: str, named: dict[str, Any], tensors: list[Tensor]) -> None:
        source = tensors[-1]  # of (to, from), or alone
        way = "to host" if source.device.type == "cuda" else "to device"
        kind = "copy" if named.get("non_blocking") else "wait"
        self.note(kind, f"copy {way}", read=_size(source))

    def _note_collective(self, name: str, named: dict[str, Any], place: Place) -> None:
        shown, argument = SENDING.get(name, (name, ""))
        if not argument:
            return  # a barrier
        group = dist.ProcessGroup.unbox(named["process_group"])
        ranks, members = group.size(), dist.get_process_group_ranks(group)
        tensors = _tensors(named[argument])
        for key in ("tensors", "output_tensor", "input_tensor", "input", "output"):
            self.memory.name_new("gathered", named.get(key))
        self.note(
            "collective",
            shown,
            place,
            read=int(sum(map(_size, tensors)) * share_sent(shown, ranks)),
            ranks=ranks,
            across=len({member // self.per_node for member in members}) > 1,
            waited=not named.get("async_op", True),
        )


# Operator → (name, the argument that is measured).
SENDING = {
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", "output_tensor"),
    "allreduce_": ("all_reduce", "tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
}


def share_sent(name: str, ranks: int) -> float:
    """Bytes that a rank sends for each byte of the argument.

    A ring: R-1 times what it gathers or scatters, 2·(R-1)/R times what it reduces; all of its
    outbox of an all-to-all, where ours holds nothing for the rank itself. Of a reduction to one
    rank or a broadcast each sends (R-1)/R in the mean.
    """
    mean = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * mean, "all_to_all": 1, "broadcast": mean, "reduce": mean}
    return shares.get(name, ranks - 1)


# --------------------------------------------------------------------------------------------------
# What an operator costs.


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size_read(tensor: Tensor) -> int:
    """What is expanded is read once."""
    numbers = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= length if stride else 1
    return numbers * tensor.element_size()


def _product_of(func: Any, named: dict[str, Any]) -> Tensor:
    """The result of an overload with a type of its own; torch's fake ones are not all right."""
    if named.get("out") is not None:
        return named["out"]
    left, right = (named[key] for key in PRODUCTS[func._schema.name.split("::")[1]][:2])
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=named["out_dtype"])


def _product_figures(name: str, named: dict[str, Any], out: Tensor) -> dict[str, Any]:
    left_name, right_name, added_name = PRODUCTS[name]
    left, right = named[left_name], named[right_name]
    rows, inner, columns = left.shape[-2], left.shape[-1], out.shape[-1]
    matrices = left.numel() // max(1, rows * inner)
    read = _size_read(left) + _size_read(right)
    if added_name and named[added_name] is not None and named.get("beta", 1) != 0:
        read += _size_read(named[added_name])
    return {
        "flops": (8 if left.is_complex() else 2) * matrices * rows * inner * columns,
        "precision": _precision(left),
        "shape": (matrices, rows, inner, columns),
        "read": read,
        "written": _size(out),
    }


def _precision(operand: Tensor) -> str:
    dtype = operand.dtype.to_real()
    if dtype == torch.float32:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    return {torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]


def _traffic(func: Any, named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """(bytes read, bytes written); an argument that is changed in place is both."""
    name = func._schema.name.split("::")[1]
    if name in PARTS:
        return PARTS[name](named, made)
    read, written, changes = 0, 0, False
    shape_only = name.endswith("_like") or name.startswith("new_")
    for argument in func._schema.arguments:
        tensors = _tensors(named.get(argument.name))
        if argument.alias_info is not None and argument.alias_info.is_write:
            changes = True
            written += sum(map(_size, tensors))
            if argument.is_out or name in WRITE_ONLY:
                continue
        if not shape_only:
            read += sum(map(_size_read, tensors))
    # A custom operator may change some tensors and make others; aten returns what it changes.
    if not changes or not func._schema.name.startswith("aten::"):
        written += sum(_size(t) for t in made if not any(t is s for s in _changed(func, named)))
    return read, written


# Operators that touch a part of their arguments, or only write one: (bytes read, bytes written).


def _all_gather_copy_in(named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """FSDP's: into its part of a buffer, which is not read."""
    moved = sum(map(_size, _tensors(named["all_gather_inputs"])))
    return moved, moved


def _shift(named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """The last 4·part channels move, in place."""
    moved = _size(named["x"]) * 4 * named["part"] // named["x"].shape[-1]
    return moved, moved


def _activate_backward(named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """What it writes it does not read, unless that is the gradient itself."""
    written = _tensors([named["out"], named["bias_parts"], named["pos_parts"]])
    return _size(named["grad"]) + _size(named["signs"]), sum(map(_size, written))


def _moments(named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """P is read whole; of the state the upper tiles are read and written."""
    state = _tensors([named["exp_avg"], named["exp_avg_sq"], named["buffer"]])
    upper = sum(_upper(x, kernels.TILE) for x in state)
    return _size(named["product"]) + upper, upper + sum(map(_size, made))


def _of_series(named: dict[str, Any], made: list[Tensor]) -> tuple[int, int]:
    """S and A are read by their upper tiles."""
    halves = _tensors([named["square"], named["exponent"]])
    read = sum(_upper(x, kernels.SYMMETRIC_TILE) for x in halves)
    return read + sum(map(_size, _tensors(named.get("tail")))), sum(map(_size, made))


def _upper(stack: Tensor, tile: int) -> int:
    """Bytes of the tiles on and above the diagonals of a stack [k, d, d]."""
    d = stack.shape[-1]
    entries = sum(min(tile, d - i) * (d - i) for i in range(0, d, tile))
    return len(stack) * entries * stack.element_size()


PARTS = {
    "all_gather_copy_in": _all_gather_copy_in,
    "shift": _shift,
    "activate_backward": _activate_backward,
    "moments_": _moments,
    "tail_operands": _of_series,
    "change_right": _of_series,
}


def _changed(func: Any, named: dict[str, Any]) -> list[Tensor]:
    writes = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    return _tensors([named.get(name) for name in writes])
