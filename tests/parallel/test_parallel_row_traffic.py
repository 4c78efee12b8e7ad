"""What a step of the row layout sends, in which order, and the memory it takes for that."""

import pytest
import torch
import torch.distributed as dist
from gloo import run_processes
from row_matrices import build, give, gradients
from torch.distributed.tensor.debug import CommDebugMode

from lipnext_scale.optim import ManifoldAdam
from lipnext_scale.parallel.rows import PackedExchange

SIDE, COUNT = 32, 12


class Wire:
    """Counts the bytes that leave this rank, and the memory of the buffers that they leave from."""

    def __init__(self) -> None:
        self.sent = 0
        self.buffers: dict[int, int] = {}
        self._send = dist.all_to_all_single
        dist.all_to_all_single = self.count

    def count(self, output, source, output_split_sizes, input_split_sizes, group, async_op):
        own = dist.get_rank(group)
        assert input_split_sizes[own] == output_split_sizes[own] == 0, "local rows are not sent"
        assert async_op and sum(input_split_sizes) == source.numel()
        self.sent += source.numel() * source.element_size()
        for storage in (output.untyped_storage(), source.untyped_storage()):
            self.buffers[storage.data_ptr()] = storage.nbytes()
        return self._send(output, source, output_split_sizes, input_split_sizes, group, async_op)


def measure(rank, ranks, return_dtype):
    """(bytes sent by a step, bytes of all buffers on the wire, collectives of a step by name)."""
    sides = [SIDE] * COUNT
    parameters, optimizer = build(sides, lr=0.01, bucket_bytes=1, return_dtype=return_dtype)
    wire = Wire()
    for step in range(3):
        wire.sent = 0
        give(parameters, gradients(sides, step))
        with CommDebugMode() as collectives:
            optimizer.step()
    counts = {str(name): count for name, count in collectives.get_comm_counts().items() if count}
    return wire.sent, sum(wire.buffers.values()), counts


@pytest.mark.parametrize("return_dtype, both_ways", [(torch.float32, 8), (torch.bfloat16, 6)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_what_the_layout_promises(world_size, return_dtype, both_ways):
    """8·P·(R-1)/R² bytes a rank, 6·… with bfloat16, within 5 %, by all-to-alls alone."""
    promised = both_ways * COUNT * SIDE**2 * (world_size - 1) / world_size**2
    buckets = COUNT // world_size
    for sent, buffers, counts in run_processes(world_size, measure, return_dtype):
        assert promised <= sent <= 1.05 * promised
        assert list(counts.values()) == [2 * buckets] and "alltoall" in next(iter(counts))
        # An outbox and an inbox for two buckets each way; a bucket has a matrix of each owner.
        assert buffers <= 1.05 * 8 * SIDE**2 * 4


def send_nothing(rank, ranks):
    parameters, optimizer = build([SIDE] * COUNT, lr=0.01)
    optimizer.zero_grad()
    with CommDebugMode() as collectives:
        optimizer.step()
    return collectives.get_total_counts()


def test_a_step_without_gradients_is_silent():
    """No collective where no matrix has a gradient."""
    assert run_processes(2, send_nothing) == [0, 0]


def record_order(rank, ranks):
    sides = [4] * (3 * ranks)
    parameters, optimizer = build(sides, lr=0.01, bucket_bytes=1)
    give(parameters, gradients(sides, 0))
    events: list[str] = []
    kinds: dict[int, str] = {}  # the first that is used takes gradients

    def recorded(method, word):
        def wrapped(self, *args):
            if isinstance(self, PackedExchange):
                kind = kinds.setdefault(id(self), "rows" if kinds else "gradients")
                events.append(f"{word} {kind}")
            else:
                events.append(word)
            return method(self, *args)

        return wrapped

    PackedExchange.post = recorded(PackedExchange.post, "post")
    PackedExchange.finish = recorded(PackedExchange.finish, "finish")
    ManifoldAdam.step = recorded(ManifoldAdam.step, "move")
    optimizer.step()
    return events


def test_exchanges_run_while_matrices_move():
    """When a bucket moves, the next one's gradients and the last one's rows are on the wire."""
    for events in run_processes(2, record_order):
        assert events == [
            *("post gradients", "post gradients", "finish gradients", "move", "post rows"),
            *("post gradients", "finish gradients", "move", "post rows", "finish rows"),
            *("finish gradients", "move", "post rows", "finish rows"),
            "finish rows",
        ]
