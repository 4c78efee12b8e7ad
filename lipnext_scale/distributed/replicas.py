"""The manifold step shared by replicas (DDP, and the replicate axis of HSDP).

Every rank of the axis holds the same blocks of a bank, and would repeat the same step. Instead each
steps its share of them:

    reduce-scatter   gradients, whole blocks: a rank gets the mean over replicas of its share
    step             ManifoldAdam on the share, which alone has optimizer state
    all-gather       the new weights, in the type that computes

These are the bytes of the all-reduce that they replace (fewer where weights travel in bfloat16),
one n-th of the products and of the state. Weights of other shares are copies, rounded to the type
that computes; checkpoints take each from its owner.

Of a bank all replicas step equally many blocks. Those that are left go to one replica each, by a
reduce and a broadcast, and the next bank goes on with the next replica: so shares of all banks
differ by one block at most, also where replicas are more than the blocks of a bank.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lipnext_scale.optim.lookahead_nadam import local_part
from lipnext_scale.optim.manifold_adam import ManifoldAdam

# torch warns of their former names where it has new ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sharing:
    """Which replica steps which entries of a bank's first dimension."""

    entries: int
    replicas: int
    first: int  # the replica that gets the first of those that are left

    @property
    def even(self) -> int:
        """How many every replica has."""
        return self.entries // self.replicas

    def left(self) -> Iterator[tuple[int, int]]:
        """(entry, its replica) of those that cannot be shared evenly."""
        for number, entry in enumerate(range(self.even * self.replicas, self.entries)):
            yield entry, (self.first + number) % self.replicas

    def share(self, replica: int) -> list[slice]:
        """At most two, none of them empty."""
        runs = [slice(replica * self.even, (replica + 1) * self.even)] if self.even else []
        return runs + [slice(entry, entry + 1) for entry, owner in self.left() if owner == replica]


def bank_sharings(model: nn.Module, replicas: int) -> dict[str, Sharing]:
    """Of the part of every bank that this rank holds, by the bank's name."""
    sharings, first = {}, 0
    for name, parameter in model.named_parameters():
        if name.endswith(".bank"):
            entries = local_part(parameter).shape[0]
            sharings[name] = Sharing(entries, replicas, first)
            first = (first + entries) % replicas
    return sharings


@torch.no_grad()
def reduce_to_shares(
    gradient: Tensor, sharing: Sharing, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Send each entry to the replica that steps it, which gets the mean over the group.

    The function returned waits for that. Entries of other replicas have no meaning then.
    """
    ranks, rank, works = sharing.replicas, dist.get_rank(group), []
    if sharing.even:
        whole = gradient[: sharing.even * ranks]
        own = whole.new_empty(sharing.even, *whole.shape[1:])
        works.append(_reduce_scatter(own, whole, group=group, async_op=True))
    for entry, owner in sharing.left():
        works.append(dist.reduce(gradient[entry], group_dst=owner, group=group, async_op=True))

    @torch.no_grad()
    def finish() -> None:
        for work in works:
            work.wait()
        if sharing.even:
            gradient[sharing.share(rank)[0]] = own
        for run in sharing.share(rank):
            gradient[run].div_(ranks)

    return finish


class SharedManifoldAdam:
    """ManifoldAdam for banks of which every rank of `group` holds the same part.

    Gradients must have gone through `reduce_to_shares`. wire_dtype: of weights on their way.
    The constructor, `step`, `retract`, `slow_weights` and `share_weights` are collective.
    """

    def __init__(
        self,
        named_parameters: list[tuple[str, nn.Parameter]],
        sharings: dict[str, Sharing],
        group: dist.ProcessGroup,
        wire_dtype: torch.dtype | None = None,
        **manifold_adam_arguments: Any,
    ) -> None:
        self.names = [name for name, _ in named_parameters]
        self._parameters, self._sharings = dict(named_parameters), sharings
        self._group, self._wire_dtype = group, wire_dtype
        self._rank = dist.get_rank(group)
        self._always = local_part(named_parameters[0][1]).new_ones((), dtype=torch.bool)
        self._own = {n: [*map(nn.Parameter, self.share(n, p))] for n, p in named_parameters}
        named = [(name, own) for name, runs in self._own.items() for own in runs]
        # A group of its own: torch refuses an empty list, and a rank may step nothing.
        self._inner = ManifoldAdam([{"params": named}], **manifold_adam_arguments)
        self.param_groups = self._inner.param_groups

    def share(self, name: str, tensor: Tensor) -> list[Tensor]:
        """This rank's share of a bank, or of its gradient."""
        local = local_part(tensor)
        return [local[run] for run in self._sharings[name].share(self._rank)]

    def _point_at_shares(self) -> None:
        """FSDP may have moved the local part of a parameter since it was last looked at."""
        for name, runs in self._own.items():
            for own, here in zip(runs, self.share(name, self._parameters[name]), strict=True):
                own.data = here

    @torch.no_grad()
    def step(self, scale: Tensor | None = None, usable: Tensor | None = None) -> None:
        """As RowManifoldAdam's: without `usable` gradients are taken to be finite."""
        self._point_at_shares()
        for name, runs in self._own.items():
            gradient = self._parameters[name].grad
            gradients = [None] * len(runs) if gradient is None else self.share(name, gradient)
            for own, of_run in zip(runs, gradients, strict=True):
                own.grad = of_run
        self._inner.step(scale=scale, usable=self._always if usable is None else usable)
        self.share_weights()

    @torch.no_grad()
    def share_weights(self) -> None:
        """Bring the shares of all replicas to each of them."""
        for name, parameter in self._parameters.items():
            local, sharing = local_part(parameter), self._sharings[name]
            dtype = self._wire_dtype or local.dtype
            if sharing.even:
                own = sharing.share(self._rank)[0]
                whole = local[: sharing.even * sharing.replicas]
                everyone = torch.empty_like(whole, dtype=dtype)
                _all_gather(everyone, local[own].to(dtype), group=self._group)
                whole[: own.start] = everyone[: own.start]
                whole[own.stop :] = everyone[own.stop :]
            for entry, owner in sharing.left():
                block = torch.empty_like(local[entry], dtype=dtype)
                if owner == self._rank:
                    block.copy_(local[entry])
                dist.broadcast(block, group_src=owner, group=self._group)
                if owner != self._rank:
                    local[entry] = block

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

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Of the matrices that this rank steps."""
        return self._inner.state

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
        entry, which = index
        for run, own in zip(self._sharings[name].share(self._rank), self._own[name], strict=True):
            if run.start <= entry < run.stop:
                state = self._inner.state[own] if with_state else {}
                return (entry - run.start, which), {"model": own.detach(), **state}
        return None
