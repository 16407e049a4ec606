"""The load of an algorithm in closed form: what its busiest rank and host send, copy and reduce, without its steps.

The messages of most steps form regular sets. A :class:`MessageSet`: of the ranks ``first`` to ``last`` - 1, the ranks
in the first ``block`` places of every ``stride`` send to the rank ``shift`` places further:

    MessageSet(0, 8, block=1, stride=2, shift=1)     0->1  2->3  4->5  6->7
    MessageSet(0, 8, block=2, stride=4, shift=2)     0->2  1->3  4->6  5->7

The number of senders below a rank is a formula, so the number of messages that leave a host, or arrive at it, is a
difference of two such numbers. The time of this calculation does not depend on the number of ranks. The cost card of
an algorithm yields items (``Card.load``): :class:`EqualSteps` for any number of steps with the same message sets, or
another :data:`LoadItem`. :func:`load_of` adds them up to a :class:`~.load.Load`, whose columns are explained in
:mod:`.load`. Example: 2 hosts of 2 ranks; a ring sends one chunk over each link in each of 6 steps.

>>> ring = load_of([EqualSteps(6, [shifted(4, 1)])], Hosts((2, 2)), share=0.25)
>>> ring.steps, ring.busiest[:6].tolist()  # messages, messages between hosts, copied, reduced, link, crowded
(6, [6.0, 6.0, 1.5, 0.0, 1.5, 0.0])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .load import COLUMNS, COPIED, CROWDED, DATA, LINK, MACHINE, OUTER, Hosts, Load, StepCount
from .steps import Step

__all__: list[str] = []

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class MessageSet(NamedTuple):  # a dataclass takes twice as long to make, and a price needs many
    """A regular set of messages; the module says what the first five numbers mean.

    No rank sends two messages of one set, or receives two. ``chunks``: the length of each message; half a chunk stands
    for one chunk in every second step. ``reduce``: the receiver adds the chunks to its own.
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
        """The five numbers that say which ranks send, and to which ranks."""
        return self[:5]

    def senders_below(self, rank: Ints) -> Ints:
        """The number of senders below each rank."""
        place = np.minimum(np.maximum(rank - self.first, 0), max(self.last - self.first, 0))  # counted from ``first``
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

    def backwards(self, reduce: bool = False) -> MessageSet:
        """The set in which the receivers send back."""
        first, last = self.first + self.shift, self.last + self.shift
        return self._replace(first=first, last=last, shift=-self.shift, reduce=reduce)

    def mirrored(self, size: int) -> MessageSet:
        """The set with rank ``size`` - 1 - r in place of each rank r; for blocks of one rank."""
        count = max(-(-(self.last - self.first) // self.stride), 0)
        first = size - 1 - self.first - (count - 1) * self.stride
        return self._replace(first=first, last=size - self.first if count else first, shift=-self.shift)


def _divmod(place: Ints, stride: int) -> tuple[Ints, Ints]:
    """Quotient and remainder. For powers of two, bit shifts take a tenth of the time of divisions."""
    if stride & (stride - 1):
        return np.divmod(place, stride)
    return place >> (stride.bit_length() - 1), place & (stride - 1)


def shifted(size: int, distance: int, chunks: float = 1, reduce: bool = False) -> list[MessageSet]:
    """Every rank sends to the rank ``distance`` places further, modulo ``size``.

    >>> [(move.first, move.last, move.shift) for move in shifted(5, 2)]
    [(0, 3, 2), (3, 5, -3)]
    """
    ahead = distance % size
    ranks_and_shifts = ((0, size - ahead, ahead), (size - ahead, size, ahead - size))
    return [MessageSet(*move, chunks=chunks, reduce=reduce) for move in ranks_and_shifts if move[-1]]


def exchanged(size: int, distance: int, chunks: float = 1, reduce: bool = False, first: int = 0) -> list[MessageSet]:
    """Each rank from ``first`` on sends to the rank whose number differs from its own in the bit ``distance``.

    ``size``: the rank after the last one. ``distance``: a power of two, which divides ``first`` and ``size``.

    >>> [(move.first, move.shift, move.block, move.stride) for move in exchanged(8, 2)]
    [(0, 2, 2, 4), (2, -2, 2, 4)]
    """
    starts = (first, first + distance)
    bit_clear, bit_set = starts if first % (2 * distance) == 0 else reversed(starts)
    return [
        MessageSet(bit_clear, size, distance, distance, 2 * distance, chunks, reduce),
        MessageSet(bit_set, size, -distance, distance, 2 * distance, chunks, reduce),
    ]


def zigzag(size: int, distance: int, chunks: float = 1) -> list[MessageSet]:
    """Every even rank sends ``distance`` (odd) ranks up, every odd rank as far down, modulo ``size`` (even)."""
    up = distance % size
    senders = ((0, size - up, up), (size - up + 1, size, up - size), (1, up, size - up), (up, size, -up))
    return [MessageSet(first, last, shift, stride=2, chunks=chunks) for first, last, shift in senders if first < last]


class EqualSteps(NamedTuple):
    """``times`` equal steps, in which the message sets of all ``groups`` happen at once.

    Within a group the busiest rank sends one message and receives one; the groups add up: a rank that sends in each of
    two groups has two messages in a step.
    """

    times: int
    groups: Sequence[Sequence[MessageSet]]


class AllPairs(NamedTuple):
    """A step in which every rank sends one chunk to every other rank."""

    reduce: bool = False


class Star(NamedTuple):
    """A step in which all ranks send a chunk to rank 0, or rank 0 sends one to each of them."""

    inward: bool


class Busiest(NamedTuple):
    """The load of the busiest rank in all steps together, if no rank is the busiest one in each step.

    ``chunks``: the chunks that the rank copies. ``link``: the most chunks that any link carries; None: as counted.
    """

    messages: float
    chunks: float
    reduced: float
    link: float | None = None


class _Traffic(NamedTuple):
    """The messages of a set by host: an array with a number for each host."""

    stay: Ints  # messages whose sender and receiver are on the host
    leave: Ints  # messages from the host to others
    arrive: Ints  # messages from others to the host
    stays: bool  # whether any message stays
    leaves: bool  # whether any message leaves


@lru_cache(maxsize=1024)
def _traffic(ranks: tuple[int, int, int, int, int], hosts: Hosts) -> _Traffic:
    move = MessageSet(*ranks)
    begin, end, shift = hosts.begins, hosts.ends, move.shift
    if len(end) == 1:  # every message stays on the host
        stay, nothing = move.senders_below(end), np.zeros_like(end)
        return _Traffic(stay, nothing, nothing, bool(stay[0]), leaves=False)
    first, last = begin - shift, end - shift
    # The receivers on a host are begin..end-1, so their senders are first..last-1.
    low, high = np.maximum(begin, first), np.minimum(end, last)  # senders here, with receivers here
    to_low, to_high, to_begin, to_end, to_first, to_last = move.senders_below(
        np.array([low, high, begin, end, first, last])  # at once, because each operation on a small array costs as much
    )
    stay = np.where(high > low, to_high - to_low, 0)
    leave, arrive = to_end - to_begin - stay, to_last - to_first - stay
    return _Traffic(stay, leave, arrive, bool(stay.any()), bool(leave.any()))


@lru_cache(maxsize=1024)
def _sending_hosts(ranks: tuple[int, int, int, int, int], hosts: Hosts) -> tuple[Ints, Ints]:
    """The lowest and the highest host that sends to each host; the number of hosts and -1 if none does."""
    move, end = MessageSet(*ranks), hosts.ends
    low, high = hosts.begins - move.shift, end - move.shift
    # The senders of what arrives have consecutive places, all below the host or all above it.
    low, high = (low, np.minimum(high, hosts.begins)) if move.shift > 0 else (np.maximum(low, end), high)
    lowest, highest = np.searchsorted(end, np.array([move.sender_from(low), move.sender_before(high)]), "right")
    nothing = _traffic(ranks, hosts).arrive == 0
    return np.where(nothing, len(end), lowest), np.where(nothing, -1, highest)


# The sums of a host in one step: chunks out, chunks in, chunks in if several hosts send them; messages within the host,
# out and in; chunks copied and reduced. The last five are needed only for hosts whose cores are known.
_CHUNKS_OUT, _CHUNKS_IN, _CROWDED, _MESSAGES_INSIDE, _MESSAGES_OUT, _MESSAGES_IN, _COPIED, _REDUCED = range(8)


class _StepLoad(NamedTuple):
    """``rank``: the counts MESSAGES to REDUCED of the busiest rank. ``sums[sum, host]``: the sums of each host."""

    rank: Floats
    sums: Floats


def _row(step: _StepLoad, hosts: Hosts) -> Floats:
    """The row of a :class:`~.load.Load`, in chunks."""
    row = np.zeros(COLUMNS)
    row[:LINK] = step.rank
    chunks_out, chunks_in, crowded = largest = step.sums[:_MESSAGES_INSIDE].max(axis=1)
    row[LINK], row[CROWDED] = max(chunks_out, chunks_in), crowded
    if not hosts.has_cores:
        return row
    of_hosts = step.sums[_MESSAGES_INSIDE:]
    near, out, into, copied, reduced = of_hosts.sum(axis=1) if hosts.one_machine else of_hosts.max(axis=1)
    crossing = step.sums[:_CROWDED].sum(axis=1) if hosts.one_machine else largest[:_CROWDED]
    row[MACHINE] = near, max(out, into), copied, reduced, max(crossing)
    return row


def _load_of_sets(groups: Sequence[Sequence[MessageSet]], hosts: Hosts) -> _StepLoad:
    """The load of one of the equal steps in which the message sets of all groups happen at once."""
    number = len(hosts.ranks)
    busiest, sums = np.zeros(LINK), np.zeros((8 if hosts.has_cores else 3, number))
    lowest, highest = np.full(number, number), np.full(number, -1)  # of the hosts that send to each host
    for group in groups:
        # The busiest rank of the group: at most one message, the longest that a rank can have, of at least 1 chunk.
        messages, outer, copied, reduced = 0, False, 0.0, 0.0
        for move in group:
            traffic, chunks = _traffic(move.ranks, hosts), float(move.chunks)  # the product exceeds 32 bits
            if not traffic.stays and not traffic.leaves:
                continue
            messages, outer = 1, outer or traffic.leaves
            if traffic.leaves:
                sums[_CHUNKS_OUT] += chunks * traffic.leave
                sums[_CHUNKS_IN] += chunks * traffic.arrive
                if hosts.has_congestion:
                    of_set = _sending_hosts(move.ranks, hosts)
                    lowest, highest = np.minimum(lowest, of_set[0]), np.maximum(highest, of_set[1])
            copied = max(copied, chunks, 1) if traffic.stays else copied
            reduced = max(reduced, chunks, 1) if move.reduce else reduced
            if hosts.has_cores:
                in_step = min(chunks, 1)  # half a chunk is a message in every second step
                sums[_MESSAGES_INSIDE] += in_step * traffic.stay
                sums[_MESSAGES_OUT] += in_step * traffic.leave
                sums[_MESSAGES_IN] += in_step * traffic.arrive
                sums[_COPIED] += chunks * traffic.stay
                sums[_REDUCED] += chunks * move.reduce * (traffic.stay + traffic.arrive)
        busiest += messages, outer, copied, reduced
    sums[_CROWDED] = np.where(lowest < highest, sums[_CHUNKS_IN], 0)
    return _StepLoad(busiest, sums)


def _load_of_all_pairs(step: AllPairs, hosts: Hosts) -> _StepLoad:
    ranks, size, number = np.array(hosts.ranks, np.float64), hosts.size, len(hosts.ranks)
    stay, leave, reduced = ranks * (ranks - 1), ranks * (size - ranks), (size - 1) * step.reduce
    outer = size - ranks.min() if number > 1 else 0
    links = [leave, leave, leave * (number > 2)]
    of_rank = np.array([size - 1, outer, ranks.max() - 1, reduced])
    return _StepLoad(of_rank, np.array([*links, stay, leave, leave, stay, reduced * ranks]))


def _load_of_star(step: Star, hosts: Hosts) -> _StepLoad:
    ranks, size = hosts.ranks, hosts.size
    near, far = ranks[0] - 1, size - ranks[0]  # the ranks on the host of rank 0, and the ranks on other hosts
    sums = np.zeros((8, len(ranks)))
    of_root, of_others = (_CHUNKS_IN, _CHUNKS_OUT) if step.inward else (_CHUNKS_OUT, _CHUNKS_IN)
    sums[of_root, 0], sums[of_others, 1:] = far, ranks[1:]
    sums[_CROWDED, 0] = far if step.inward and len(ranks) > 2 else 0
    sums[[_MESSAGES_OUT, _MESSAGES_IN]] = sums[[_CHUNKS_OUT, _CHUNKS_IN]]
    sums[[_MESSAGES_INSIDE, _COPIED], 0] = near
    return _StepLoad(np.array([size - 1, far, near, 0]), sums)


def _load_of_counted(step: Step, hosts: Hosts) -> _StepLoad:
    """The load of a step whose messages are not regular, from its rows."""
    count = StepCount(step, hosts)
    near, far, copied, reduced = np.add.reduceat(count.ranks, hosts.begins, axis=2).transpose(1, 0, 2)
    rank = np.array([count.ranks[:, : OUTER + 1].sum(axis=1).max(), *count.ranks[:, OUTER:].max(axis=(0, 2))])
    return _StepLoad(rank, np.stack([*count.links, count.crowded, near[0], *far, copied[0], reduced[0]]))


FEW_RANKS = 64  # up to this number of ranks, cards may yield each step; an algorithm in many chunks is counted

LoadItem = EqualSteps | AllPairs | Star | Step | Busiest | Load


class TooManyMessages(Exception):
    """The busiest rank has more messages between hosts than the caller permits."""


def load_of(items: Iterable[LoadItem], hosts: Hosts, share: float, most_messages: float = math.inf) -> Load:
    """The load of an algorithm from the items that its card yields, for chunks that are ``share`` of the data.

    Unless an item is a :class:`Busiest`, the same rank is assumed to be the busiest in each step. An item that is a
    :class:`~.load.Load` is a phase whose load is known. Raises TooManyMessages, without the calculation of a load, if
    the items show that the busiest rank has more than ``most_messages`` between hosts.
    """
    times: list[int] = []
    rows: list[Floats] = []
    phases: list[Load] = []
    rank, sums = np.zeros(LINK), np.zeros((8 if hosts.has_cores else 3, len(hosts.ranks)))  # of all steps together
    busiest: Busiest | None = None
    known: dict[int, tuple[Any, _StepLoad]] = {}  # of groups that several items have
    # 1. Each item gives rows, a known load, or the busiest rank.
    for item in _read(items, hosts, most_messages):
        if isinstance(item, Load):
            phases.append(item)
        elif isinstance(item, Busiest):
            busiest = item
        elif not isinstance(item, EqualSteps) or item.times > 0:
            repeats, step = _load_of_item(item, hosts, known)
            times.append(repeats)
            rows.append(_row(step, hosts))
            rank += repeats * step.rank
            sums += repeats * step.sums[: len(sums)]
    # 2. The load of all steps together.
    busy_steps = sum(times)
    if busiest is not None:
        crosses, stays = rank[OUTER] > 0, rank[COPIED] > 0
        rank = np.array([busiest.messages, busiest.messages * crosses, busiest.chunks * stays, busiest.reduced])
        busy_steps = int(busiest.messages)
    total = _row(_StepLoad(rank, sums), hosts)
    if busiest is not None and busiest.link is not None:
        total[LINK] = min(total[LINK], busiest.link)
    # 3. Chunks become fractions of the data.
    factors = np.ones(COLUMNS)
    factors[DATA] = share
    own = Load(np.array(times, np.int64), np.reshape(rows, (-1, COLUMNS)) * factors, total * factors, busy_steps)
    return Load.joined([own, *phases]) if phases else own


def _read(items: Iterable[LoadItem], hosts: Hosts, most_messages: float) -> list[LoadItem]:
    """The items; TooManyMessages as soon as those read so far have more than ``most_messages`` between hosts."""
    read: list[LoadItem] = []
    messages, of_busiest = 0.0, 0.0
    for item in items:
        read.append(item)
        messages += _least_outer_messages(item, hosts)
        of_busiest = item.messages if isinstance(item, Busiest) else of_busiest
        if messages and max(messages, of_busiest) > most_messages:
            raise TooManyMessages
    return read


def _least_outer_messages(item: LoadItem, hosts: Hosts) -> float:
    """A lower bound of the messages between hosts of the busiest rank."""
    match item:
        case EqualSteps():
            beyond = max(hosts.ranks)  # a rank that is so far away is on another host
            crossing = (any(abs(m.shift) >= beyond and m.first < m.last for m in group) for group in item.groups)
            return item.times * sum(crossing)
        case AllPairs():
            return hosts.size - min(hosts.ranks)
        case Star():
            return hosts.size - hosts.ranks[0]
        case Step():
            rows, _ = item.narrow
            return int((hosts.host_of[rows.src] != hosts.host_of[rows.dst]).any())
        case Load():
            return float(item.over_steps(item.rows[:, OUTER]))
        case Busiest():
            return 0


def _load_of_item(
    item: EqualSteps | AllPairs | Star | Step, hosts: Hosts, known: dict[int, tuple[Any, _StepLoad]]
) -> tuple[int, _StepLoad]:
    """The number of equal steps, and the load of one. ``known`` has the results by the identity of the groups."""
    match item:
        case EqualSteps():
            if id(item.groups) not in known:  # the groups are kept too, so that no other object gets their identity
                known[id(item.groups)] = item.groups, _load_of_sets(item.groups, hosts)
            return item.times, known[id(item.groups)][1]
        case AllPairs():
            return 1, _load_of_all_pairs(item, hosts)
        case Star():
            return 1, _load_of_star(item, hosts)
        case Step():
            return 1, _load_of_counted(item, hosts)


def backwards(items: Iterable[LoadItem], reduce: bool = True) -> Iterator[LoadItem]:
    """The items from the last to the first, with receivers that send back: a reduce-scatter from an all-gather."""
    for item in reversed([*items]):
        assert isinstance(item, EqualSteps)
        yield EqualSteps(item.times, [[move.backwards(reduce) for move in group] for group in item.groups])
