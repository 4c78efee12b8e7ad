"""Packed, ragged exchanges of rows between the ranks that hold them and the owners of the matrices.

Every rank holds some rows of every matrix; one rank owns it and holds it whole. For a bucket of
matrices each direction is one `all_to_all_single` of one flat buffer:

    rows → owners (gradients)    to owner o:  my rows of each of its matrices
    owners → rows (weights)      to rank r:   a word, then its rows of each matrix that I own

The parcels for one peer lie together, in the bucket's order, so both ends know all sizes without
being told. Shards may be uneven or empty. What a rank has for itself is copied, not sent. The word
says whether the owner failed: so all ranks learn of it without a collective of its own.

An exchange is posted, runs while other work is done, and is finished. Two may be under way in each
direction: each has a pair of buffers, which is used again by the next but one. On a GPU waiting
orders the streams, and a buffer is packed again only after the wait for its last use.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from lipnext_scale.parallel.ownership import row_range

SLOTS = 2
# Numbers of the word. One would do, but the rows behind it should start at a multiple of 16 bytes.
WORD = 8


@dataclass(frozen=True)
class Parcel:
    """A tensor that goes to, or comes from, the rank `peer`."""

    peer: int
    tensor: Tensor


@dataclass(frozen=True)
class _Posted:
    work: dist.Work
    inbox: Tensor
    incoming: list[Tensor]
    kept_from: list[Tensor]
    kept_to: list[Tensor]


class PackedExchange:
    """Sends parcels and receives others, as one flat buffer of `dtype` each, first in first out.

    The parcels for and from a peer must agree in number, order and size at both ends. Tensors of
    another type are rounded to `dtype` on their way, those that stay here too.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype = group, dtype
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._posted: deque[_Posted] = deque()
        # Pairs of outbox and inbox, the one whose turn it is first. They grow in the first step.
        # Zeros: a dry run, in which nothing ever arrives, then reads numbers and not garbage.
        self._slots = deque(
            [torch.zeros(0, dtype=dtype, device=device) for _ in ("outbox", "inbox")]
            for _ in range(SLOTS)
        )

    @torch.no_grad()
    def post(self, send: Sequence[Parcel], receive: Sequence[Parcel]) -> None:
        """Pack and send. Tensors to receive into are written by `finish`, not before."""
        assert len(self._posted) < SLOTS, "finish an exchange before the next but one"
        outgoing, incoming = self._by_peer(send), self._by_peer(receive)
        kept_from, kept_to = outgoing[self._rank], incoming[self._rank]
        assert [t.shape for t in kept_from] == [t.shape for t in kept_to]
        outgoing[self._rank], incoming[self._rank] = [], []
        out_sizes = [sum(t.numel() for t in tensors) for tensors in outgoing]
        in_sizes = [sum(t.numel() for t in tensors) for tensors in incoming]
        outbox, inbox = self._boxes(sum(out_sizes), sum(in_sizes))
        flat_outgoing = [tensor for tensors in outgoing for tensor in tensors]
        _copy(_views(outbox, flat_outgoing), flat_outgoing)
        work = dist.all_to_all_single(
            inbox,
            outbox,
            output_split_sizes=in_sizes,
            input_split_sizes=out_sizes,
            group=self._group,
            async_op=True,
        )
        flat_incoming = [tensor for tensors in incoming for tensor in tensors]
        self._posted.append(_Posted(work, inbox, flat_incoming, kept_from, kept_to))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the exchange that was posted first and unpack it."""
        posted = self._posted.popleft()
        posted.work.wait()
        _copy(posted.incoming, _views(posted.inbox, posted.incoming))
        _copy(posted.kept_to, [tensor.to(self._dtype) for tensor in posted.kept_from])

    def _by_peer(self, parcels: Sequence[Parcel]) -> list[list[Tensor]]:
        tensors: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for parcel in parcels:
            if parcel.tensor.numel():  # a rank may hold no row of a small matrix
                tensors[parcel.peer].append(parcel.tensor)
        return tensors

    def _boxes(self, *sizes: int) -> list[Tensor]:
        """The outbox and inbox whose turn it is, cut to these sizes."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        for index, size in enumerate(sizes):
            if slot[index].numel() < size:
                slot[index] = slot[index].new_zeros(size)
        return [box[:size] for box, size in zip(slot, sizes, strict=True)]


