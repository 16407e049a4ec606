"""The load of an algorithm in closed form: rounds of regular moves, whose crossings of hosts are counted by arithmetic.

The messages of most steps form a regular set. A :class:`Move` is such a set: of the ranks ``first`` to ``last`` - 1,
those in the first ``block`` places of every ``stride`` send to the rank ``shift`` places further:

    Move(0, 8, block=1, stride=2, shift=1)     0->1  2->3  4->5  6->7
    Move(0, 8, block=2, stride=4, shift=2)     0->2  1->3  4->6  5->7

The number of senders below a rank is a formula, so the messages that leave a host, or arrive at it, are differences of
such numbers. The cost does not depend on the number of ranks, and a :class:`Round` stands for any number of equal
steps: the card of a ring is two rounds. Example: 2 hosts of 2 ranks, a ring sends one chunk over each link in a step.

>>> ring = load_of([Round(6, [shifted(4, 1)])], Hosts((2, 2)), share=0.25)
>>> ring.steps, ring.busiest[:6].tolist()  # messages, of them between hosts, copied, reduced, over a link, crowded
(6, [6.0, 6.0, 1.5, 0.0, 1.5, 0.0])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .load import COLUMNS, COPIED, CROWDED, DATA, LINK, MACHINE, OUTER, Hosts, Load, StepCount
from .steps import Step

__all__: list[str] = []

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Move:
    """A regular set of messages of ``chunks`` chunks each; see the module. No rank sends or receives two of them.

    A message of half a chunk stands for a message of one chunk in every second step.
    """

    first: int
    last: int
    shift: int
    block: int = 1
    stride: int = 1
    chunks: float = 1
    reduce: bool = False

    @property
    def ranks(self) -> tuple[int, int, int, int, int]:
        """The move without its chunks."""
        return self.first, self.last, self.shift, self.block, self.stride

    def senders_below(self, rank: Ints) -> Ints:
        """The number of senders below each rank."""
        place = np.minimum(np.maximum(rank - self.first, 0), max(self.last - self.first, 0))
        if self.block == self.stride:
            return place
        whole, rest = _divmod(place, self.stride)
        return whole * self.block + np.minimum(rest, self.block)

    def sender_from(self, rank: Ints) -> Ints:
        """The first sender that is not below each rank."""
        place = np.maximum(rank - self.first, 0)
        whole, rest = _divmod(place, self.stride)
        return self.first + np.where(rest < self.block, place, (whole + 1) * self.stride)

    def sender_before(self, rank: Ints) -> Ints:
        """The last sender below each rank."""
        place = np.minimum(rank, self.last) - self.first - 1
        whole, rest = _divmod(place, self.stride)
        return self.first + whole * self.stride + np.minimum(rest, self.block - 1)

    def backwards(self, reduce: bool = False) -> Move:
        """The move in which the receivers send back."""
        first, last = self.first + self.shift, self.last + self.shift
        return replace(self, first=first, last=last, shift=-self.shift, reduce=reduce)

    def mirrored(self, size: int) -> Move:
        """The move with rank ``size`` - 1 - r in place of each rank r; for blocks of one rank."""
        count = max(-(-(self.last - self.first) // self.stride), 0)
        first = size - 1 - self.first - (count - 1) * self.stride
        return replace(self, first=first, last=size - self.first if count else first, shift=-self.shift)


def _divmod(place: Ints, stride: int) -> tuple[Ints, Ints]:
    """Quotient and remainder; shifts take a tenth of the time of divisions."""
    if stride & (stride - 1):
        return np.divmod(place, stride)
    return place >> (stride.bit_length() - 1), place & (stride - 1)


def shifted(size: int, distance: int, chunks: float = 1, reduce: bool = False) -> list[Move]:
    """Every rank sends to the rank ``distance`` places further, modulo ``size``.

    >>> [(move.first, move.last, move.shift) for move in shifted(5, 2)]
    [(0, 3, 2), (3, 5, -3)]
    """
    ahead = distance % size
    moves = (Move(0, size - ahead, ahead), Move(size - ahead, size, ahead - size))
    return [replace(move, chunks=chunks, reduce=reduce) for move in moves if move.shift]


def exchanged(size: int, distance: int, chunks: float = 1, reduce: bool = False, first: int = 0) -> list[Move]:
    """Each rank from ``first`` on sends to the rank whose number differs from its own in the bit ``distance``.

    ``first`` and ``size`` are multiples of ``distance``.

    >>> [(move.first, move.shift, move.block, move.stride) for move in exchanged(8, 2)]
    [(0, 2, 2, 4), (2, -2, 2, 4)]
    """
    both = (first, first + distance)
    low, high = both if first % (2 * distance) == 0 else reversed(both)
    return [
        Move(low, size, distance, distance, 2 * distance, chunks, reduce),
        Move(high, size, -distance, distance, 2 * distance, chunks, reduce),
    ]


def zigzag(size: int, distance: int, chunks: float = 1) -> list[Move]:
    """Even ranks send an odd ``distance`` up, odd ranks as far down, modulo an even ``size``."""
    up = distance % size
    senders = ((0, size - up, up), (size - up + 1, size, up - size), (1, up, size - up), (up, size, -up))
    return [Move(first, last, shift, 1, 2, chunks) for first, last, shift in senders if first < last]


class Round(NamedTuple):
    """``times`` equal steps. A rank takes part in each of ``groups``, and within a group in one move each way."""

    times: int
    groups: Sequence[Sequence[Move]]


class AllPairs(NamedTuple):
    """A step in which every rank sends one chunk to every other rank."""

    reduce: bool = False


class Star(NamedTuple):
    """A step in which all ranks send a chunk to rank 0, or rank 0 sends one to each of them."""

    inward: bool


class Busiest(NamedTuple):
    """The load of the busiest rank and link in all steps, where none is the busiest in each step."""

    messages: float
    chunks: float
    reduced: float
    link: float | None = None


class _Traffic(NamedTuple):
    """Of a move, by host: messages that stay, leave and arrive; the first and the last host that sends to it."""

    stay: Ints
    leave: Ints
    arrive: Ints
    nearest: Ints
    furthest: Ints
    stays: bool
    leaves: bool


@lru_cache(maxsize=1024)
def _traffic(ranks: tuple[int, int, int, int, int], hosts: Hosts) -> _Traffic:
    move = Move(*ranks)
    begin, end, shift = hosts.begins, hosts.ends, move.shift
    low, high = np.maximum(begin, begin - shift), np.minimum(end, end - shift)  # senders whose receivers are here too
    stay = np.where(high > low, move.senders_below(high) - move.senders_below(low), 0)
    leave = move.senders_below(end) - move.senders_below(begin) - stay
    arrive = move.senders_below(end - shift) - move.senders_below(begin - shift) - stay
    # The senders to this host from elsewhere are consecutive: below it, or above it.
    low = begin - shift if shift > 0 else np.maximum(begin - shift, end)
    high = np.minimum(end - shift, begin) if shift > 0 else end - shift
    none = arrive == 0
    first = np.searchsorted(hosts.ends, move.sender_from(low), "right")
    last = np.searchsorted(hosts.ends, move.sender_before(high), "right")
    nearest, furthest = np.where(none, len(end), first), np.where(none, -1, last)
    return _Traffic(stay, leave, arrive, nearest, furthest, bool(stay.any()), bool(leave.any()))


_OUT, _IN, _CROWDED, _NEAR, _FAR_OUT, _FAR_IN, _COPIED, _REDUCED = range(8)


class _Step(NamedTuple):
    """The load of the busiest rank, and the sums of each host: [column, host].

    The columns are the chunks out, in, and in from several hosts; the messages within the host, out and in; and the
    chunks copied and reduced.
    """

    rank: Floats
    sums: Floats


def _row(step: _Step, hosts: Hosts) -> Floats:
    row = np.zeros(COLUMNS)
    row[:LINK] = step.rank
    *links, crowded = largest = step.sums[:3].max(axis=1)
    row[LINK], row[CROWDED] = max(links), crowded
    if not hosts.has_cores:
        return row
    near, out, into, copied, reduced = step.sums[3:].sum(axis=1) if hosts.one_machine else step.sums[3:].max(axis=1)
    crossing = step.sums[:2].sum(axis=1) if hosts.one_machine else largest[:2]
    row[MACHINE] = near, max(out, into), copied, reduced, max(crossing)
    return row


def _step(groups: Sequence[Sequence[Move]], hosts: Hosts) -> _Step:
    number = len(hosts.ranks)
    busiest, sums = np.zeros(LINK), np.zeros((8 if hosts.has_cores else 3, number))
    nearest, furthest = np.full(number, number), np.full(number, -1)
    for group in groups:
        messages, outer, copied, reduced = 0, False, 0.0, 0.0
        for move in group:
            traffic, chunks = _traffic(move.ranks, hosts), move.chunks
            if not traffic.stays and not traffic.leaves:
                continue
            messages, outer = 1, outer or traffic.leaves
            if traffic.leaves:
                sums[_OUT] += chunks * traffic.leave
                sums[_IN] += chunks * traffic.arrive
                np.minimum(nearest, traffic.nearest, out=nearest)
                np.maximum(furthest, traffic.furthest, out=furthest)
            copied = max(copied, chunks, 1) if traffic.stays else copied
            reduced = max(reduced, chunks, 1) if move.reduce else reduced
            if hosts.has_cores:
                sums[_NEAR : _FAR_IN + 1] += min(chunks, 1) * np.stack([traffic.stay, traffic.leave, traffic.arrive])
                sums[_COPIED] += chunks * traffic.stay
                sums[_REDUCED] += chunks * move.reduce * (traffic.stay + traffic.arrive)
        busiest += messages, outer, copied, reduced
    sums[_CROWDED] = np.where(nearest < furthest, sums[_IN], 0)
    return _Step(busiest, sums)


def _all_pairs(step: AllPairs, hosts: Hosts) -> _Step:
    ranks, size, number = np.array(hosts.ranks, np.float64), hosts.size, len(hosts.ranks)
    stay, leave, reduced = ranks * (ranks - 1), ranks * (size - ranks), (size - 1) * step.reduce
    outer = size - ranks.min() if number > 1 else 0
    links = [leave, leave, leave * (number > 2)]
    return _Step(
        np.array([size - 1, outer, ranks.max() - 1, reduced]),
        np.stack([*links, stay, leave, leave, stay, reduced * ranks]),
    )


def _star(step: Star, hosts: Hosts) -> _Step:
    ranks, size = hosts.ranks, hosts.size
    near, far = ranks[0] - 1, size - ranks[0]
    sums = np.zeros((8, len(ranks)))
    root, others = (_IN, _OUT) if step.inward else (_OUT, _IN)
    sums[root, 0], sums[others, 1:] = far, ranks[1:]
    sums[_CROWDED, 0] = far if step.inward and len(ranks) > 2 else 0
    sums[[_FAR_OUT, _FAR_IN]] = sums[[_OUT, _IN]]
    sums[[_NEAR, _COPIED], 0] = near
    return _Step(np.array([size - 1, far, near, 0]), sums)


def _counted(step: Step, hosts: Hosts) -> _Step:
    count = StepCount(step, hosts)
    near, far, copied, reduced = np.add.reduceat(count.ranks, hosts.begins, axis=2).transpose(1, 0, 2)
    rank = np.array([count.ranks[:, :2].sum(axis=1).max(), *count.ranks[:, 1:].max(axis=(0, 2))])
    return _Step(rank, np.stack([*count.links, count.crowded, near[0], *far, copied[0], reduced[0]]))


FEW_RANKS = 64  # up to so many ranks, the cards of pipelines yield their steps, which are counted

Part = Round | AllPairs | Star | Step | Busiest | Load


def load_of(parts: Iterable[Part], hosts: Hosts, share: float) -> Load:
    """The load of an algorithm from the parts that its card yields, for chunks that are ``share`` of the data.

    The busiest rank is the busiest in each step, unless a part says otherwise; a :class:`~.load.Load` is a phase whose
    load is known, and a step of messages that are not regular is counted.
    """
    times: list[int] = []
    rows: list[Floats] = []
    phases: list[Load] = []
    rank, sums = np.zeros(LINK), np.zeros((8 if hosts.has_cores else 3, len(hosts.ranks)))
    busiest: Busiest | None = None
    known: dict[int, tuple[Any, _Step]] = {}  # of groups that several rounds have
    for part in parts:
        if isinstance(part, Load):
            phases.append(part)
        elif isinstance(part, Busiest):
            busiest = part
        elif not isinstance(part, Round) or part.times > 0:
            often, step = _evaluate(part, hosts, known)
            times.append(often)
            rows.append(_row(step, hosts))
            rank += often * step.rank
            sums += often * step.sums[: len(sums)]
    steps = sum(times)
    if busiest is not None:
        crosses, stays = rank[OUTER] > 0, rank[COPIED] > 0
        rank = np.array([busiest.messages, busiest.messages * crosses, busiest.chunks * stays, busiest.reduced])
        steps = int(busiest.messages)
    total = _row(_Step(rank, sums), hosts)
    if busiest is not None and busiest.link is not None:
        total[LINK] = min(total[LINK], busiest.link)
    factors = np.ones(COLUMNS)
    factors[DATA] = share
    own = Load(np.array(times, np.int64), np.reshape(rows, (-1, COLUMNS)) * factors, total * factors, steps)
    return Load.joined([own, *phases]) if phases else own


def _evaluate(
    part: Round | AllPairs | Star | Step, hosts: Hosts, known: dict[int, tuple[Any, _Step]]
) -> tuple[int, _Step]:
    match part:
        case Round():
            if id(part.groups) not in known:
                known[id(part.groups)] = part.groups, _step(part.groups, hosts)
            return part.times, known[id(part.groups)][1]
        case AllPairs():
            return 1, _all_pairs(part, hosts)
        case Star():
            return 1, _star(part, hosts)
        case Step():
            return 1, _counted(part, hosts)


def backwards(parts: Iterable[Part], reduce: bool = True) -> Iterator[Part]:
    """The rounds from the last to the first, with receivers that send back: all-gather to reduce-scatter."""
    for part in reversed([*parts]):
        assert isinstance(part, Round)
        yield Round(part.times, [[move.backwards(reduce) for move in group] for group in part.groups])


def side_by_side(loads: Sequence[Load], hosts: Sequence[int] | None = None) -> Load:
    """The load of phases that run at once on different hosts; ``hosts``: how many of each share one machine, if any."""
    often = np.ones(len(loads)) if hosts is None else np.asarray(hosts)
    alone = [load.scaled(link=each, machine=each) for load, each in zip(loads, often.tolist(), strict=True)]
    if len(alone) == 1:
        return alone[0]
    length = max(load.steps for load in alone)
    rows = np.zeros((len(alone), length, COLUMNS))
    for load, of_load in zip(alone, rows, strict=True):
        of_load[: load.steps] = np.repeat(load.rows, load.times, axis=0)
    every, busiest = rows.max(axis=0), np.array([load.busiest for load in alone])
    most = busiest.max(axis=0)
    if hosts is not None:
        every[:, MACHINE], most[MACHINE] = rows[:, :, MACHINE].sum(axis=0), busiest[:, MACHINE].sum(axis=0)
    return Load(np.ones(length, np.int64), every, most, max(load.busy_steps for load in alone))
