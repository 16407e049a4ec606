"""Ranks with uneven numbers of batches: a rank that is done takes part with zeros until all are done.

At the end of each backward a rank announces which averager has a step, in one small all-reduce on a group that serves
nothing else; a rank that is done announces none. So the ranks that are done learn in which averager to take part next,
and when no step is left.

Several averagers in ``join()`` at once announce in one order, which is the same on all ranks::

    rank 0    step of a | step of b | step of a | step of b | done   | done
    rank 1    step of a | step of b | done      | done      | done   | done
    all                                                       leave b  leave a

A first design let each averager ask on its own group whether any rank goes on. With two averagers a rank that was done
waited in the inner ``join()``, while the others waited for it in the outer one. A thread for each averager would serve
both, but an error or Ctrl-C would leave threads that wait for other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...agreement import check_lists, gather_or_raise
from ...errors import MismatchError
from ...torch_compat import message_device
from ..group_duplicates import ranks_of

__all__: list[str] = []

STEP, VERDICT = range(2)  # the kinds of an announcement: an averaging, and what a GradScaler has found
_NAMES = ("averages the gradients", "calls unscale_()")


@dataclass
class ShadowSteps:
    """What a rank that is done does for an averager in ``join()``: functions of the averager.

    ``take_part(kind, factor)`` takes part in a step of the others, with zeros; ``synchronize(rank)`` takes the
    parameters of a rank that has made the last step.
    """

    name: str
    by_size: bool  # divide sums by the number of all ranks
    take_part: Callable[[int, float], None]
    synchronize: Callable[[int], None]


@dataclass(eq=False)
class Joining:
    """An averager in ``join()``, and all others with it.

    >>> part = ShadowSteps("a name", True, lambda kind, factor: None, lambda rank: None)
    >>> with join(part, dist.group.WORLD, lambda: dist.group.WORLD) as joining:
    ...     joining.announce(STEP)
    1.0
    """

    part: ShadowSteps
    given: dist.ProcessGroup
    channel: dist.ProcessGroup
    all: list[Joining] = field(repr=False)  # from the outermost join()
    last: int | None = None  # a rank that has made the last step

    def announce(self, kind: int) -> float:
        """Announce a step of this averager, and wait for the other ranks; return the factor of what was divided by the
        number of all ranks."""
        found = _exchange(self.all, (self.all.index(self), kind))
        return found[2] if found else 1.0


_nested = threading.local()


@contextmanager
def join(part: ShadowSteps, given: dist.ProcessGroup, channel: Callable[[], dist.ProcessGroup]) -> Iterator[Joining]:
    """The context of ``GradientAverager.join()``. ``given``: the ranks; ``channel()`` makes a group of them for the
    announcements, if this is the outermost join()."""
    joined: list[Joining] = vars(_nested).setdefault("joined", [])
    _check(part, given, joined)
    joining = Joining(part, given, joined[0].channel if joined else channel(), joined)
    joined.append(joining)
    try:
        yield joining
        while found := _exchange(joined, None):
            number, kind, factor = found
            joined[number].part.take_part(kind, factor)
        for each in joined:
            if each.last is not None:
                each.part.synchronize(each.last)
                each.last = None
    finally:
        joined.remove(joining)


def _check(part: ShadowSteps, given: dist.ProcessGroup, joined: list[Joining]) -> None:
    """All ranks enter join() of the same averagers, in the same order."""
    problem = None
    if joined and ranks_of(joined[0].given) != ranks_of(given):
        problem = ValueError(
            f"rank {given.rank()}: GradientAverager.join: this averager has ranks {ranks_of(given)} of the world, and "
            f"that of the outermost join() has {ranks_of(joined[0].given)}; use averagers of the same group, or leave "
            "that join() first"
        )
    mine = [f"averager {part.name}", f"in {len(joined)} others", f"divide_by_initial_world_size={part.by_size}"]
    found = gather_or_raise("GradientAverager.join", mine, problem, given)
    check_lists("GradientAverager.join", found, "Every rank must enter the same averagers in the same order", given)


def _exchange(joined: list[Joining], mine: tuple[int, int] | None) -> tuple[int, int, float] | None:
    """Announce a step, by the number of an averager and the kind, or None. Return the step that is to be taken now and
    the factor; None if no rank has one."""
    channel = joined[0].channel
    table = torch.zeros(channel.size(), dtype=torch.int32, device=message_device(channel))
    table[channel.rank()] = 0 if mine is None else 1 + mine[0] * len(_NAMES) + mine[1]
    dist.all_reduce(table, group=channel)
    steps = {rank: divmod(code - 1, len(_NAMES)) for rank, code in enumerate(table.tolist()) if code}
    if not steps:
        return None
    first = next(iter(steps))
    for rank, step in steps.items():
        if step != steps[first]:
            raise MismatchError(
                f"rank {channel.rank()}: GradientAverager.join: ranks disagree. Rank {first} "
                f"{_described(steps[first])}; rank {rank} {_described(step)}. Every rank that has a batch must use the "
                "averagers in the same order"
            )
    number, kind = steps[first]
    joined[number].last = first
    return number, kind, 1.0 if joined[number].part.by_size else channel.size() / len(steps)


def _described(step: tuple[int, int]) -> str:
    number, kind = step
    return f"{_NAMES[kind]} of averager {number} (0: that of the outermost join())"
