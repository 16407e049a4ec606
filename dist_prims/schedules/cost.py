"""The cost model: the price of a schedule for equal ranks, and its seconds on a topology, with or without segments.

Equal ranks (``price``): each rank has one port and sends and receives at the same time. A step takes as long as its
busiest rank: ``alpha`` for each message (all transfers between one pair of ranks are one message), ``beta`` for each
byte sent or received, ``gamma`` for each byte reduced. One pass over the steps computes the price and holds one step at
a time, so a ring of 12,500 hosts is priced in seconds without being stored.

On a topology (``seconds``): a step takes as long as its busiest rank, link or machine. The data may be cut into
*segments* that follow each other through the steps, so that one is on the link while the next one is being reduced:

    3 steps, 2 segments      tick 0    tick 1    tick 2    tick 3
    segment 0                step 0    step 1    step 2
    segment 1                          step 0    step 1    step 2

A tick takes as long as its busiest resource, which does the work of both segments, each with half of the bytes, and at
least as long as one message between hosts from start to end. A rank that waits for a message from another host does not
copy or reduce, so the steps within hosts overlap one segment less: their time for one segment is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cost_card import ceil_log2
from .replay import Loads, patterns, replay
from .schedule import Schedule, Step
from .topology import COLUMNS, LATENCY, Topology

__all__: list[str] = []

Floats = NDArray[np.float64]
MOST_SEGMENTS = 64
# The seconds that each segment adds to each step of a rank: system calls and wake-ups not overlapped with the link.
# Fewer of them overlap if the ranks outnumber the cores, and fewest if the link is fast as well.
_SEGMENT_STEP, _SEGMENT_STEP_FEW_CORES, _SEGMENT_STEP_FEW_CORES_FAST_LINK = 10e-6, 50e-6, 120e-6
FAST_LINK = 1.5e-9  # seconds a byte, 5 Gbit/s; processors limit a link that needs less
_LEAST_SECONDS = 0.5e-3  # of a segment
_MESSAGES = LATENCY[:2]  # the columns of the messages of a rank


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
        given = {"nbytes": nbytes, "alpha": alpha, "beta": beta, "gamma": gamma}
        terms = zip(self.counts, TERMS, strict=True)
        return sum(float(count) * math.prod(given[name] for name in names) for count, (_, names) in terms)


def price(schedule: Schedule) -> Cost:
    """The counts of the busiest rank of each step, added over the steps."""
    counted: dict[int, tuple[int, int, int]] = {}
    messages = moved = reduced = 0
    for number, step in patterns(iter(schedule.steps)):
        if number not in counted:
            counted[number] = _busiest_ranks(step, schedule.size)
        messages, moved, reduced = (sum(each) for each in zip((messages, moved, reduced), counted[number], strict=True))
    return Cost(messages, moved * schedule.share, reduced * schedule.share)


def parts(schedule: Schedule, nbytes: ArrayLike, topology: Topology, segments: int = 1) -> Floats:
    """Seconds for each of ``nbytes``, split by the columns of ``topology``: shape (…, 11), busiest resource a tick."""
    loads = _loads(schedule, topology, segments)
    sizes = np.asarray(nbytes, np.float64)
    share = float(schedule.share) / segments
    every = [_busiest(loads, topology.weights(share * each), segments) for each in sizes.ravel().tolist()]
    return np.reshape(every, (*sizes.shape, loads.rows.shape[-1]))


def _loads(schedule: Schedule, topology: Topology, segments: int) -> Loads:
    loads = replay(schedule, topology)
    if segments < 1 or (segments > 1 and not loads.followed):
        why = "it must be at least 1" if segments < 1 else "the schedule is too large for segments; use segments=1"
        raise ValueError(f"{schedule.collective} {schedule.algorithm}: segments={segments}; {why}")
    return loads


def _busiest(loads: Loads, weights: Floats, segments: int) -> Floats:
    """The seconds of the busiest class of each tick, added over the ticks."""
    seconds = _each(loads, weights)
    often = np.zeros(len(loads.rows), np.int64)  # the number of segments and steps that have each row of counts
    if segments == 1:
        most = seconds.argmax(axis=1)
        np.add.at(often, loads.which[np.arange(len(most)), most], loads.repeats)
    else:
        most = _windows(_sums(seconds, loads), _messages(seconds, loads), segments, loads.message).argmax(axis=1)
        steps = len(loads.pattern)
        for segment in range(segments if steps else 0):  # its step is 0 in tick `segment`
            busiest = most[segment : segment + steps]
            rows = loads.which[loads.pattern, busiest][busiest != loads.message]
            often += np.bincount(rows, minlength=len(often))
        _, longest = _longest(_messages(seconds, loads), segments)
        rows = loads.which[loads.pattern[longest[most == loads.message]], loads.message]
        often += np.bincount(rows, minlength=len(often))
        inside = _inside_hosts(loads)
        np.add.at(often, loads.which[inside, seconds[inside].argmax(axis=1)], loads.repeats[inside])
    spent: Floats = (often @ loads.rows) * weights
    return spent


def _inside_hosts(loads: Loads) -> NDArray[np.int64]:
    """The patterns without a message between hosts."""
    return np.flatnonzero(~loads.rows[loads.which[:, loads.message]].any(axis=1))


def _each(loads: Loads, weights: Floats) -> Floats:
    """The seconds of each class in each pattern."""
    seconds: Floats = (loads.rows @ weights)[loads.which]
    return seconds


def _sums(each: Floats, loads: Loads) -> Floats:
    """The seconds of each class in the steps before each step, and in all steps."""
    sums = np.zeros((len(loads.pattern) + 1, each.shape[1]))
    each[loads.pattern].cumsum(axis=0, out=sums[1:])
    return sums


def _messages(each: Floats, loads: Loads) -> Floats:
    """The seconds of a message between hosts in each step."""
    messages: Floats = each[loads.pattern, loads.message]
    return messages


def _windows(sums: Floats, messages: Floats, segments: int, message: int) -> Floats:
    """The seconds of each class in each tick of a pipeline of segments.

    In tick t segment s is at its step t - s, so a tick does the work of up to ``segments`` consecutive steps. Their
    messages between hosts, the class ``message``, take their time side by side.
    """
    steps = len(messages)
    tick = np.arange(steps + segments - 1 if steps else 0)
    windows: Floats = sums[np.minimum(tick + 1, steps)] - sums[np.maximum(tick - segments + 1, 0)]
    windows[:, message] = _longest(messages, segments)[0]
    return windows


def _longest(messages: Floats, segments: int) -> tuple[Floats, NDArray[np.int64]]:
    """For each tick the seconds of the longest message of the steps in it, and its step."""
    if not len(messages):
        return messages, np.zeros(0, np.int64)
    around = np.pad(messages, segments - 1, constant_values=-1.0)
    found = np.lib.stride_tricks.sliding_window_view(around, segments).argmax(axis=1)
    steps = np.arange(len(found)) + found - (segments - 1)
    return messages[steps], steps


def seconds(schedule: Schedule, nbytes: ArrayLike, topology: Topology, segments: int = 1) -> Floats:
    """Seconds for data of ``nbytes``, a number or an array; the result has the same shape.

    Two hosts of two ranks and links of 1 GB/s: a link carries 64 MB in a hierarchical all-reduce, 96 MB in a ring.

    >>> from dist_prims.schedules import build
    >>> from dist_prims.schedules.topology import Level
    >>> cluster = Topology((2, 2), Level(0, 0), Level(0, 1e-9))
    >>> [float(seconds(build("all_reduce", name, 4), 64e6, cluster)) for name in ("hierarchical", "ring")]
    [0.064, 0.096]
    """
    found: Floats = parts(schedule, nbytes, topology, segments).sum(axis=-1)
    return found


def best_segments(schedule: Schedule, nbytes: ArrayLike, topology: Topology) -> NDArray[np.int64]:
    """The number of segments for each of ``nbytes``: a power of two up to 64.

    It is that of the shortest time, to which each segment adds 10 µs for each step of the busiest rank; if the ranks
    outnumber the cores, 50 µs, or 120 µs if the link is faster than 5 Gbit/s. No segment takes less than 0.5 ms. The
    result is 1 for a schedule that is too large to follow rank by rank.
    """
    loads: Loads = replay(schedule, topology)
    choices = np.array([1 << power for power in range(MOST_SEGMENTS.bit_length() if loads.followed else 1)])
    sizes = np.asarray(nbytes, np.float64)
    every = [_seconds_by_segments(loads, topology, float(schedule.share) * each, choices) for each in sizes.ravel()]
    times = np.reshape(every, (-1, len(choices)))
    is_short = (choices > 1) & (times / choices < _LEAST_SECONDS)
    times = np.where(is_short, np.inf, times + _segment_step(topology) * _steps_of_busiest_rank(loads) * choices)
    best = times.argmin(axis=1)
    return np.asarray(choices[best].reshape(sizes.shape))


def _segment_step(topology: Topology) -> float:
    """The seconds that each segment adds to each step of the busiest rank."""
    if not topology.lacks_cores:
        return _SEGMENT_STEP
    return _SEGMENT_STEP_FEW_CORES_FAST_LINK if topology.outer.beta <= FAST_LINK else _SEGMENT_STEP_FEW_CORES


def _steps_of_busiest_rank(loads: Loads) -> int:
    """The most steps in which one rank sends, or in which it receives."""
    has_messages = (loads.rows[:, _MESSAGES].sum(axis=1) > 0)[loads.which]  # by pattern and class
    has_messages[:, loads.message] = False  # this class is no rank
    return int((loads.repeats @ has_messages).max())


def _seconds_by_segments(loads: Loads, topology: Topology, chunk: float, choices: NDArray[np.int64]) -> list[float]:
    """The seconds for chunks of ``chunk`` bytes for each number of segments, without the split by columns.

    A segment of a message has the latency of the message, and its share of the bytes.
    """
    latency, weights = np.zeros(COLUMNS), topology.weights(chunk)
    latency[LATENCY] = weights[LATENCY]
    each, each_latency = _each(loads, weights - latency), _each(loads, latency)
    found = [float((each + each_latency).max(axis=1) @ loads.repeats)]
    if len(choices) > 1:
        sums, sums_latency = _sums(each, loads), _sums(each_latency, loads)
        messages, messages_latency = _messages(each, loads), _messages(each_latency, loads)
        inside = _inside_hosts(loads)
        for n in choices[1:].tolist():
            windows = _windows(sums / n + sums_latency, messages / n + messages_latency, n, loads.message)
            last = (each / n + each_latency)[inside].max(axis=1) @ loads.repeats[inside]
            found.append(float(windows.max(axis=1).sum() + last))
    return found


def busiest_sender(schedule: Schedule) -> Fraction:
    """The bytes sent by the rank that sends most, as a fraction of the data."""
    rows = np.zeros(schedule.size, np.int64)
    for step in schedule.steps:
        rows += np.bincount(step.src[step.src != step.dst], minlength=schedule.size)
    return int(rows.max()) * schedule.share


def _busiest_ranks(step: Step, size: int) -> tuple[int, int, int]:
    """(messages, chunks moved, chunks reduced): of each the largest number on any rank."""
    rows, span = step.narrow
    chunks = np.ones(len(rows), np.int64) if span is None else span
    if len(rows) and not 0 <= min(rows.src.min(), rows.dst.min()) <= max(rows.src.max(), rows.dst.max()) < size:
        raise ValueError(f"a step names a rank that does not exist, so it has no price; ranks are 0..{size - 1}")
    far = rows.src != rows.dst
    pairs = np.unique(rows.src[far] * size + rows.dst[far])
    one = np.ones(len(pairs), np.int64)
    messages = max(_most(pairs // size, one), _most(pairs % size, one))
    moved = max(_most(rows.src[far], chunks[far]), _most(rows.dst[far], chunks[far]))
    return messages, moved, _most(rows.dst[rows.reduce], chunks[rows.reduce])


def _most(ranks: NDArray[np.int64], chunks: NDArray[np.int64]) -> int:
    return int(np.bincount(ranks, chunks).max()) if len(ranks) else 0


def lower_bound(collective: str, size: int) -> Cost:
    """The lower bound of the cost of any algorithm: information must reach every rank, and every byte pass its port.

    Messages: the number of ranks that have the information at most doubles in a step. Bytes: Chan et al. 2007 for the
    collectives of one buffer; for gather, scatter and all_to_all the bytes that must cross one port. A scan makes
    ``size - 1`` different sums of the whole data (an exclusive scan ``size - 2``), each with an addition of its own,
    and the ranks can share these additions; the last rank must receive as many bytes as the data has.
    """
    rest = Fraction(size - 1, size)
    one = Fraction(min(size - 1, 1))
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
