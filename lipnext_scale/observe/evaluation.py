"""Clean and certified accuracy of the slow weights while training, with K taken as 1.

A quick look; the certificate itself comes from lipnext_scale.certify, which bounds K from the
stored weights.
"""

from collections.abc import Iterable

import torch

from lipnext_scale.certification.certifier import nominal_radii
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.data import DataSets, TestSet, to_unit_range
from lipnext_scale.data.evaluation import TestBatch
from lipnext_scale.distributed import Engine
from lipnext_scale.optim import Optimizers
from lipnext_scale.utils.progress import beat


class Evaluation:
    """Every rank takes its share of the samples; all must call together."""

    def __init__(
        self, engine: Engine, optimizers: Optimizers, data: DataSets, recipe: Recipe
    ) -> None:
        self._engine, self._optimizers, self._data = engine, optimizers, data
        self._processes = engine.processes
        self._epsilon, self._count = recipe.loss.epsilon, recipe.run.watch_samples
        self._subset: list[TestBatch] | None = None

    def of_test_set(self) -> dict[str, float]:
        clean, cra = self._shares(self._test_set(), len(self._data.test))
        return {"test/clean_accuracy": clean, "test/nominal_cra": cra}

    def of_subset(self) -> dict[str, float]:
        """Of the same run.watch_samples samples each time: they are read once and kept."""
        beat("the evaluation", slow=True)
        if self._subset is None:
            self._subset = list(self._test_set().spread_subset(self._count))
        clean, cra = self._shares(self._subset, min(self._count, len(self._data.test)))
        return {"watch/clean_accuracy": clean, "watch/nominal_cra": cra}

    def _test_set(self) -> TestSet:
        return self._data.test_set(self._processes.rank, self._processes.world_size)

    @torch.no_grad()
    def _shares(self, batches: Iterable[TestBatch], samples: int) -> list[float]:
        """Shares of correct and of certified samples, of all ranks."""
        beat("the evaluation", slow=True)
        device = self._processes.device
        counts = torch.zeros(2, dtype=torch.float64)
        with self._optimizers.slow_weights():
            for batch in batches:
                images = to_unit_range(batch.images, device)
                labels, radii = nominal_radii(*self._engine.forward(images))
                correct = (labels.cpu() == batch.labels) & batch.counted
                certified = correct & (radii.cpu() >= self._epsilon)
                counts += torch.stack([correct.sum(), certified.sum()])
                beat("the evaluation")
            self._engine.weights_changed()
        return self._processes.gather(counts.to(device)).sum(0).div(samples).tolist()
