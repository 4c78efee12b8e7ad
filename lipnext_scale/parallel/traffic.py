"""What the processes of a run say to each other: calls and bytes of every collective.

    with CountTraffic() as traffic:
        loss.backward()
        optimizer.step()
    print(traffic.collectives, traffic.total_bytes)

Whoever communicates (FSDP2, DDP's reducer, DTensor, our own exchange) does so by an operator of the
dispatcher that takes the process group, and there each call is seen once, in the backward pass too.

`bytes_sent` is what leaves this rank when the algorithm wastes no bandwidth, whatever the backend
does in truth (gloo makes a reduce-scatter of an all-reduce, say). With R ranks in the group of the
call and n bytes in its tensor:

    all_gather       (R-1)·n      n: this rank's part, padding included
    reduce_scatter   (R-1)·n      n: the part this rank receives
    all_reduce       2·(R-1)/R·n  a reduce-scatter, then an all-gather
    all_to_all       the parts that are not for this rank itself
    broadcast        (R-1)/R·n    a chain passes it on, all but the last: a rank's mean share
    reduce           (R-1)/R·n    the same chain, backwards
    scatter          at the root the parts of the others, elsewhere nothing
    gather           n, at the root nothing
    send             n
    recv, barrier    nothing

Fractions of a byte are cut off.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Collective:
    """How often a collective was called, and the bytes that left this rank by it."""

    calls: int = 0
    bytes_sent: int = 0

    def __add__(self, other: "Collective") -> "Collective":
        return Collective(self.calls + other.calls, self.bytes_sent + other.bytes_sent)


@dataclass
class Traffic:
    """Collectives by their plain name. Only those that were called have an entry."""

    collectives: dict[str, Collective] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(collective.bytes_sent for collective in self.collectives.values())

    def add(self, name: str, collective: Collective) -> None:
        self.collectives[name] = self.collectives.get(name, Collective()) + collective


class CountTraffic(TorchDispatchMode):
    """A region whose collectives are counted; `with` gives the Traffic, which grows meanwhile.

    A compiled model stays compiled: what its code calls is seen as it runs. Counting costs some
    microseconds of the host an operator and changes no result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __enter__(self) -> Traffic:
        super().__enter__()
        return self.traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would step back and the region run another program

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # While this mode handles an operator it does not see those called inside. That keeps a
        # functional collective, made of a plain one, from being counted twice, but it would hide
        # what a DTensor does: so DTensor goes first and we see what it makes of the operator.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        rule = _rule(func)
        if rule is not None:
            call = _Call.of(func, args, kwargs)
            self.traffic.add(rule.name, Collective(1, rule.bytes_sent(call)))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Call:
    """A call of a collective: its arguments by name, the size of its group, our rank there."""

    arguments: Mapping[str, Any]
    ranks: int
    rank: int

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        group = _process_group(arguments.get("process_group", arguments.get("group_name")))
        return _Call(arguments, group.size(), group.rank())

    def sizes(self, name: str) -> list[int]:
        """Bytes of every tensor in an argument: a tensor, a list of them or a list of lists."""
        return [tensor.numel() * tensor.element_size() for tensor in _flat(self.arguments[name])]


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for element in value:
            yield from _flat(element)


def _process_group(value: Any) -> dist.ProcessGroup:
    """Plain operators take the group as a script object, functional ones mostly by its name."""
    if isinstance(value, str):
        return torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, dist.ProcessGroup):
        return value
    return dist.ProcessGroup.unbox(value)


class _Rule(NamedTuple):
    name: str
    bytes_sent: Callable[[_Call], int]


def _to_every_other(argument: str) -> Callable[[_Call], int]:
    return lambda call: sum(call.sizes(argument)) * (call.ranks - 1)


def _share(argument: str, times: int = 1) -> Callable[[_Call], int]:
    return lambda call: times * sum(call.sizes(argument)) * (call.ranks - 1) // call.ranks


def _all(argument: str) -> Callable[[_Call], int]:
    return lambda call: sum(call.sizes(argument))


def _nothing(call: _Call) -> int:
    return 0


def _tensors_of_others(call: _Call) -> int:
    """Tensor r is for rank r; a scatter has tensors at its root only."""
    sizes = call.sizes("input_tensors")
    return sum(sizes) - sizes[call.rank] if sizes else 0


