"""Hosts and groups of ranks, shared by the hierarchical algorithms: one small schedule, run by many groups at once.

A phase of a hierarchical algorithm is a collective within every host, or between the ranks that have the same share on
their hosts. Each phase is the schedule of a registered algorithm for a few ranks, spread over all groups:

    hosts of 2 ranks      within hosts     groups 0-1, 2-3, 4-5         the schedule for 2 ranks, three times
                          between hosts    groups 0-2-4, 1-3-5          the schedule for 3 ranks, twice

Hosts with different numbers of ranks (``unit_groups``): the data is cut into so many units that the ranks of every host
can share them evenly, and unit u of a host of m ranks belongs to its rank u * m // units.
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
from ..load import Hosts, Load
from ..moves import side_by_side
from ..registry import load_by_card, lookup
from ..schedule_builder import build_shared
from ..steps import CountedStep, Phase, ScheduleData, Step, WideStep

__all__: list[str] = []

Ints = NDArray[np.int64]
HostSizes = Sequence[int] | None

MULTI_LANE = "Traeff and Hunold, Decomposing MPI Collectives for Exploiting Multi-lane Communication, 2020"


def default_ranks_a_host(size: int) -> int:
    """The default number of ranks a host: the largest divisor of ``size`` up to its square root."""
    return max(m for m in range(1, math.isqrt(size) + 1) if size % m == 0)


def host_sizes(size: int, hosts: HostSizes) -> tuple[int, ...]:
    """The number of ranks of each host."""
    if hosts is None:
        each = default_ranks_a_host(size)
        return (each,) * (size // each)
    given = tuple(hosts) if isinstance(hosts, Sequence) else (hosts,)
    if {*map(type, given)} != {int} or min(given) < 1 or sum(given) != size:
        raise ValueError(f"hierarchical: hosts={given} must be the number of ranks of each host (>= 1), {size} in all")
    return given


def equal_hosts(size: int, hosts: HostSizes) -> tuple[int, int]:
    """The number of hosts, and the ranks of each."""
    shape = host_sizes(size, hosts)
    if len(set(shape)) > 1:
        raise ValueError(
            f"hierarchical: hosts={shape} must have equally many ranks each for this collective; name a flat "
            "algorithm, or give other hosts="
        )
    return len(shape), shape[0]


def flat_schedule(parameter: str, collective: str, name: str, size: int, root: int = 0) -> ScheduleData:
    """The small schedule of one phase, whose algorithm the parameter ("inner" or "outer") names.

    Only all_to_all has chunk numbers for phases that need scratch.
    """
    if name == "hierarchical" or (collective != "all_to_all" and lookup(collective, name).scratch is not None):
        raise ValueError(f"hierarchical: {parameter}={name!r} cannot be nested; use a flat algorithm of {collective}")
    return build_shared(collective, name, size, **({"root": root} if collective in ROOTED else {}))


def chunks_of_blocks(collective: str) -> Callable[..., int]:
    """One chunk for each rank; the function checks the parameters when the schedule is built."""

    def chunks(size: int, inner: str, outer: str, hosts: HostSizes) -> int:
        number, each = equal_hosts(size, hosts)
        flat_schedule("inner", collective, inner, each), flat_schedule("outer", collective, outer, number)
        return size

    return chunks


def chunks_of_units(kinds: tuple[str, ...], collective: str) -> Callable[..., int]:
    """The number of chunks of an algorithm over units: ``kinds`` within the hosts, ``collective`` between them."""

    def chunks(size: int, inner: str, outer: str, hosts: HostSizes) -> int:
        shape = host_sizes(size, hosts)
        within = [flat_schedule("inner", kind, inner, m).chunks for kind in kinds for m in set(shape)]
        return math.lcm(math.lcm(*shape) * flat_schedule("outer", collective, outer, len(shape)).chunks, *within)

    return chunks


def load_within_hosts(kind: str, inner: str, hosts: Hosts, every: bool = True) -> Load:
    """The load of a collective within every host, or else within one of the largest."""
    sizes = Counter(hosts.ranks if every else (max(hosts.ranks),))
    loads = [load_by_card(lookup(kind, inner), Hosts((ranks,), has_cores=hosts.has_cores)) for ranks in sizes]
    return side_by_side(loads, [*sizes.values()] if hosts.one_machine else None)


def load_between_hosts(collective: str, outer: str, hosts: Hosts, rank: float, link: float) -> Load:
    """The load of a collective between hosts that all ranks of a host run side by side, each for a share of the data.

    ``rank``: the data of a rank, and ``link`` of a host, as multiples of the data. Hosts of different sizes: a rank of
    a small one has a message for each rank of a large one with which it shares units.
    """
    small = load_by_card(lookup(collective, outer), hosts.one_rank_each)
    pairs = [*itertools.product(set(hosts.ranks), repeat=2)]
    messages = max(-(-(place + 1) * b // a) - place * b // a for a, b in pairs for place in range(a))
    return small.scaled(rank, link, max(a + b - math.gcd(a, b) for a, b in pairs), messages)


class Groups:
    """Many groups of ranks that run the steps of one small schedule at the same time.

    ``ranks[g]``: the ranks of group g; ``first[g]``: its first chunk; ``width``: the number of chunks of the whole
    schedule that make up one chunk of the small schedule.
    """

    def __init__(self, ranks: Ints, first: Ints, width: int) -> None:
        self.ranks, self.first, self.width = ranks, first, width
        self._small: list[bytes] = []  # src, dst and reduce of the last step that was spread,
        self._wide: list[NDArray[Any]] = []  # and the same columns for all groups

    def spread(self, step: Step) -> Step:
        """The rows of all groups, each standing for ``width`` chunks.

        Consecutive steps of a ring differ in their chunks only. The other columns are then reused: for 100,000 ranks
        their computation would be most of the work.
        """
        messages, span = step.narrow
        src, dst, reduce = self._columns(messages)
        chunk = self._chunks(messages.chunk)
        into = chunk if messages.into is messages.chunk else self._chunks(messages.into)
        spread = Step(src, dst, chunk, reduce, into)
        if span is None:
            return spread
        return CountedStep(spread, np.tile(span, len(self.ranks)), lambda: self._all_rows(step))

    def _all_rows(self, step: Step) -> Step:
        return self.spread(Step(step.src, step.dst, step.chunk, step.reduce, step.into))

    def _columns(self, step: Step) -> list[NDArray[Any]]:
        small = [column.tobytes() for column in (step.src, step.dst, step.reduce)]
        if small != self._small:
            self._small = small
            src, dst = self.ranks[:, step.src].ravel(), self.ranks[:, step.dst].ravel()
            self._wide = [src, dst, np.tile(step.reduce, len(self.ranks))]
        return self._wide

    def _chunks(self, column: Ints) -> Ints:
        return (self.first[:, None] + column * self.width).ravel()


def unit_groups(hosts: tuple[int, ...], chunks: int, schedule: ScheduleData) -> Groups:
    """One group for each unit: its owners on all hosts."""
    units = math.lcm(*hosts)
    unit, begins = np.arange(units), np.cumsum((0, *hosts[:-1]))
    owners = begins[None, :] + unit[:, None] * np.array(hosts)[None, :] // units  # owners[unit, host]: a rank
    return Groups(owners, unit * (chunks // units), chunks // units // schedule.chunks)


def units_between_hosts(schedule: ScheduleData, hosts: tuple[int, ...], chunks: int) -> Phase:
    """One collective over hosts for every unit, all at once."""
    width = chunks // math.lcm(*hosts) // schedule.chunks
    return Phase(_steps_of_units_between_hosts, (schedule, hosts), width)


def _steps_of_units_between_hosts(schedule: ScheduleData, hosts: tuple[int, ...]) -> Iterator[Step]:
    groups = unit_groups(hosts, math.lcm(*hosts) * schedule.chunks, schedule)
    yield from map(groups.spread, schedule.steps)


def units_within_hosts(kind: str, inner: str, hosts: tuple[int, ...], chunks: int, without: int | None = None) -> Phase:
    """One collective within every host, all hosts at once; hosts of equal size are groups of one schedule.

    ``without``: a rank to which no messages are sent.
    """
    schedules = tuple(build_shared(kind, inner, m) for m in sorted(set(hosts)))
    return Phase(
        _steps_of_units_within_hosts,
        (schedules, hosts, without),
        chunks // math.lcm(*(each.chunks for each in schedules)),
    )


def _steps_of_units_within_hosts(
    schedules: tuple[ScheduleData, ...], hosts: tuple[int, ...], without: int | None
) -> Iterator[Step]:
    begins, sizes = np.cumsum((0, *hosts[:-1])), np.array(hosts)
    chunks = math.lcm(*(each.chunks for each in schedules))
    groups = []
    for schedule in schedules:
        first_ranks = begins[sizes == schedule.size]
        ranks, first = first_ranks[:, None] + np.arange(schedule.size), np.zeros_like(first_ranks)
        groups.append(Groups(ranks, first, chunks // schedule.chunks))
    for steps in itertools.zip_longest(*(schedule.steps for schedule in schedules)):
        wide = [
            (group.spread(step), group.width) for group, step in zip(groups, steps, strict=True) if step is not None
        ]
        spans = np.repeat([width for _, width in wide], [len(step) for step, _ in wide])
        found = WideStep(Step.concat([step for step, _ in wide]), spans)
        yield found if without is None else _without(without, found)


def _without(rank: int, step: Step) -> Step:
    """The step without the messages to a rank."""
    messages, span = step.narrow
    keep = messages.dst != rank
    counted = np.ones(len(messages), np.int64) if span is None else span
    return CountedStep(messages.take(keep), counted[keep], lambda: step.take(step.dst != rank))


def blocks_between_hosts(schedule: ScheduleData, each: int) -> Phase:
    """One collective over hosts for every place on a host, all at once, on the blocks of the ranks at that place."""
    return Phase(_steps_of_blocks_between_hosts, (schedule, each))


def _steps_of_blocks_between_hosts(schedule: ScheduleData, each: int) -> Iterator[Step]:
    place, host = np.arange(each), np.arange(schedule.size)
    groups = Groups(host[None, :] * each + place[:, None], place, each)
    yield from map(groups.spread, schedule.steps)


def blocks_within_hosts(schedule: ScheduleData, hosts: range, number: int) -> Phase:
    """One collective within each of ``hosts``, on the blocks of every one of the ``number`` hosts, all at once."""
    return Phase(_steps_of_blocks_within_hosts, (schedule, hosts, number))


def _steps_of_blocks_within_hosts(schedule: ScheduleData, hosts: range, number: int) -> Iterator[Step]:
    each = schedule.size
    host, of = (axis.ravel() for axis in np.meshgrid(np.asarray(hosts), np.arange(number), indexing="ij"))
    groups = Groups(host[:, None] * each + np.arange(each), of * each, 1)
    ranks = np.asarray(hosts)[:, None] * each + np.arange(each)
    once = Groups(ranks, np.zeros(len(ranks), np.int64), 1)  # the same messages for the blocks of one host
    for step in schedule.steps:
        messages, span = once.spread(step).narrow
        yield CountedStep(messages, number if span is None else span * number, functools.partial(groups.spread, step))
