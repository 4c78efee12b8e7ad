"""Our optimizers on the partitions of DeepSpeed.

DeepSpeed moves numbers and calls one optimizer, the client, whose parameters it replaces by its
flat float32 partitions. The client steps ManifoldAdam and LookaheadNAdam, which know nothing of it:
their parameters are views of the partitions, [k, d, d] of those that hold matrices.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lipnext_scale.optim import OptimConfig, Optimizers
from lipnext_scale.parallel.zero_layout import Slot, has_whole_matrices


@dataclass(frozen=True)
class Partition:
    """A flat float32 tensor of this rank, and what of which parameters it holds.

    names: of the parameters by `Slot.index`; "" for matrices that are only padding.
    view: the same numbers as our optimizers see them; [k, width, width] for `orthogonal`.
    """

    flat: Tensor
    view: Tensor
    names: list[str]
    slots: list[Slot]
    orthogonal: bool

    @staticmethod
    def of(
        flat: Tensor, names: list[str], layout: tuple[int, list[Slot]], width: int | None
    ) -> "Partition":
        """width: of the matrices; None where it holds none."""
        length, slots = layout
        assert flat.dtype == torch.float32 and flat.is_contiguous()
        assert flat.numel() == length, "DeepSpeed cuts its partitions in another way"
        view = flat.detach()
        if width is not None:
            assert has_whole_matrices(length, slots, width), "a partition cuts through a matrix"
            view = view.view(-1, width, width)
        return Partition(flat, view, names, slots, width is not None)

    def held(self) -> Iterator[tuple[str, Slot]]:
        """What there is beside padding: parameters' names and where their numbers are."""
        return ((self.names[s.index], s) for s in self.slots if self.names[s.index])


class ClientOptimizer(torch.optim.Optimizer):
    """What DeepSpeed steps, with gradients in its partitions: once for each group (ZeRO-1 and 2) or
    sub-group (ZeRO-3), which are alone in `param_groups` then."""

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__([{"params": list(group)} for group in groups], {"lr": 0.0})
        self._attached: dict[int, tuple[Partition, torch.optim.Optimizer]] = {}
        self.idle = False  # a step then moves nothing

    def attach(self, partition: Partition, optimizer: torch.optim.Optimizer) -> None:
        """Say who moves a partition."""
        self._attached[id(partition.flat)] = partition, optimizer

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self.idle:
            return
        stepping: dict[int, torch.optim.Optimizer] = {}
        views = []
        for flat in (flat for group in self.param_groups for flat in group["params"]):
            partition, optimizer = self._attached[id(flat)]
            view = partition.view
            assert partition.flat is flat and flat.data_ptr() == view.data_ptr()
            if flat.grad is not None:
                view.grad = flat.grad.view_as(view)
                views.append(view)
                stepping[id(optimizer)] = optimizer
        for optimizer in stepping.values():  # one skips whatever has no gradient
            optimizer.step()
        for view in views:
            view.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Our optimizers' state for DeepSpeed's checkpoints: flat, by the number of a partition."""
        numbers = {flat: number for number, flat in enumerate(self._attached)}
        return {
            "state": {
                number: {kind: t.flatten() for kind, t in _state(partition, optimizer).items()}
                for number, (partition, optimizer) in enumerate(self._attached.values())
            },
            "param_groups": [
                {**group, "params": [numbers[id(flat)] for flat in group["params"]]}
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place. How many steps were taken is told by the run's own facts."""
        for number, (partition, optimizer) in enumerate(self._attached.values()):
            held, stored = _state(partition, optimizer), state_dict["state"][number]
            assert held.keys() == stored.keys()
            for kind, tensor in held.items():
                tensor.view(-1).copy_(stored[kind])


def _state(partition: Partition, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state's tensors that are laid out as the partition."""
    state = optimizer.state[partition.view]
    return {k: t for k, t in state.items() if isinstance(t, Tensor) and t.dim() > 0}


class ZeroEngine(Protocol):
    """What the optimizers ask of the engine."""

    partitions: list[Partition]
    client: ClientOptimizer

    def step(self) -> None:
        """DeepSpeed's step, which calls the client's."""
        ...

    def publish(self) -> None:
        """Bring the model's weights up to the partitions."""
        ...


class ZeroOptimizers(Optimizers):
    """Both optimizers on partitions; whatever moves these outside a step is published."""

    def __init__(self, engine: ZeroEngine, config: OptimConfig) -> None:
        self._engine = engine
        named = [(f"partition {i}", p) for i, p in enumerate(engine.partitions)]
        orthogonal = [(name, p.view) for name, p in named if p.orthogonal]
        euclidean = [(name, p.view) for name, p in named if not p.orthogonal]
        super().__init__((orthogonal, euclidean), config)
        for partition in engine.partitions:
            engine.client.attach(partition, self._owner(partition))

    def _owner(self, partition: Partition) -> torch.optim.Optimizer:
        owner = self.manifold if partition.orthogonal else self.euclidean
        assert isinstance(owner, torch.optim.Optimizer)
        return owner

    def state_of(self, partition: Partition) -> dict[str, Tensor]:
        """The state's tensors that are laid out as the partition."""
        return _state(partition, self._owner(partition))

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        pass  # DeepSpeed's step has dropped them

    def retract(self) -> None:
        super().retract()
        self._engine.publish()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        try:
            with super().slow_weights():
                self._engine.publish()
                yield
        finally:
            self._engine.publish()
