"""The manifold step shared by replicas (DDP, and the replicate axis of HSDP).

Every rank of the axis holds the same blocks of a bank, and would repeat the same step. Instead each
steps its share of them:

    reduce-scatter   gradients, whole blocks: a rank gets the mean over replicas of its share
    step             ManifoldAdam on the share, which alone has optimizer state
    all-gather       the new weights, in the type that computes

These are the bytes of the all-reduce that they replace (fewer where weights travel in bfloat16),
one n-th of the products and of the state. Weights of other shares are copies, rounded to the type
that computes; checkpoints take each from its owner.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.distributed.rows import row_range
from lipnext_scale.optim.lookahead_nadam import local_part
from lipnext_scale.optim.manifold_adam import ManifoldAdam


def share_of(entries: int, group: dist.ProcessGroup) -> slice:
    """The entries of a bank's first dimension that this rank of the group steps."""
    return slice(*row_range(entries, dist.get_world_size(group), dist.get_rank(group)))


@torch.no_grad()
def begin_reduction(
    gradient: Tensor, group: dist.ProcessGroup, dtype: torch.dtype
) -> Callable[[], None]:
    """Begin to bring the mean over the group into this rank's share; the result completes it.

    The other entries stay as they are. dtype: of the sum.
    """
    if not gradient.numel():
        return lambda: None
    ranks, padded = dist.get_world_size(group), _padded(gradient.to(dtype), group)
    total = padded.new_empty(padded.shape[0] // ranks, *padded.shape[1:])
    work = dist.reduce_scatter_tensor(total, padded, group=group, async_op=True)

    def complete() -> None:
        work.wait()
        own = gradient[share_of(gradient.shape[0], group)]
        own.copy_(total[: own.shape[0]]).div_(ranks)

    return complete


def _padded(entries: Tensor, group: dist.ProcessGroup) -> Tensor:
    """With as many entries for every rank: collectives of one tensor want that."""
    missing = -entries.shape[0] % dist.get_world_size(group)
    if not missing:
        return entries
    return torch.cat([entries, entries.new_zeros(missing, *entries.shape[1:])])


class SharedManifoldAdam:
    """ManifoldAdam for banks of which every rank of `group` holds the same part.

    Gradients must have gone through `begin_reduction`. wire_dtype: of weights on their way.
    The constructor, `step`, `retract`, `slow_weights` and `share_weights` are collective.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        wire_dtype: torch.dtype | None = None,
        **manifold_adam_arguments: Any,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters = dict(named_parameters)
        self.group, self._wire_dtype = group, wire_dtype
        self._own = {n: nn.Parameter(self.share(p)) for n, p in named_parameters}
        self._inner = ManifoldAdam([*self._own.items()], **manifold_adam_arguments)
        self.param_groups = self._inner.param_groups

    def share(self, tensor: Tensor) -> Tensor:
        """This rank's share of a bank, or of its gradient."""
        local = local_part(tensor)
        return local[share_of(local.shape[0], self.group)]

    def _point_at_shares(self) -> None:
        """FSDP may have moved the local part of a parameter since it was last looked at."""
        for name, own in self._own.items():
            own.data = self.share(self._parameters[name])

    @torch.no_grad()
    def step(self, scale: Tensor | None = None, usable: Tensor | None = None) -> None:
        self._point_at_shares()
        for name, own in self._own.items():
            gradient = self._parameters[name].grad
            own.grad = None if gradient is None else self.share(gradient)
        if usable is None:  # every replica must know of a gradient that one of them has
            usable = self._all_finite()
            if not bool(usable):
                raise FloatingPointError("the gradient of a bank is not finite")
        self._inner.step(scale=scale, usable=usable)
        self.share_weights()

    def _all_finite(self) -> Tensor:
        gradients = [own.grad for own in self._own.values() if own.grad is not None]
        finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all().int()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self.group)
        return finite.bool()

    @torch.no_grad()
    def share_weights(self) -> None:
        """Bring the shares of all replicas to each of them."""
        for parameter in self._parameters.values():
            local = local_part(parameter)
            if not local.numel():
                continue
            dtype, ranks = self._wire_dtype or local.dtype, dist.get_world_size(self.group)
            length = -(-local.shape[0] // ranks)
            share = share_of(local.shape[0], self.group)
            own = local.new_zeros(length, *local.shape[1:], dtype=dtype)
            own[: share.stop - share.start] = local[share]
            everyone = own.new_empty(length * ranks, *local.shape[1:])
            dist.all_gather_into_tensor(everyone, own, group=self.group)
            local[: share.start] = everyone[: share.start]
            local[share.stop :] = everyone[share.stop : local.shape[0]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def retract(self) -> None:
        self._point_at_shares()
        self._inner.retract()
        self.share_weights()

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """As RowManifoldAdam's: not restored after an exception, which other ranks may not have."""
        self._point_at_shares()
        with self._inner.slow_weights():
            self.share_weights()
            yield
        self.share_weights()

    def initialise_state(self) -> None:
        self._point_at_shares()
        self._inner.initialise_state()

    def state_loaded(self) -> None:
        self._point_at_shares()
        self._inner.state_loaded()

    def set_step(self, step: int) -> None:
        self._inner.set_step(step)

    def owned_tensors(
        self, name: str, index: tuple[int, ...], with_state: bool
    ) -> tuple[tuple[int, int], dict[str, Any]] | None:
        """(place of a matrix, its share's tensors by kind); None if another replica owns it.

        index: the matrix in this rank's part of the bank.
        """
        self._point_at_shares()
        (entry, which), own = index, self._own[name]
        share = share_of(local_part(self._parameters[name]).shape[0], self.group)
        if not share.start <= entry < share.stop:
            return None
        state = self._inner.state[own] if with_state else {}
        return (entry - share.start, which), {"model": own.detach(), **state}