class RowExchange:
    """Moves rows of buckets of matrices [d, d] to their owners and back.

    A bucket is a list of indices of matrices. `shards` are this rank's rows of its matrices,
    `wholes` those matrices that this rank owns. like: has the type and device of gradients.
    """

    def __init__(
        self,
        sides: Sequence[int],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        like: Tensor,
        return_dtype: torch.dtype,
    ) -> None:
        self._sides, self._owners = list(sides), list(owners)
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._to_owners = PackedExchange(group, like.dtype, like.device)
        self._to_shards = PackedExchange(group, return_dtype, like.device)
        # What each owner last said: 0, or 1 if it failed. Every owner in a bucket says it anew.
        self._words = torch.zeros(self._ranks, WORD, device=like.device)
        self._returning: deque[list[int]] = deque()

    def post_to_owners(
        self, bucket: list[int], shards: Mapping[int, Tensor], wholes: Mapping[int, Tensor]
    ) -> None:
        self._to_owners.post(self._rows_here(bucket, shards), self._rows_of_all(bucket, wholes))

    def finish_to_owners(self) -> None:
        """The whole matrices of the bucket that was posted first are filled at their owners."""
        self._to_owners.finish()

    def post_to_shards(
        self,
        bucket: list[int],
        wholes: Mapping[int, Tensor],
        shards: Mapping[int, Tensor],
        failed: bool = False,
    ) -> None:
        owners = sorted({self._owners[matrix] for matrix in bucket})
        words: list[Parcel] = []
        if self._rank in owners:
            word = self._words.new_full((WORD,), float(failed))
            words = [Parcel(rank, word) for rank in range(self._ranks)]
        heard = [Parcel(owner, self._words[owner]) for owner in owners]
        self._to_shards.post(
            words + self._rows_of_all(bucket, wholes), heard + self._rows_here(bucket, shards)
        )
        self._returning.append(bucket)

    def finish_to_shards(self) -> list[int]:
        """The shards of the bucket posted first are filled; returns its matrices that failed.

        These are all of the bucket's that a failed owner has, and the same on every rank. The host
        waits for the device here.
        """
        bucket = self._returning.popleft()
        self._to_shards.finish()
        words = self._words[:, 0].tolist()
        return [matrix for matrix in bucket if words[self._owners[matrix]]]

    def _rows_here(self, bucket: list[int], shards: Mapping[int, Tensor]) -> list[Parcel]:
        """This rank's rows of every matrix; the peer is the matrix's owner."""
        return [Parcel(self._owners[matrix], shards[matrix]) for matrix in bucket]

    def _rows_of_all(self, bucket: list[int], wholes: Mapping[int, Tensor]) -> list[Parcel]:
        """Every rank's rows of the matrices owned here; the peer is the rank that holds them."""
        return [
            Parcel(rank, wholes[matrix][slice(*row_range(self._sides[matrix], self._ranks, rank))])
            for matrix in bucket
            if self._owners[matrix] == self._rank
            for rank in range(self._ranks)
        ]


def _views(flat: Tensor, models: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of a flat buffer with the shapes of `models`."""
    ends = accumulate(model.numel() for model in models)
    return [
        flat[end - model.numel() : end].view(model.shape)
        for model, end in zip(models, ends, strict=True)
    ]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All at once: on a GPU a bucket of small matrices is a few kernels, not hundreds."""
    if targets:
        torch._foreach_copy_(targets, sources)
