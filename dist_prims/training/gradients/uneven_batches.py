"""Ranks with uneven numbers of batches: a rank that is done takes part with zeros until all are done.

At the end of each backward a rank announces which averager has a step, in one small all-reduce on a group that serves
nothing else; a rank that is done announces none. So the ranks that are done learn in which averager to take part next,
and when no step is left.

Several averagers in ``join()`` at once announce in one order, which is the same on all ranks::

    rank 0    step of a | step of b | step of a | step of b | done   | done
    rank 1    step of a | step of b | done      | done      | done   | done
    all                                                       leave b  leave a

Entering an inner ``join()`` is announced too: a rank that still makes steps of the outer one would never answer there.
Each announcement contains the number of the rank's contexts, because an error may have ended an inner one on some ranks
only. A disagreement ends all contexts on every rank: each later announcement raises it before anything is sent, so no
rank waits for one that has raised.

A first design let each averager ask on its own group whether any rank goes on. With two averagers a rank that was done
waited in the inner ``join()``, while the others waited for it in the outer one. A thread for each averager would serve
both, but an error or Ctrl-C would leave threads that wait for other ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...agreement import check_lists, gather_values
from ...errors import MismatchError
from ...torch_compat import message_device
from ..group_duplicates import ranks_of

__all__: list[str] = []

# The kinds of an announcement: no more steps, an averaging, what a GradScaler has found, and an inner join().
DONE, STEP, UNSCALE, ENTER = range(4)
_NAMES = ("has no more steps", "averages the gradients of {}", "calls unscale_() of {}", "enters join() of {}")


@dataclass
class ShadowSteps:
    """What a rank that is done does for an averager in ``join()``: functions of the averager."""

    name: str
    by_size: bool  # divide sums by the number of all ranks
    take_part: Callable[[int, float], None]  # (kind, factor): take part in a step of the others, with zeros
    synchronize: Callable[[int], None]  # take the parameters of this rank, which has made the last step


@dataclass
class Contexts:
    """The contexts of this thread."""

    entered: list[Joining] = field(default_factory=list)  # the outermost ``join()`` first
    disagreement: str = ""  # of the ranks; a text, since an error would keep the frames of a program alive


class NextStep(NamedTuple):
    """The step that all ranks make next, by the announcements of all of them."""

    number: int  # of the averager in ``Contexts.entered``
    kind: int  # STEP or UNSCALE
    factor: float  # of sums that were divided by the number of all ranks


@dataclass(eq=False)
class Joining:
    """An averager in ``join()``, and all others with it."""

    part: ShadowSteps
    given: dist.ProcessGroup  # the ranks of the averager
    channel: dist.ProcessGroup  # a group of these ranks for the announcements
    contexts: Contexts = field(repr=False)
    last: int | None = None  # a rank that has made the last step

    def announce(self, kind: int) -> float:
        """Announce a step of this averager, and wait for the other ranks; return the factor of what was divided by the
        number of all ranks."""
        step = _announce(self.contexts, kind, self.contexts.entered.index(self))
        return step.factor if step else 1.0


_nested = threading.local()


@contextmanager
def join(part: ShadowSteps, given: dist.ProcessGroup, channel: Callable[[], dist.ProcessGroup]) -> Iterator[Joining]:
    """The context of ``GradientAverager.join()``. ``given``: the ranks; ``channel()`` makes a group of them for the
    announcements, if this is the outermost join()."""
    contexts: Contexts = vars(_nested).get("contexts") or Contexts()
    joined = contexts.entered
    _check(part, given, contexts)
    joining = Joining(part, given, joined[0].channel if joined else channel(), contexts)
    joined.append(joining)
    _nested.contexts = contexts
    try:
        yield joining
        while step := _announce(contexts, DONE):
            joined[step.number].part.take_part(step.kind, step.factor)
        for each in joined:
            if each.last is not None:
                each.part.synchronize(each.last)
                each.last = None
    finally:
        joined.remove(joining)
        if not joined:
            _nested.contexts = None


def _check(part: ShadowSteps, given: dist.ProcessGroup, contexts: Contexts) -> None:
    """All ranks enter join() of the same averagers, in the same order."""
    joined, problem = contexts.entered, None
    if joined and ranks_of(joined[0].given) != ranks_of(given):
        problem = ValueError(
            f"rank {given.rank()}: GradientAverager.join: this averager has ranks {ranks_of(given)} of the world, and "
            f"that of the outermost join() has {ranks_of(joined[0].given)}; use averagers of the same group, or leave "
            "that join() first"
        )
    elif joined:
        given = joined[0].channel  # not the group of this averager: ranks may have entered different averagers
        _announce(contexts, ENTER, len(joined))
    own = [f"averager {part.name}", f"in {len(joined)} others", f"divide_by_initial_world_size={part.by_size}"]
    of_ranks = gather_values(own, given, "GradientAverager.join", problem)
    check_lists("GradientAverager.join", of_ranks, "Every rank must enter the same averagers in the same order", given)


def _announce(contexts: Contexts, kind: int, number: int = 0) -> NextStep | None:
    """Announce what this rank does next, by its kind and the number of the averager, and wait for the announcements of
    all ranks. Return the step that all ranks make now; None if no rank has one, or all enter an inner join()."""
    # 1. The announcements of all ranks. All of them must be the first one that is not DONE, or DONE.
    joined = contexts.entered
    channel = joined[0].channel
    if not contexts.disagreement:
        table = torch.zeros(channel.size(), 3, dtype=torch.int32, device=message_device(channel))
        table[channel.rank()] = torch.tensor([len(joined), kind, number], dtype=torch.int32)
        dist.all_reduce(table, group=channel)
        rows = [(depth, kind, number) for depth, kind, number in table.tolist()]
        first = next((rank for rank, row in enumerate(rows) if row[1] != DONE), 0)
        depth, kind, number = rows[first]
        agreeing = {rows[first]} if kind == ENTER else {rows[first], (depth, DONE, 0)}
        contexts.disagreement = next((_text(rows, first, r) for r, row in enumerate(rows) if row not in agreeing), "")
    if contexts.disagreement:
        raise MismatchError(f"rank {channel.rank()}: GradientAverager.join: {contexts.disagreement}")
    # 2. The step.
    if kind in (DONE, ENTER):
        return None
    joined[number].last = first
    active = sum(row[1] != DONE for row in rows)
    return NextStep(number, kind, 1.0 if joined[number].part.by_size else channel.size() / active)


def _text(rows: Sequence[tuple[int, int, int]], first: int, second: int) -> str:
    """The disagreement of two ranks, and the remedy. ``rows``: of each rank the number of its contexts, the kind of its
    announcement, and the number of the averager."""
    if rows[first][0] != rows[second][0]:
        left = min(first, second, key=lambda rank: rows[rank][0])
        remedy = (
            f"An error has ended an inner join() on rank {left}, which has caught it within the outer one. Catch an "
            "error within the innermost join(), or outside of all of them"
        )
    elif ENTER in (rows[first][1], rows[second][1]):
        remedy = "Enter all of them before the first step, by `with a.join(), b.join()`, or leave one before the next"
    else:
        remedy = "Every rank that has a batch must use the averagers in the same order"
    return (
        f"ranks disagree. Rank {first} {_described(*rows[first])}; rank {second} {_described(*rows[second])}. {remedy}"
    )


def _described(depth: int, kind: int, number: int) -> str:
    what = _NAMES[kind].format(f"averager {number} (0: that of the outermost join())")
    return f"{what}, within {depth} join()"
