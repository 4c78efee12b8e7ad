"""What a converter reads: the samples of a source by number, wherever they lie."""

from typing import Protocol

import numpy as np


class Collection(Protocol):
    """The samples of one set, numbered in an order that the source alone decides.

    It is handed to worker processes: keep plain values in it, open files where they are needed, and
    read a file that processes may share by os.pread.
    """

    classes: list[str]  # names by label

    def __len__(self) -> int: ...

    def label(self, i: int) -> int: ...

    def name(self, i: int) -> str:
        """Where the sample comes from, without the source's own place: for messages and the key."""
        ...

    def load(self, i: int) -> bytes | np.ndarray:
        """An encoded image file, or uint8 pixels [H, W] or [H, W, 3]."""
        ...

    def fingerprint(self) -> str:
        """Of names, labels and sizes: the same source gives the same, another another."""
        ...

    def estimated_bytes(self, i: int) -> int:
        """About as many as the encoded image will have: for shard sizes and the disk check."""
        ...
