"""The cost model: the seconds of a schedule on a topology, with or without segments, from its load (:mod:`.load`).

A step takes as long as the slowest of three resources, and the next step begins when the step is over:

    resource              its time in a step                                            kinds of time
    the busiest rank      its messages, and the data that it copies and reduces         latency, processor
    a message             outer.alpha, and the data of the busiest link: start to end   latency, link
    the busiest machine   the work of all its ranks, divided by the number of cores     latency, processor

For equal ranks, all on one host, only the rank counts (:class:`Cost`): ``alpha`` for each message (all transfers
between one pair of ranks are one message), ``beta`` for each byte sent or received, ``gamma`` for each byte reduced.

The data may be cut into *segments* that follow each other through the steps, so that one is on the link while the next
one is being reduced:

    3 steps, 2 segments      tick 0    tick 1    tick 2    tick 3
    segment 0                step 0    step 1    step 2
    segment 1                          step 0    step 1    step 2

A tick takes as long as its slowest resource. In a tick a rank, link or machine does the work of the steps of all
segments, but never more than the busiest one has in all steps together; and no tick is shorter than one message. A rank
that waits for a message from another host does not copy or reduce meanwhile, so the steps within hosts overlap with
one segment less: their time for one segment is added to the sum of the ticks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .cost_card import ceil_log2
from .load import COPIED, CROWDED, LINK, MACHINE, MESSAGES, OUTER, REDUCED, Hosts, Load, count, count_chunks
from .steps import ScheduleData
from .topology import Topology

__all__: list[str] = []

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_SEGMENTS = 64
_MOST_STEPS_CUT = 1 << 14  # a longer schedule is not cut: each segment adds its latency to each step
# The seconds that each segment adds to each step of a rank: the system calls and wake-ups that do not overlap with the
# transmission of data. The fewest overlap if the ranks outnumber the cores and the link is fast.
_SEGMENT_STEP, _SEGMENT_STEP_FEW_CORES, _SEGMENT_STEP_FEW_CORES_FAST_LINK = 10e-6, 50e-6, 120e-6
FAST_LINK = 1.5e-9  # seconds a byte, 5 Gbit/s; on a faster link the processors are the limit
_LEAST_SECONDS = 0.5e-3  # of a segment
NEVER_CUT = 2 * _LEAST_SECONDS  # data that takes no longer is not cut

# The terms of a price, in the order of the counts of ``Cost``: the parameters by which each count is multiplied.
TERMS = (("latency", ("alpha",)), ("bandwidth", ("nbytes", "beta")), ("reduction", ("nbytes", "gamma")))


@dataclass(frozen=True)
class Cost:
    """The critical path of a schedule: messages, and the fractions of the data that are moved and reduced."""

    messages: int
    moved: Fraction
    reduced: Fraction

    @property
    def counts(self) -> tuple[int | Fraction, ...]:
        """The count of each of ``TERMS``."""
        return self.messages, self.moved, self.reduced

    def seconds(self, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """The seconds for data of ``nbytes``; the parameters are the costs in the description of the module."""
        values = {"nbytes": nbytes, "alpha": alpha, "beta": beta, "gamma": gamma}
        seconds = 0.0
        for number, (_, names) in zip(self.counts, TERMS, strict=True):  # sum() has rounded otherwise since Python 3.12
            seconds += float(number) * math.prod(values[name] for name in names)
        return seconds


def cost_of(load: Load, share: Fraction = Fraction(1)) -> Cost:
    """The cost for equal ranks, from a load on one host whose data is counted in chunks of ``share``."""
    messages, moved, reduced = load.over_steps(load.rows[:, [MESSAGES, COPIED, REDUCED]].T).tolist()
    return Cost(int(messages), Fraction(moved) * share, Fraction(reduced) * share)


def price(schedule: ScheduleData) -> Cost:
    """The counts of the busiest rank of each step, added over the steps."""
    return cost_of(count_chunks(schedule, Hosts((schedule.size,))), schedule.share)


@dataclass(frozen=True)
class Seconds:
    """The seconds of a schedule by their kind: starts of messages, copies and additions, data on the link."""

    latency: float
    processor: float
    link: float

    @property
    def total(self) -> float:
        return self.latency + self.processor + self.link

    @property
    def most(self) -> str:
        """The kind of which there are most seconds: "latency", "processor" or "link"."""
        return max(("link", "latency", "processor"), key=lambda kind: getattr(self, kind))


_RANK, _MESSAGE, _MACHINE = range(3)  # the resources
_LATENCY, _PROCESSOR, _LINK = range(3)  # the kinds of time


def _spent(rows: Floats, nbytes: float, topology: Topology) -> Floats:
    """The seconds spent[resource, kind, row] of each row of a load, for data of ``nbytes``."""
    inner, outer = topology.inner, topology.outer
    spent = np.zeros((3, 3, len(rows)))
    spent[_RANK, _LATENCY] = (rows[:, MESSAGES] - rows[:, OUTER]) * inner.alpha + rows[:, OUTER] * outer.alpha
    spent[_RANK, _PROCESSOR] = nbytes * (rows[:, COPIED] * inner.beta + rows[:, REDUCED] * topology.gamma)
    spent[_MESSAGE, _LATENCY] = (rows[:, OUTER] > 0) * outer.alpha
    spent[_MESSAGE, _LINK] = nbytes * (rows[:, LINK] * outer.beta + rows[:, CROWDED] * topology.congestion)
    if topology.cores is not None:
        inner_messages, outer_messages, copied, reduced, crossing = rows[:, MACHINE].T / topology.cores
        core = topology.core
        spent[_MACHINE, _LATENCY] = inner_messages * inner.alpha + outer_messages * core.alpha
        spent[_MACHINE, _PROCESSOR] = nbytes * (copied * inner.beta + reduced * topology.gamma + crossing * core.beta)
    return spent


def step_seconds(load: Load, nbytes: float, topology: Topology) -> Floats:
    """The seconds of one step of each row of a load."""
    longest: Floats = _spent(load.rows, nbytes, topology).sum(axis=1).max(axis=0)
    return longest


def seconds_by_kind(load: Load, nbytes: float, topology: Topology, segments: int = 1) -> Seconds:
    """The seconds of :func:`load_seconds`, by their kind; of each step or tick the seconds of its slowest resource."""
    if segments > 1:
        return _seconds_by_kind_in_segments(load, nbytes, topology, segments)
    spent = _spent(load.rows, nbytes, topology)
    slowest = spent.sum(axis=1).argmax(axis=0)
    kinds = load.over_steps(spent[slowest, :, np.arange(len(slowest))].T)
    return Seconds(*kinds.tolist())


def _seconds_by_kind_in_segments(load: Load, nbytes: float, topology: Topology, segments: int) -> Seconds:
    # 1. The ticks of which each resource is the slowest. The start of a message is latency, the rest is for the link.
    ticks = _ticks(load, nbytes, topology, segments)
    slowest = ticks.argmax(axis=0)
    rank, link, machine, message = (float(times[slowest == which].sum()) for which, times in enumerate(ticks))
    latency = np.count_nonzero(slowest == len(ticks) - 1) * topology.outer.alpha
    kinds = np.array([latency, _seconds_within_hosts(load, nbytes / segments, topology), link + message - latency])
    # 2. The time of ranks and machines has the proportions of the busiest rank and machine in all steps together.
    of_busiest = _spent(load.busiest[None], nbytes / segments, topology)[:, :, 0]
    for seconds, proportions in ((rank, of_busiest[_RANK]), (machine, of_busiest[_MACHINE])):
        if seconds > 0:
            kinds += seconds * proportions / proportions.sum()
    return Seconds(*kinds.tolist())


def _ticks(load: Load, nbytes: float, topology: Topology, segments: int) -> Floats:
    """The seconds[row, tick] of a pipeline of segments: of the rank, the link, the machine, and one message."""
    # 1. The seconds of one segment in each step; a link is busy for the data of a message only, not for its start.
    spent = np.repeat(_spent(load.rows, nbytes / segments, topology), load.times, axis=2)
    resources = spent.sum(axis=1)
    message = resources[_MESSAGE].copy()
    resources[_MESSAGE] = spent[_MESSAGE, _LINK]
    # 2. In tick t the segments are in the steps t-segments+1 to t: a difference of two sums over the steps before.
    steps = len(message)
    sums = np.zeros((3, steps + 1))
    resources.cumsum(axis=1, out=sums[:, 1:])
    tick = np.arange(steps + segments - 1 if steps else 0)
    work = sums[:, np.minimum(tick + 1, steps)] - sums[:, np.maximum(tick - segments + 1, 0)]
    # 3. No resource does more work than the busiest one has in all steps.
    most = _spent(load.busiest[None], nbytes / segments, topology)[:, :, 0]
    limits = np.array([most[_RANK].sum(), most[_MESSAGE, _LINK], most[_MACHINE].sum()])
    # 4. The longest message of the steps of a tick.
    padded = np.pad(message, segments - 1)
    longest = np.lib.stride_tricks.sliding_window_view(padded, segments).max(axis=1) if steps else message
    return np.concatenate([np.minimum(work, limits[:, None]), longest[None]])


def _seconds_within_hosts(load: Load, nbytes: float, topology: Topology) -> float:
    """The seconds of the steps without a message between hosts."""
    within = load.rows[:, OUTER] == 0
    return float(load.over_steps(step_seconds(load, nbytes, topology) * within))


def load_seconds(load: Load, nbytes: float, topology: Topology, segments: int = 1) -> float:
    """The seconds for data of ``nbytes`` in ``segments`` segments."""
    if segments == 1:
        return float(load.over_steps(step_seconds(load, nbytes, topology)))
    ticks = _ticks(load, nbytes, topology, segments)
    return float(ticks.max(axis=0).sum()) + _seconds_within_hosts(load, nbytes / segments, topology)


def least_seconds(load: Load, nbytes: float, topology: Topology) -> float:
    """A lower bound of :func:`load_seconds` for any number of segments.

    The larger of the time without any data, and the time that the busiest rank, link or machine works in all steps.
    """
    latency = float(load.over_steps(step_seconds(load, 0, topology)))
    work = _spent(load.busiest[None], nbytes, topology)
    return max(latency, float(work[_MESSAGE, _LINK, 0]), float(work[[_RANK, _MACHINE], :, 0].sum(axis=1).max()))


def seconds(schedule: ScheduleData, nbytes: float, topology: Topology, segments: int = 1) -> float:
    """Count the steps of a schedule, and return the seconds for data of ``nbytes``.

    Two hosts of two ranks and links of 1 GB/s: a link carries 64 MB in a hierarchical all-reduce, 96 MB in a ring.

    >>> from dist_prims.schedules import build
    >>> from dist_prims.schedules.topology import Level
    >>> cluster = Topology((2, 2), Level(0, 0), Level(0, 1e-9))
    >>> [seconds(build("all_reduce", name, 4), 64e6, cluster) for name in ("hierarchical", "ring")]
    [0.064, 0.096]
    """
    if segments < 1:
        raise ValueError(f"{schedule.collective} {schedule.algorithm}: segments={segments}; it must be at least 1")
    return load_seconds(count(schedule, Hosts.of(topology)), nbytes, topology, segments)


def best_segments(load: Load, nbytes: float, topology: Topology) -> int:
    """The number of segments with the shortest time for data of ``nbytes``: a power of two up to 64.

    The time is :func:`load_seconds`, and for each segment and each step of the busiest rank 10 µs more; if the ranks
    outnumber the cores 50 µs, or 120 µs if the link is faster than 5 Gbit/s. No segment takes less than 0.5 ms. The
    result is 1 for a schedule of more than 16,384 steps, and of one step, which cannot overlap with another.
    """
    if not 1 < load.steps <= _MOST_STEPS_CUT:
        return 1
    added = _segment_step(topology) * load.busy_steps  # by each segment
    uncut = load_seconds(load, nbytes, topology)
    best, shortest = 1, uncut + added
    segments = 2
    while segments <= MOST_SEGMENTS and segments * (_LEAST_SECONDS + added) < shortest:
        time = load_seconds(load, nbytes, topology, segments)
        if time >= segments * _LEAST_SECONDS and time + added * segments < shortest:
            best, shortest = segments, time + added * segments
        segments *= 2
    return best


def _segment_step(topology: Topology) -> float:
    """The seconds that each segment adds to each step of the busiest rank."""
    if not topology.lacks_cores:
        return _SEGMENT_STEP
    return _SEGMENT_STEP_FEW_CORES_FAST_LINK if topology.outer.beta <= FAST_LINK else _SEGMENT_STEP_FEW_CORES


def chunks_sent(schedule: ScheduleData) -> Ints:
    """The number of chunks that each rank sends to other ranks."""
    chunks = np.zeros(schedule.size, np.int64)
    for step in schedule.steps:
        chunks += np.bincount(step.src[step.src != step.dst], minlength=schedule.size)
    return chunks


def busiest_sender(schedule: ScheduleData) -> Fraction:
    """The bytes sent by the rank that sends most, as a fraction of the data."""
    return int(chunks_sent(schedule).max()) * schedule.share


def lower_bound(collective: str, size: int) -> Cost:
    """The lower bound of the cost of any algorithm of a collective, for equal ranks.

    - Messages: the number of ranks that have the information of one rank at most doubles in a step.
    - Bytes: Chan et al. 2007 for the collectives of one buffer. In a gather, scatter or all_to_all, the bytes that one
      rank must receive or send. In a scan the last rank must receive as many bytes as the data has.
    - Additions: a scan makes ``size - 1`` different sums of the whole data (an exclusive scan ``size - 2``), each with
      an addition of its own, and the ranks can share these additions.
    """
    rest = Fraction(size - 1, size)  # the data without one rank's share
    one = Fraction(min(size - 1, 1))  # the whole data, unless there is one rank
    moved, reduced = {
        "all_reduce": (2 * rest, rest),
        "reduce_scatter": (rest, rest),
        "all_gather": (rest, Fraction(0)),
        "broadcast": (one, Fraction(0)),
        "reduce": (one, rest),
        "gather": (rest, Fraction(0)),
        "scatter": (rest, Fraction(0)),
        "all_to_all": (rest, Fraction(0)),
        "barrier": (Fraction(0), Fraction(0)),
        "scan": (one, rest),
        "exclusive_scan": (one, Fraction(max(size - 2, 0), size)),
    }[collective]
    return Cost(ceil_log2(size), moved, reduced)
