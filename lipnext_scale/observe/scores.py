"""Clean and certified accuracy of the slow weights while training, taking K as 1.

A quick look; the certificate itself comes from lipnext_scale.certify, which bounds K from the
stored weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lipnext_scale.certify.radius import nominal_radii
from lipnext_scale.data import DataSets
from lipnext_scale.data.datasets import TestBatch
from lipnext_scale.heartbeat import beat
from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel import Engine


class Scores:
    """Every rank takes its share of the samples; all must ask together."""

    def __init__(
        self, engine: Engine, optimizers: Optimizers, data: DataSets, epsilon: float
    ) -> None:
        self._engine, self._optimizers = engine, optimizers
        self._data, self._epsilon = data, epsilon
        self._watched: dict[int, list[TestBatch]] = {}

    def of_test_set(self) -> dict[str, float]:
        processes = self._engine.processes
        test = self._data.test_set(processes.rank, processes.world_size)
        clean, cra = self._shares(test, len(self._data.test))
        return {"test/clean_accuracy": clean, "test/nominal_cra": cra}

    def of_subset(self, count: int) -> dict[str, float]:
        """Of always the same samples, whose pixels are kept: they are read once."""
        beat("the evaluation", slow=True)
        processes = self._engine.processes
        if count not in self._watched:
            test = self._data.test_set(processes.rank, processes.world_size)
            self._watched[count] = list(test.spread_subset(count))
        clean, cra = self._shares(self._watched[count], min(count, len(self._data.test)))
        return {"watch/clean_accuracy": clean, "watch/nominal_cra": cra}

    @torch.no_grad()
    def _shares(self, batches: Iterable[TestBatch], samples: int) -> list[float]:
        """Of right and of certified ones among all ranks' samples."""
        beat("the evaluation", slow=True)
        processes = self._engine.processes
        counts = torch.zeros(2, dtype=torch.float64)
        with self._optimizers.slow_weights():
            for batch in batches:
                images = to_unit_range(batch.images, processes.device)
                labels, radii = nominal_radii(*self._engine.forward(images))
                correct = (labels.cpu() == batch.labels) & batch.counted
                certified = correct & (radii.cpu() >= self._epsilon)
                counts += torch.stack([correct.sum(), certified.sum()])
                beat("the evaluation")
            self._engine.weights_changed()
        return processes.gather(counts.to(processes.device)).sum(0).div(samples).tolist()


def to_unit_range(images: Tensor, device: torch.device) -> Tensor:
    """uint8 → [0, 1] in torch's default type, float32, converted on the device."""
    return images.to(device, non_blocking=True).to(torch.get_default_dtype()).div_(255)
