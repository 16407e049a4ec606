"""Phases of the hierarchical algorithms: one small schedule, run by many groups of ranks at the same time.

A phase of a hierarchical algorithm is a collective within every host, or a collective between the ranks that have the
same share of the data on their hosts. Each phase runs a *small schedule*: the schedule of a flat (not hierarchical)
algorithm for as many ranks as a group has, repeated for every group:

    hosts of 2 ranks      within hosts     groups 0-1, 2-3, 4-5         the schedule for 2 ranks, three times
                          between hosts    groups 0-2-4, 1-3-5          the schedule for 3 ranks, twice

The groups divide the data in one of two ways:

- *Blocks*, for hosts with equally many ranks: each rank has a block. The *place* of a rank is its number on its host.
- *Units*, for any hosts: the data is cut into as many equal units as the least common multiple of the numbers of ranks
  of the hosts, so that the ranks of every host can share them evenly. Unit u belongs to rank u * m // units of each
  host, where m is the number of ranks of the host.

The parameter ``inner`` of an algorithm names the flat algorithm within hosts, ``outer`` the one between hosts.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import ROOTED
from ..cost_card import default_ranks_a_host
from ..load import Hosts, Load, side_by_side
from ..registry import load_by_card, lookup
from ..schedule_builder import build_shared
from ..steps import CountedStep, Phase, ScheduleData, Step, WideStep

__all__: list[str] = []

Ints = NDArray[np.int64]
HostSizes = Sequence[int] | None

MULTI_LANE = "Traeff and Hunold, Decomposing MPI Collectives for Exploiting Multi-lane Communication, 2020"


def host_sizes(size: int, hosts: HostSizes) -> tuple[int, ...]:
    """The number of ranks of each host: the parameter ``hosts``, checked, or the default if it is None."""
    if hosts is None:
        ranks = default_ranks_a_host(size)
        return (ranks,) * (size // ranks)
    shape = tuple(hosts) if isinstance(hosts, Sequence) else (hosts,)
    if {*map(type, shape)} != {int} or min(shape) < 1 or sum(shape) != size:
        raise ValueError(f"hierarchical: hosts={shape} must be the number of ranks of each host (>= 1), {size} in all")
    return shape


def equal_hosts(size: int, hosts: HostSizes) -> tuple[int, int]:
    """(number of hosts, ranks of each host); ValueError if hosts differ in their numbers of ranks."""
    shape = host_sizes(size, hosts)
    if len(set(shape)) > 1:
        raise ValueError(
            f"hierarchical: hosts={shape} must have equally many ranks each for this collective; name a flat "
            "algorithm, or give other hosts="
        )
    return len(shape), shape[0]


def flat_schedule(parameter: str, collective: str, name: str, size: int, root: int = 0) -> ScheduleData:
    """The small schedule of a phase by the algorithm ``name``, the value of ``parameter`` ("inner" or "outer").

    An algorithm that needs scratch is refused, except for all_to_all: the other hierarchical algorithms have no chunk
    numbers for scratch.
    """
    if name == "hierarchical" or (collective != "all_to_all" and lookup(collective, name).scratch is not None):
        raise ValueError(f"hierarchical: {parameter}={name!r} cannot be nested; use a flat algorithm of {collective}")
    return build_shared(collective, name, size, **({"root": root} if collective in ROOTED else {}))


def chunks_of_blocks(collective: str) -> Callable[..., int]:
    """For ``@algorithm(chunks=...)`` of an algorithm over blocks: one chunk a rank, after a check of the parameters."""

    def chunks(size: int, inner: str, outer: str, hosts: HostSizes) -> int:
        num_hosts, ranks = equal_hosts(size, hosts)
        flat_schedule("inner", collective, inner, ranks)  # both calls raise ValueError for a wrong name
        flat_schedule("outer", collective, outer, num_hosts)
        return size

    return chunks


def chunks_of_units(kinds: tuple[str, ...], collective: str) -> Callable[..., int]:
    """For ``@algorithm(chunks=...)`` of an algorithm over units: the fewest chunks that suit each of its phases.

    ``kinds``: the collectives within the hosts; ``collective``: the one between hosts.
    """

    def chunks(size: int, inner: str, outer: str, hosts: HostSizes) -> int:
        shape = host_sizes(size, hosts)
        within = [flat_schedule("inner", kind, inner, ranks).chunks for kind in kinds for ranks in set(shape)]
        return math.lcm(math.lcm(*shape) * flat_schedule("outer", collective, outer, len(shape)).chunks, *within)

    return chunks


def load_within_hosts(kind: str, inner: str, hosts: Hosts, every: bool = True) -> Load:
    """The load of the collective ``kind`` within every host or, unless ``every``, within one of the largest hosts."""
    sizes = Counter(hosts.ranks if every else (max(hosts.ranks),))
    loads = [load_by_card(lookup(kind, inner), Hosts((ranks,), has_cores=hosts.has_cores)) for ranks in sizes]
    return side_by_side(loads, [*sizes.values()] if hosts.one_machine else None)


def load_between_hosts(collective: str, outer: str, hosts: Hosts, rank: float, link: float) -> Load:
    """The load of a collective between hosts that all ranks of a host run side by side, each for its share of the data.

    ``rank``: the data of a rank, and ``link``: the data of a host, both as multiples of the data of the collective.
    """
    small = load_by_card(lookup(collective, outer), hosts.one_rank_each)
    # Between hosts of a and b ranks, a rank has a message for each rank of the other host with which it shares units;
    # a + b - gcd(a, b) is the number of messages from all ranks of the one host to the other host.
    pairs = [*itertools.product(set(hosts.ranks), repeat=2)]
    messages = max(-(-(place + 1) * b // a) - place * b // a for a, b in pairs for place in range(a))
    machine = max(a + b - math.gcd(a, b) for a, b in pairs)
    return small.scaled(rank=rank, link=link, machine=machine, messages=messages)


class Groups:
    """Many groups of ranks that run the steps of one small schedule at the same time.

    ``ranks[g]``: the ranks of group g; ``first[g]``: its first chunk, in the numbers of the whole schedule; ``stride``:
    the distance there between two successive chunks of the small schedule.
    """

    def __init__(self, ranks: Ints, first: Ints, stride: int) -> None:
        self.ranks, self.first, self.stride = ranks, first, stride
        self._small_columns: list[bytes] = []  # src, dst and reduce of the previous step, in the small schedule
        self._all_columns: list[NDArray[Any]] = []  # the same columns for all groups

    def spread(self, step: Step) -> Step:
        """The rows of a step of the small schedule for all groups.

        A CountedStep has one row for each message, and the number of its chunks. This suffices for prices. Its chunks
        get a row each only on demand.
        """
        messages, span = step.narrow
        src, dst, reduce = self._columns(messages)
        chunk = self._chunks(messages.chunk)
        into = chunk if messages.into is messages.chunk else self._chunks(messages.into)
        spread = Step(src, dst, chunk, reduce, into)
        if span is None:
            return spread
        return CountedStep(spread, np.tile(span, len(self.ranks)), lambda: self.spread(step.take(slice(None))))

    def _columns(self, step: Step) -> list[NDArray[Any]]:
        """src, dst and reduce for all groups. Consecutive steps of a ring, for example, differ in their chunks only.

        The columns are then reused: for 100,000 ranks their computation would be most of the work.
        """
        small_columns = [column.tobytes() for column in (step.src, step.dst, step.reduce)]
        if small_columns != self._small_columns:
            self._small_columns = small_columns
            src, dst = self.ranks[:, step.src].ravel(), self.ranks[:, step.dst].ravel()
            self._all_columns = [src, dst, np.tile(step.reduce, len(self.ranks))]
        return self._all_columns

    def _chunks(self, column: Ints) -> Ints:
        return (self.first[:, None] + column * self.stride).ravel()


def units_between_hosts(schedule: ScheduleData, hosts: tuple[int, ...], chunks: int) -> Phase:
    """The phase between hosts: for every unit a group of its owners, one on each host.

    ``schedule``: the small schedule, with one rank for each host. ``chunks``: of the whole schedule.
    """
    return Phase(_between_hosts_by_units, (schedule, hosts), chunks // math.lcm(*hosts) // schedule.chunks)


def _between_hosts_by_units(schedule: ScheduleData, hosts: tuple[int, ...]) -> Iterator[Step]:
    unit, first_ranks = np.arange(math.lcm(*hosts)), np.cumsum((0, *hosts[:-1]))
    owners = first_ranks + unit[:, None] * np.array(hosts) // len(unit)  # owners[unit, host]: a rank
    yield from map(Groups(owners, unit * schedule.chunks, 1).spread, schedule.steps)


def units_within_hosts(kind: str, inner: str, hosts: tuple[int, ...], chunks: int, without: int | None = None) -> Phase:
    """The phase within hosts: the collective ``kind`` within every host, over all chunks.

    ``chunks``: of the whole schedule. ``without``: a rank that receives no messages, because it has the data already.
    """
    schedules = tuple(build_shared(kind, inner, ranks) for ranks in sorted(set(hosts)))
    width = chunks // math.lcm(*(schedule.chunks for schedule in schedules))
    return Phase(_within_hosts_by_units, (schedules, hosts, without), width)


def _within_hosts_by_units(
    schedules: tuple[ScheduleData, ...], hosts: tuple[int, ...], without: int | None
) -> Iterator[Step]:
    # 1. Hosts with equally many ranks are the groups of one small schedule.
    first_rank, sizes = np.cumsum((0, *hosts[:-1])), np.array(hosts)
    chunks = math.lcm(*(schedule.chunks for schedule in schedules))
    groups = []
    for schedule in schedules:
        first_ranks = first_rank[sizes == schedule.size]
        ranks, first_chunks = first_ranks[:, None] + np.arange(schedule.size), np.zeros_like(first_ranks)
        groups.append(Groups(ranks, first_chunks, chunks // schedule.chunks))
    # 2. Step i of each small schedule is a part of step i of the phase; a shorter schedule ends sooner.
    for steps in itertools.zip_longest(*(schedule.steps for schedule in schedules)):
        active = [(group, step) for group, step in zip(groups, steps, strict=True) if step is not None]
        parts = [group.spread(step) for group, step in active]
        # A chunk of the small schedule is all chunks up to the next one.
        widths = np.repeat([group.stride for group, _ in active], [len(part) for part in parts])
        step = WideStep(Step.concat(parts), widths)
        yield step if without is None else _without_messages_to(without, step)


def _without_messages_to(rank: int, step: Step) -> Step:
    messages, span = step.narrow
    keep = messages.dst != rank
    counted = np.ones(len(messages), np.int64) if span is None else span
    return CountedStep(messages.take(keep), counted[keep], lambda: step.take(step.dst != rank))


def blocks_between_hosts(schedule: ScheduleData, ranks: int) -> Phase:
    """The phase between hosts of ``ranks`` ranks each: a group for every place, over the blocks of its ranks."""
    return Phase(_between_hosts_by_blocks, (schedule, ranks))


def _between_hosts_by_blocks(schedule: ScheduleData, ranks: int) -> Iterator[Step]:
    place, host = np.arange(ranks), np.arange(schedule.size)
    groups = Groups(host * ranks + place[:, None], place, ranks)  # chunk c of place p: block c * ranks + p
    yield from map(groups.spread, schedule.steps)


def blocks_within_hosts(schedule: ScheduleData, hosts: range, num_hosts: int) -> Phase:
    """The phase within hosts: the small schedule in each of ``hosts``, for the blocks of all ``num_hosts`` hosts."""
    return Phase(_within_hosts_by_blocks, (schedule, hosts, num_hosts))


def _within_hosts_by_blocks(schedule: ScheduleData, hosts: range, num_hosts: int) -> Iterator[Step]:
    first_ranks, place = np.asarray(hosts) * schedule.size, np.arange(schedule.size)
    # A group for every pair of a host, whose ranks communicate, and a host that owns the blocks.
    host, owner = (axis.ravel() for axis in np.meshgrid(first_ranks, np.arange(num_hosts), indexing="ij"))
    groups = Groups(host[:, None] + place, owner * schedule.size, 1)
    # The messages of a host are the same for all owners, so they are counted for one group a host.
    hosts_once = Groups(first_ranks[:, None] + place, np.zeros(len(first_ranks), np.int64), 1)
    for step in schedule.steps:
        messages, span = hosts_once.spread(step).narrow
        counts = num_hosts if span is None else span * num_hosts
        yield CountedStep(messages, counts, functools.partial(groups.spread, step))
