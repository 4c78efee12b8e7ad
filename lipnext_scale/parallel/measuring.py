"""What a step costs: bytes of every collective, communication that it waits for, memory."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel.engine import Engine
from lipnext_scale.parallel.memory import Memory, memory_per_rank
from lipnext_scale.parallel.timeline import MeasureExposure
from lipnext_scale.parallel.traffic import CountTraffic


class StepMeasurement:
    """A step, measured if `active`: then `values` has this rank's figures after it.

    Gradients are counted as the step left them, so it must not have set them to None.
    """

    def __init__(self, engine: Engine, optimizers: Optimizers, active: bool) -> None:
        self._engine, self._optimizers, self._active = engine, optimizers, active
        self._communicates = active and engine.processes.world_size > 1
        self.values: dict[str, float] = {}

    def __enter__(self) -> "StepMeasurement":
        self._stack = ExitStack()
        if self._communicates:
            self._exposure = MeasureExposure(self._engine.processes.device)
            self._stack.enter_context(self._exposure)
            self._traffic = self._stack.enter_context(CountTraffic())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if self._active and kind is None:
            self.values = training_memory(self._engine, self._optimizers).as_metrics()
        if self._communicates and kind is None:
            self.values |= self._traffic.as_metrics() | self._exposure.exposure.as_metrics()


def training_memory(engine: Engine, optimizers: Optimizers) -> Memory:
    """This rank's bytes of parameters, gradients and optimizer state.

    The owners' matrices of the row layout count as optimizer state: the model has rows beside them.
    DeepSpeed frees gradients in its step, so that none are left to count; buffers that it keeps for
    them are its own affair and not counted.
    """
    owned = engine.owned_matrices()
    states: list[Mapping[Any, Any]] = [optimizers.euclidean.state]
    if owned is None:
        states.append(optimizers.manifold.state)  # type: ignore[attr-defined]
    else:
        states += [
            {"matrix": matrix, **owned.state_of(name)} for name, matrix in owned.owned.items()
        ]
    return memory_per_rank(engine.held_weights(), states)
