"""Actions of all ranks of a group: if one of them fails, all raise the same error."""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lipnext_scale.utils.errors import RunFailed, UserError

T = TypeVar("T")
Group = dist.ProcessGroup | None  # None: this process alone


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def everywhere(group: Group, action: Callable[[], T]) -> list[T]:
    """Every rank acts; the results of all, or the error of the first rank that had one."""
    if group is None:
        return [action()]
    outcome = _attempt(group, action)
    outcomes = [outcome] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    return [_result(each) for each in outcomes]


def on_rank0(group: Group, action: Callable[[], T]) -> T:
    """Rank 0 acts, the others wait; its result, or its error, on all of them."""
    if group is None:
        return action()
    outcomes = [_attempt(group, action) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(outcomes, src=dist.get_global_rank(group, 0), group=group)
    assert outcomes[0] is not None
    return _result(outcomes[0])


def reason_of(error: BaseException) -> str:
    """Why, in one line without the error's own path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0].rstrip(":") if str(error) else type(error).__name__


def _attempt(group: dist.ProcessGroup, action: Callable[[], T]) -> tuple[T, None] | Exception:
    try:
        return action(), None
    except (UserError, RunFailed) as error:
        return error
    except Exception:  # a bug: a traceback can be sent only as text
        return RuntimeError(f"rank {dist.get_rank(group)}:\n{traceback.format_exc()}")


def _result(outcome: tuple[T, None] | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome[0]
