"""Where ZeRO puts the numbers of a parameter: pure functions, the same on every rank.

ZeRO-1, 2   the parameters of a group one after the other, padded, cut into equal parts
ZeRO-3      every parameter by itself, padded, cut into equal parts
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 2  # DeepSpeed pads a group of ZeRO-1 and 2 to a multiple of so many numbers per rank


@dataclass(frozen=True)
class Slot:
    """Entries [start, stop) of a flattened parameter, from `offset` on in a rank's partition."""

    index: int  # of the parameter in its group
    start: int
    stop: int
    offset: int

    @property
    def there(self) -> slice:
        """Its place in the partition."""
        return slice(self.offset, self.offset + self.stop - self.start)

    @property
    def of_parameter(self) -> slice:
        return slice(self.start, self.stop)


def flat_group_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-1 and 2: (length of every rank's partition, what this rank has in it)."""
    length = -(-sum(sizes) // (ALIGNMENT * ranks)) * ALIGNMENT
    begin, end = rank * length, (rank + 1) * length
    position, slots = 0, []
    for index, size in enumerate(sizes):
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            slots.append(Slot(index, low - position, high - position, low - begin))
        position += size
    return length, slots


def parameter_slots(sizes: Sequence[int], ranks: int, rank: int) -> tuple[int, list[Slot]]:
    """ZeRO-3: the same for parameters that share a flat partition, each cut by itself."""
    offset, slots = 0, []
    for index, size in enumerate(sizes):
        length = -(-size // ranks)
        low, high = min(rank * length, size), min((rank + 1) * length, size)
        if low < high:
            slots.append(Slot(index, low, high, offset))
        offset += length
    return offset, slots


def has_whole_matrices(length: int, slots: Sequence[Slot], width: int) -> bool:
    """Whether a partition is a stack of whole matrices [width, width]."""
    edges = [length, *(edge for s in slots for edge in (s.start, s.stop, s.offset))]
    return all(edge % width**2 == 0 for edge in edges)


def padding_matrices(matrices: int, width: int, ranks: int) -> int:
    """ZeRO-1 and 2: how many to add to a group so that every partition has whole ones.

    Fewer than two for each rank. For an odd width the number of a rank must be even, for DeepSpeed
    would make its count of numbers even, and so cut all later partitions one number too late.
    """
    per_rank = -(-matrices // ranks)
    if width % ALIGNMENT:
        per_rank += per_rank % ALIGNMENT
    return per_rank * ranks - matrices