def _rows_of_others(call: _Call) -> int:
    """Consecutive rows of one tensor, `input_split_sizes[r]` of them for rank r, or equal parts."""
    tensor = call.arguments["input"]
    rows, splits = tensor.shape[0], call.arguments["input_split_sizes"]
    own = splits[call.rank] if splits else rows // call.ranks
    return (rows - own) * tensor.shape[1:].numel() * tensor.element_size()


def _unless_root(call: _Call) -> int:
    at_root = call.rank == call.arguments["root_rank"]
    return 0 if at_root else sum(call.sizes("input_tensors"))


def _batch_sends(call: _Call) -> int:
    operations = zip(call.arguments["op_list"], call.sizes("tensors"), strict=True)
    return sum(size for operation, size in operations if operation == "isend")


_PLAIN = {
    "allgather_": _Rule("all_gather", _to_every_other("input_tensors")),
    "_allgather_base_": _Rule("all_gather", _to_every_other("input_tensor")),
    "allgather_coalesced_": _Rule("all_gather", _to_every_other("input_list")),
    "allgather_into_tensor_coalesced_": _Rule("all_gather", _to_every_other("inputs")),
    "reduce_scatter_": _Rule("reduce_scatter", _to_every_other("output_tensors")),
    "_reduce_scatter_base_": _Rule("reduce_scatter", _to_every_other("output_tensor")),
    "reduce_scatter_tensor_coalesced_": _Rule("reduce_scatter", _to_every_other("outputs")),
    "allreduce_": _Rule("all_reduce", _share("tensors", 2)),
    "allreduce_coalesced_": _Rule("all_reduce", _share("tensors", 2)),
    "alltoall_": _Rule("all_to_all", _tensors_of_others),
    "alltoall_base_": _Rule("all_to_all", _rows_of_others),
    "broadcast_": _Rule("broadcast", _share("tensors")),
    "reduce_": _Rule("reduce", _share("tensors")),
    "scatter_": _Rule("scatter", _tensors_of_others),
    "gather_": _Rule("gather", _unless_root),
    "send": _Rule("send", _all("tensors")),
    "recv_": _Rule("recv", _nothing),
    "recv_any_source_": _Rule("recv", _nothing),
    "barrier": _Rule("barrier", _nothing),
    "monitored_barrier_": _Rule("barrier", _nothing),
}
_FUNCTIONAL = {
    "all_gather_into_tensor": _Rule("all_gather", _to_every_other("input")),
    "all_gather_into_tensor_out": _Rule("all_gather", _to_every_other("input")),
    "all_gather_into_tensor_coalesced": _Rule("all_gather", _to_every_other("inputs")),
    # These are given all that is reduced, not the part that a rank receives of it.
    "reduce_scatter_tensor": _Rule("reduce_scatter", _share("input")),
    "reduce_scatter_tensor_out": _Rule("reduce_scatter", _share("input")),
    "reduce_scatter_tensor_coalesced": _Rule("reduce_scatter", _share("inputs")),
    "all_reduce": _Rule("all_reduce", _share("input", 2)),
    "all_reduce_": _Rule("all_reduce", _share("input", 2)),
    "all_reduce_coalesced": _Rule("all_reduce", _share("inputs", 2)),
    "all_reduce_coalesced_": _Rule("all_reduce", _share("inputs", 2)),
    "all_to_all_single": _Rule("all_to_all", _rows_of_others),
    "broadcast": _Rule("broadcast", _share("input")),
    "broadcast_": _Rule("broadcast", _share("input")),
    "isend": _Rule("send", _all("tensor")),
    "irecv": _Rule("recv", _nothing),
    "batch_p2p_ops": _Rule("send", _batch_sends),
}
_RULES: dict[str, dict[str, _Rule]] = {
    "c10d": _PLAIN,
    "_c10d_functional": _FUNCTIONAL,
    "_c10d_functional_autograd": _FUNCTIONAL,
    "_dtensor": {"shard_dim_alltoall": _Rule("all_to_all", _share("input"))},
}
_SILENT = {"check_for_nan", "wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group"}


@cache
def _rule(operator: Any) -> _Rule | None:
    """How an operator is counted; None if it says nothing to other ranks."""
    namespace, name = operator._schema.name.split("::")
    if namespace not in _RULES or name in _SILENT:
        return None
    # A collective of a newer torch must not end the run that it is counted in: its calls are told.
    return _RULES[namespace].get(name) or _Rule(f"unknown_{name}", _nothing)
