"""The row layout: matrices whose rows are sharded over ranks, and Manifold Adam for them.

Each matrix has one owner. A step sends rows of its gradient there and brings new rows back.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.optim.lookahead_nadam import local_part
from lipnext_scale.optim.manifold_adam import ManifoldAdam

# --------------------------------------------------------------------------------------------------
# Which rank holds which rows of a matrix, which matrices are exchanged together:
# pure functions of numbers that are equal on all ranks, so all ranks get the same answer.


def row_range(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows [start, stop) that `rank` holds: torch.chunk's rule, which FSDP2 shards by.

    Every shard has ceil(rows/ranks) rows but the last ones, which may have fewer or none.
    """
    length = -(-rows // ranks)
    return min(rank * length, rows), min((rank + 1) * length, rows)


def make_buckets(units: int, unit_bytes: int, ranks: int, bucket_bytes: int) -> list[range]:
    """Units that are exchanged and moved together: of every owner as many as fit, at least one.

    Unit u, one matrix or the pair of a block, belongs to rank u % ranks.
    """
    size = ranks * max(1, bucket_bytes // unit_bytes)
    return [range(start, min(start + size, units)) for start in range(0, units, size)]


# --------------------------------------------------------------------------------------------------
# Packed, ragged exchanges of rows between the ranks that hold them and the owners of the matrices.
#
# Every rank holds some rows of every matrix; one rank owns it and holds it whole. For a bucket of
# matrices each direction is one `all_to_all_single` of one flat buffer:
#
#     rows → owners (gradients)    to owner o:  my rows of each of its matrices
#     owners → rows (weights)      to rank r:   its rows of each matrix that I own
#
# The parcels for one peer lie together, in the bucket's order, so both ends know all sizes. Shards
# may be uneven or empty. What a rank has for itself is copied, not sent.
#
# Two exchanges may be posted in each direction.

SLOTS = 2
Parcel = tuple[int, Tensor]  # goes to, or comes from, the rank of this number


class PackedExchange:
    """Sends parcels and receives others, as one flat buffer of `dtype` each, first in first out.

    The parcels for and from a peer must agree in number, order and size at both ends. Tensors of
    another type are rounded to `dtype` on their way, those that stay here too.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._posted: deque[Callable[[], None]] = deque()

    @torch.no_grad()
    def post(self, send: Sequence[Parcel], receive: Sequence[Parcel]) -> None:
        """Pack and send. Tensors to receive into are written by `finish`, not before."""
        assert len(self._posted) < SLOTS, "finish an exchange before the next but one"
        outgoing, incoming = self._by_peer(send), self._by_peer(receive)
        kept_from, kept_to = outgoing[self._rank], incoming[self._rank]
        outgoing[self._rank], incoming[self._rank] = [], []
        out_sizes = [sum(t.numel() for t in tensors) for tensors in outgoing]
        in_sizes = [sum(t.numel() for t in tensors) for tensors in incoming]
        outbox, inbox = (
            torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
            for sizes in (out_sizes, in_sizes)
        )
        leaving, arriving = sum(outgoing, []), sum(incoming, [])
        _copy(_views(outbox, leaving), leaving)
        work = dist.all_to_all_single(
            inbox,
            outbox,
            output_split_sizes=in_sizes,
            input_split_sizes=out_sizes,
            group=self._group,
            async_op=True,
        )

        def unpack() -> None:
            work.wait()
            _copy(arriving, _views(inbox, arriving))
            _copy(kept_to, [tensor.to(self._dtype) for tensor in kept_from])

        self._posted.append(unpack)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the exchange that was posted first and unpack it."""
        self._posted.popleft()()

    def _by_peer(self, parcels: Sequence[Parcel]) -> list[list[Tensor]]:
        tensors: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for peer, tensor in parcels:
            if tensor.numel():  # a rank may hold no row of a small matrix
                tensors[peer].append(tensor)
        return tensors


def _views(flat: Tensor, models: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of a flat buffer with the shapes of `models`."""
    parts = flat.split([model.numel() for model in models])
    return [part.view(model.shape) for part, model in zip(parts, models, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All at once: on a GPU a bucket of small matrices is a few kernels, not hundreds."""
    if targets:
        torch._foreach_copy_(targets, sources)


# --------------------------------------------------------------------------------------------------
# Manifold Adam for matrices whose rows are sharded over ranks (`weight_layout: row`).
#
# Every matrix has one owner, which holds X in float32 and the state (m, v, B, Xslow) and does the
# step; the parameters of the model hold rows of X. All matrices have one size; owners take turns.
# In the product form R and W of a block, which follow each other, have one owner: a unit.
# A step goes through the matrices in buckets, in which every owner has a part:
#
#     post gradients(0)
#     for each bucket b:
#         post gradients(b+1)                  in transfer while b is worked on
#         finish gradients(b)                  whole gradients at the owners
#         move the matrices of b               ManifoldAdam on this rank's part of the bucket
#         post rows(b)                         in transfer while b+1 is worked on
#         finish rows(b-1)                     new rows in the shards
#     finish rows(last)
#
# So two buckets are in transfer in each direction, and no memory but theirs is needed: two outboxes
# and two inboxes each way and two buckets of whole gradients, each about `bucket_bytes`.


class RowManifoldAdam:
    """ManifoldAdam for parameters [d, d] of which each rank of `group` holds rows.

    named_parameters: sharded along the first dimension over `group`, the same list on every rank;
        a plain tensor is taken to be this rank's rows.
    initial: writes the initial value of a matrix by its name; called on its owner only.
    return_dtype: of the rows on the wire, if not the parameters' own; bfloat16 loses nothing if
        the forward pass computes in it.
    bucket_bytes: of an owner's matrices that are exchanged together; at least one matrix is.

    The constructor, `step`, `retract`, `slow_weights` and `share_weights` are collective.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        initial: Callable[[str, Tensor], None],
        return_dtype: torch.dtype | None = None,
        bucket_bytes: int = 64 << 20,
        **manifold_adam_arguments: Any,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._in_unit = 2 if manifold_adam_arguments.get("parametrisation") == "product" else 1
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        units, like = len(self.names) // self._in_unit, local_part(self._parameters[0])
        shape = (self._in_unit, like.shape[-1], like.shape[-1])
        buckets = make_buckets(units, 4 * math.prod(shape), self._ranks, bucket_bytes)
        self._buckets = [[*range(b.start * shape[0], b.stop * shape[0])] for b in buckets]
        # The whole matrices of this rank, by unit: X, or Xslow inside `slow_weights()`.
        self._own = {
            u: nn.Parameter(like.new_empty(shape)) for u in range(rank, units, self._ranks)
        }
        for matrix, name in enumerate(self.names):
            if self._owns(matrix):
                initial(name, self._whole(matrix))
        named = [(self.names[unit * self._in_unit], x) for unit, x in self._own.items()]
        # A group of its own: torch refuses an empty list, and a rank may own nothing.
        self._inner = ManifoldAdam([{"params": named}], **manifold_adam_arguments)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.initialise_state, self.set_step = self._inner.initialise_state, self._inner.set_step
        self.state_loaded = self._inner.state_loaded
        self._to_owners = PackedExchange(group, like.dtype, like.device)
        self._to_shards = PackedExchange(group, return_dtype or like.dtype, like.device)
        self._arriving: deque[dict[int, Tensor]] = deque()  # whole gradients, by unit
        self._always = like.new_ones((), dtype=torch.bool)
        self.share_weights()

    @torch.no_grad()
    def step(self, scale: Tensor | None = None, usable: Tensor | None = None) -> None:
        """Move every matrix.

        scale, usable: as ManifoldAdam's; but without the latter gradients are taken to be finite,
        since one owner's error would leave the others waiting.
        """
        usable = self._always if usable is None else usable
        self._post_gradients(self._buckets[0])
        for index, bucket in enumerate(self._buckets):
            if index + 1 < len(self._buckets):
                self._post_gradients(self._buckets[index + 1])
            self._to_owners.finish()
            self._move(self._arriving.popleft(), scale, usable)
            self._post_rows(bucket)
            if index > 0:
                self._to_shards.finish()
        self._to_shards.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def retract(self) -> None:
        """X ← polar(X); Xslow ← X; B ← 0, for every matrix; the rows follow."""
        self._inner.retract()
        self.share_weights()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Inside, the parameters hold rows of the slow weights; the fast ones return afterwards.

        Not after an exception: other ranks may not have it, and would not take part.
        """
        with self._inner.slow_weights():
            self.share_weights()
            yield
        self.share_weights()

    @torch.no_grad()
    def share_weights(self) -> None:
        """Refresh all rows from the owners' matrices."""
        for index, bucket in enumerate(self._buckets):
            self._post_rows(bucket)
            if index > 0:
                self._to_shards.finish()
        self._to_shards.finish()

    def owned_tensors(
        self, name: str, index: tuple[int, ...] = (), with_state: bool = True
    ) -> tuple[tuple[int, int], dict[str, Any]] | None:
        """(place of a matrix, its unit's tensors by kind [1, n, d, d]); None if not owned here."""
        matrix = self.names.index(name)
        if not self._owns(matrix):
            return None
        x = self._own[matrix // self._in_unit]
        tensors = {"model": x.detach(), **(self.state[x] if with_state else {})}
        of_units = {k: t[None] for k, t in tensors.items() if k != "factor" and t.dim()}
        if "factor" in tensors:
            of_units["factor"] = tensors["factor"]
        return (0, matrix % self._in_unit), of_units

    def _owns(self, matrix: int) -> bool:
        return matrix // self._in_unit in self._own

    def _whole(self, matrix: int) -> Tensor:
        return self._own[matrix // self._in_unit].detach()[matrix % self._in_unit]

    def _post_gradients(self, bucket: list[int]) -> None:
        gradients = {}
        for matrix in bucket:
            gradient = self._parameters[matrix].grad
            assert gradient is not None
            gradients[matrix] = local_part(gradient)
        owned, size = [matrix for matrix in bucket if self._owns(matrix)], self._in_unit
        units = {u: torch.empty_like(self._own[u]) for u in dict.fromkeys(m // size for m in owned)}
        wholes = {matrix: units[matrix // size][matrix % size] for matrix in owned}
        self._to_owners.post(self._rows_here(gradients), self._rows_of_all(wholes))
        self._arriving.append(units)

    def _post_rows(self, bucket: list[int]) -> None:
        shards = {matrix: local_part(self._parameters[matrix]) for matrix in bucket}
        wholes = {matrix: self._whole(matrix) for matrix in bucket if self._owns(matrix)}
        self._to_shards.post(self._rows_of_all(wholes), self._rows_here(shards))

    def _rows_here(self, shards: dict[int, Tensor]) -> list[Parcel]:
        """This rank's rows of matrices; the peer is the matrix's owner."""
        return [(m // self._in_unit % self._ranks, rows) for m, rows in shards.items()]

    def _rows_of_all(self, wholes: dict[int, Tensor]) -> list[Parcel]:
        """Every rank's rows of matrices owned here; the peer is the rank that holds them."""
        return [
            (rank, whole[slice(*row_range(len(whole), self._ranks, rank))])
            for whole in wholes.values()
            for rank in range(self._ranks)
        ]

    def _move(self, gradients: dict[int, Tensor], scale: Tensor | None, usable: Tensor) -> None:
        """The step of this rank's matrices of a bucket."""
        for unit, gradient in gradients.items():
            self._own[unit].grad = gradient
        self._inner.step(scale=scale, usable=usable)
        for unit in gradients:
            self._own[unit].grad = None
