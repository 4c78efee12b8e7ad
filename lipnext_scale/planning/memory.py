"""The memory of a device over time: every storage of fake tensors, from its first to its last."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# What a storage is for, where nothing else says so: by the phase that made it.
ACTIVATIONS = ("step", "forward")


@dataclass
class _Storage:
    serial: int
    bytes: int
    watch: Any  # a weak reference, called at the storage's end


class Memory:
    """By kind: parameters, gradients, optimizer, gathered (whole weights, buffers of collectives),
    activations, temporary."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.changes: list[tuple[int, int, str, str]] = []  # storage, bytes, phase, place
        self._there: dict[int, _Storage] = {}  # by address
        self._kinds: dict[int, str] = {}  # by serial number
        self._serial = 0

    def see(self, tensors: Iterable[Tensor], phase: str, place: str) -> None:
        for tensor in tensors:
            if tensor.device.type != self.device:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._there:
                self._begin(storage, phase, place)

    def _begin(self, storage: torch.UntypedStorage, phase: str, place: str) -> None:
        self._serial += 1
        address, serial, size = storage._cdata, self._serial, storage.nbytes()
        watch = weakref.ref(storage, lambda _: self._end(address, phase))
        self._there[address] = _Storage(serial, size, watch)
        self._kinds[serial] = "activations" if phase in ACTIVATIONS else "temporary"
        self.changes.append((serial, size, phase, place))

    def _end(self, address: int, phase: str) -> None:
        gone = self._there.pop(address)
        self.changes.append((gone.serial, -gone.bytes, phase, ""))

    def name(self, kind: str, values: Any) -> None:
        """All storages of these tensors are of this kind, also in the past."""
        for storage in self._known(values):
            self._kinds[storage.serial] = kind

    def name_new(self, kind: str, values: Any) -> None:
        """As `name`, of storages that nothing has named yet."""
        for storage in self._known(values):
            if self._kinds[storage.serial] in ("activations", "temporary"):
                self._kinds[storage.serial] = kind

    def _known(self, values: Any) -> Iterator[_Storage]:
        """Of the tensors in nested mappings, lists and tuples; optimizers have them as keys too."""
        if isinstance(values, Mapping):
            values = [*values.keys(), *values.values()]
        if isinstance(values, DTensor):
            values = values.to_local()
        if isinstance(values, Tensor):
            found = self._there.get(values.untyped_storage()._cdata)
            yield from [found] if found else []
        elif isinstance(values, list | tuple):
            for value in values:
                yield from self._known(value)

    @contextmanager
    def watching_sizes(self, phase: Any) -> Iterator[None]:
        """FSDP empties and fills the storages of whole weights; the dispatcher does not see it."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result, known = resize(storage, size), self._there.get(storage._cdata)
            if known is not None and size != known.bytes:
                self.changes.append((known.serial, size - known.bytes, phase(), "fsdp"))
                known.bytes, self._kinds[known.serial] = size, "gathered"
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def peak(self, start: int) -> tuple[dict[str, int], str, str]:
        """(bytes by kind, phase, place) of the highest point since change number `start`."""
        totals = list(accumulate(change[1] for change in self.changes))
        highest = max(range(min(start, len(totals) - 1), len(totals)), key=totals.__getitem__)
        kinds: Counter[str] = Counter()
        for serial, size, _, _ in self.changes[: highest + 1]:
            kinds[self._kinds[serial]] += size
        _, _, phase, place = self.changes[highest]
        return dict(kinds), phase, place
