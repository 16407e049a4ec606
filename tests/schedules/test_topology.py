"""Prices on hosts and links: by hand, against a plain count of every transfer, and at the sizes they are made for."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_prims.schedules import COLLECTIVES, Step, algorithm, algorithms, build, lookup, unregister
from dist_prims.schedules.algorithms.tree import _two_trees
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.cost import Cost, best_segments, least_seconds, seconds, seconds_by_kind
from dist_prims.schedules.load import LINK, OUTER, Hosts, StepCount, count, count_chunks
from dist_prims.schedules.recommend import bound, recommend
from dist_prims.schedules.schedule import Schedule
from dist_prims.schedules.topology import Level, Topology

REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
FREE = Level(0, 0)
GIGABYTE = Level(0, 1e-9)
LINKS: dict[str, Any] = {"inner": Level(2e-6, 1e-10), "outer": Level(30e-6, 7e-10), "gamma": 2e-10, "congestion": 3e-10}
HOSTS = [(1,), (4,), (1, 1), (1, 3), (2, 3), (2, 2, 2), (1, 1, 5), (3, 1, 2, 2), (1,) * 9]


def plain_row(steps: Sequence[Step], hosts: tuple[int, ...], one_machine: bool) -> list[float]:
    """The load of one step, or of several together, transfer by transfer."""
    host = [number for number, ranks in enumerate(hosts) for _ in range(ranks)]
    ranks, links, machines = ([Counter[Any]() for _ in range(11)] for _ in range(3))
    for step in steps:
        senders = [{host[row[0]] for row in step.rows() if host[row[1]] == to} - {to} for to in range(len(hosts))]
        met = set()
        for src, dst, _, _, reduce in step.rows():
            outer = host[src] != host[dst]
            message = src != dst and (src, dst) not in met
            met.add((src, dst))
            for way, who in (("out", src), ("in", dst)):
                machine = (way, 0 if one_machine else host[who])
                inner = not outer and src != dst
                counts = (message and not outer, message and outer, inner, reduce and way == "in", outer)
                ranks[0][way, who] += message
                for column, value in enumerate(counts[1:4], 1):
                    ranks[column][way, who] += value
                for column, value in enumerate(counts, 6):
                    machines[column][machine] += value
                links[4][way, host[who]] += outer
            links[5][host[dst]] += outer and len(senders[host[dst]]) > 1
    return [max(most.values(), default=0) for most in (*ranks[:4], *links[4:6], *machines[6:])]


def plain_seconds(schedule: Schedule, nbytes: float, topology: Topology, segments: int) -> float:
    """The rules of the cost model in plain words: each step or tick, each resource."""
    nbytes = nbytes * float(schedule.share) / segments
    core = topology.processor or Level(topology.outer.alpha, 0)
    inner, cores = topology.inner, topology.cores or math.inf

    def resources(row: list[float]) -> tuple[float, float, float, float]:
        messages, outer, copied, reduced, link, crowded, near, far, all_copied, all_reduced, crossing = row
        rank = (messages - outer) * inner.alpha + outer * topology.outer.alpha
        rank += nbytes * (copied * inner.beta + reduced * topology.gamma)
        wire = nbytes * (link * topology.outer.beta + crowded * topology.congestion)
        machine = near * inner.alpha + far * core.alpha
        machine += nbytes * (all_copied * inner.beta + all_reduced * topology.gamma + crossing * core.beta)
        return rank, wire, machine / cores, (topology.outer.alpha if outer else 0) + wire

    steps = [plain_row([step], topology.hosts, topology.one_machine) for step in schedule.steps]
    every = [resources(row) for row in steps]
    if segments == 1:
        return sum(map(max, every))
    limits = resources(plain_row([*schedule.steps], topology.hosts, topology.one_machine))[:3]
    total = sum(max(times) for row, times in zip(steps, every, strict=True) if not row[1])
    for last in range(len(steps) + segments - 1 if steps else 0):
        *sums, messages = zip(*every[max(0, last - segments + 1) : last + 1], strict=True)
        total += max(*(min(sum(times), limit) for times, limit in zip(sums, limits, strict=True)), *messages)
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Topology]:
    hosts = draw(st.sampled_from(HOSTS))
    collective, name = draw(st.sampled_from(REGISTRY))
    given: dict[str, Any] = {"root": draw(st.integers(0, sum(hosts) - 1))} if collective in ROOTED else {}
    if name == "hierarchical":
        within = {"all_reduce": "all_gather", "broadcast": "all_gather", "reduce": "reduce_scatter"}
        equal = collective in within or len(set(hosts)) == 1  # otherwise the default: hosts that divide the ranks
        outer, inner = (algorithms(kind) for kind in (collective, within.get(collective, collective)))
        inner = [each for each in inner if collective != "all_reduce" or each in algorithms("reduce_scatter")]
        given |= {"hosts": hosts if equal else None}
        for key, kind, names in (("inner", within.get(collective, collective), inner), ("outer", collective, outer)):
            flat = [each for each in names if each != "hierarchical" and lookup(kind, each).scratch is None]
            given[key] = draw(st.sampled_from(flat))
    links = LINKS | {"outer": Level(30e-6, draw(st.sampled_from([7e-10, 7e-9])))}  # faster than 5 Gbit/s, and slower
    links |= {"processor": draw(st.sampled_from([None, Level(20e-6, 2e-9)]))}
    topology = Topology(hosts, **links, cores=draw(st.sampled_from([None, 1, 2])), one_machine=draw(st.booleans()))
    return build(collective, name, sum(hosts), **given), topology


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([0, 1000, 1e7]), st.sampled_from([1, 2, 3, 16]))
def test_the_price_is_that_of_every_transfer(case: tuple[Schedule, Topology], nbytes: float, segments: int) -> None:
    schedule, topology = case
    found = seconds(schedule, nbytes, topology, segments)
    assert found == pytest.approx(plain_seconds(schedule, nbytes, topology, segments), rel=1e-9)
    spent = seconds_by_kind(count(schedule, Hosts.of(topology)), nbytes, topology, segments)
    assert spent.total == pytest.approx(found, rel=1e-9)
    assert least_seconds(count(schedule, Hosts.of(topology)), nbytes, topology) <= found * (1 + 1e-9)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([0, 1000, 1e7]))
def test_the_best_segments_are_those_of_the_shortest_time(case: tuple[Schedule, Topology], nbytes: float) -> None:
    schedule, topology = case
    times = {segments: plain_seconds(schedule, nbytes, topology, segments) for segments in (1, 2, 4, 8, 16, 32, 64)}
    busy: Counter[tuple[int, int]] = Counter()  # steps in which a rank sends, and in which it receives
    for step in schedule.steps:
        busy.update({(row[way], way) for row in step.rows() if row[0] != row[1] for way in (0, 1)})
    ranks = sum(topology.hosts) if topology.one_machine else max(topology.hosts)
    enough_cores = not topology.one_machine if topology.cores is None else ranks <= topology.cores
    a_step = 10e-6 if enough_cores else 120e-6 if topology.outer.beta <= 1.5e-9 else 50e-6
    times = {
        segments: time + a_step * segments * max(busy.values(), default=0)
        for segments, time in times.items()
        if segments == 1 or time / segments > 0.5e-3 * (1 - 1e-9)
    }
    load = count(schedule, Hosts.of(topology))
    assert times[best_segments(load, nbytes, topology)] <= min(times.values()) * (1 + 1e-8)


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_counts_are_those_of_every_transfer(collective: str, name: str) -> None:
    for hosts, one_machine in itertools.product(HOSTS, (False, True)):
        schedule = build(collective, name, sum(hosts))
        found = count_chunks(schedule, Hosts(hosts, one_machine))
        expected = [plain_row([step], hosts, one_machine) for step in schedule.steps]
        assert np.repeat(found.rows, found.times, axis=0).tolist() == expected
        assert found.busiest.tolist() == plain_row([*schedule.steps], hosts, one_machine)


def test_links_by_hand() -> None:
    """64 MB on 2 hosts of 2: a ring sends 6 quarters over each link, a hierarchical all-reduce 2 for each rank."""
    cluster = Topology((2, 2), FREE, GIGABYTE)
    ring, hierarchical = build("all_reduce", "ring", 4), build("all_reduce", "hierarchical", 4, hosts=(2, 2))
    for schedule, quarters in ((ring, 6), (hierarchical, 4)):
        assert schedule.cost(64e6, topology=cluster) == pytest.approx(quarters * 16e-3)
        assert count(schedule, Hosts.of(cluster)).busiest[LINK] * 4 == quarters
    within = Topology((2, 2), Level(1e-3, 0), Level(5e-3, 0))  # reduce-scatter 1, ring of 2 hosts 2, all-gather 1
    assert hierarchical.cost(64e6, topology=within) == pytest.approx(2 * 1e-3 + 2 * 5e-3)


def test_a_core_needs_time_for_each_byte_between_hosts() -> None:
    """Four hosts on one core: a ring loads all links at once, a chain one after the other."""
    found = {"inner": {"alpha": 0, "beta": 0}, "outer": {"alpha": 4e-6, "beta": 1e-9}, "cores": 1, "one_machine": True}
    before = Topology.measured((1, 1, 1, 1), found)  # a file of an earlier version
    assert before.processor is None
    now = Topology.measured((1, 1, 1, 1), {**found, "processor": {"alpha": 1e-6, "beta": 0.5e-9}})
    ring, chain = build("all_gather", "ring", 4), build("broadcast", "chain", 4, chunks=1)
    assert [seconds(ring, nbytes, before) for nbytes in (0, 4e6)] == pytest.approx([48e-6, 3e-3 + 12e-6])
    assert [seconds(ring, nbytes, now) for nbytes in (0, 4e6)] == pytest.approx([12e-6, 6e-3 + 12e-6])
    assert [seconds(chain, 4e6, each) for each in (before, now)] == pytest.approx([12e-3 + 12e-6] * 2)
    hosts = Topology((1,) * 4, FREE, now.outer, cores=1, processor=now.processor)  # each with a core of its own
    assert seconds(ring, 4e6, hosts) == pytest.approx(3e-3 + 12e-6)


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_a_flat_topology_is_the_flat_price(collective: str, name: str) -> None:
    for size in (1, 2, 3, 4, 7, 8, 13, 16):
        schedule = build(collective, name, size)
        for nbytes, gamma in itertools.product((0, 1e3, 1e7), (0, 3e-10)):
            flat = Topology.flat(size, 50e-6, 1e-9, gamma)
            expected = schedule.cost(nbytes, 50e-6, 1e-9, gamma)
            assert schedule.cost(nbytes, topology=flat) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_more_costs_more(collective: str, name: str) -> None:
    schedule, hosts = build(collective, name, 8), (2, 3, 3)
    base = Topology(hosts, **LINKS)
    times = [seconds(schedule, nbytes, base) for nbytes in (0, 10, 1e3, 1e5, 1e6, 1e8)]
    assert times == sorted(times)
    slower = [{**LINKS, "inner": Level(4e-6, 2e-10)}, {**LINKS, "outer": Level(60e-6, 9e-10)}, {**LINKS, "gamma": 1e-9}]
    for links in slower:
        for nbytes in (10, 1e6):
            assert seconds(schedule, nbytes, Topology(hosts, **links)) >= seconds(schedule, nbytes, base)
    assert bound(collective, 1e6, base) <= seconds(schedule, 1e6, base) * (1 + 1e-12)


def test_segments_keep_links_and_processors_busy_at_once() -> None:
    """One step in a host and one between, 8 ms each for the whole data: 16 ms uncut, 8 + 2 * 8/S in S segments."""

    @algorithm("broadcast", name="two hops", chunks=1)
    def two_hops(size: int, root: int = 0) -> Iterator[Step]:
        yield Step(src=0, dst=1, chunk=0)
        yield Step(src=1, dst=2, chunk=0)

    try:
        schedule, links = build("broadcast", "two hops", 3), Topology((2, 1), GIGABYTE, GIGABYTE)
        times = [seconds(schedule, 8e6, links, segments) for segments in (1, 2, 4, 8)]
        assert times == pytest.approx([16e-3, 16e-3, 12e-3, 10e-3])
        load = count(schedule, Hosts.of(links))
        assert best_segments(load, 8e6, links) == 16  # of 0.56 ms; 32 would be shorter than 0.5
        assert best_segments(load, 0, links) == 1
    finally:
        unregister("broadcast", "two hops")


def test_steps_of_one_array_are_counted_one_by_one() -> None:
    """A generator may change its own arrays: equal objects are no equal steps."""

    @algorithm("broadcast", name="one array", chunks=1, trust=True)
    def one_array(size: int, root: int = 0) -> Iterator[Step]:
        rank = np.arange(2)
        for _ in range(size - 2):
            yield Step(src=rank, dst=rank + 1, chunk=0)
            rank += 1

    try:
        found = count(build("broadcast", "one array", 5), Hosts((2, 3)))
        assert found.rows[:, OUTER].tolist() == [1, 1, 0]
    finally:
        unregister("broadcast", "one array")


def test_a_wide_step_is_its_rows() -> None:
    for hosts, inner in (((2, 3), "direct"), ((1, 3), "ring"), ((4, 4), "pat")):
        schedule, topology = (
            build("all_reduce", "hierarchical", sum(hosts), hosts=hosts, inner=inner),
            Hosts(hosts),
        )
        for step in schedule.steps:
            narrow = Step(step.src, step.dst, step.chunk, step.reduce, step.into)
            assert step.rows() == narrow.rows()
            assert len(step) == len(narrow)
            assert StepCount(step, topology).row().tolist() == StepCount(narrow, topology).row().tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology((), FREE, FREE), "at least one host"),
        (lambda: Topology((2, 0), FREE, FREE), "at least one rank"),
        (lambda: Topology((2,), Level(-1, 0), FREE), "at least 0 seconds"),
        (lambda: Topology((2,), FREE, FREE, gamma=float("nan")), "gamma"),
        (lambda: Topology((2,), FREE, FREE, cores=0), "cores=0"),
        (lambda: Topology.measured((2,), {"inner": {"alpha": 1, "beta": 1}}), "KeyError\\('outer'\\)"),
        (lambda: seconds(build("all_reduce", "ring", 3), 1, Topology((2,), FREE, FREE)), "3 ranks, the topology has 2"),
        (
            lambda: seconds(build("all_reduce", "ring", 2), 1, Topology((2,), FREE, FREE), 0),
            "segments=0; it must be at least 1",
        ),
        (lambda: recommend("all_redduce", 1, Topology((2,), FREE, FREE)), "did you mean 'all_reduce'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


def test_cost_wants_one_model() -> None:
    with pytest.raises(TypeError, match="alpha and beta, or topology"):
        build("all_reduce", "ring", 2).cost(1e6)  # type: ignore[call-overload]


def test_the_recommended_is_the_quickest_and_above_the_bound() -> None:
    for hosts in ((4, 4), (8,), (1,) * 6):
        for collective in COLLECTIVES:
            for nbytes in (8, 1e8):
                advice = recommend(collective, nbytes, Topology(hosts, **LINKS))
                times = [each.seconds for each in advice.candidates]
                assert times[0] <= 1.05 * min(times)  # of those, the preferred one
                assert all(some <= 1.05 * other for some, other in itertools.pairwise(times))
                assert advice.bound <= min(times) * (1 + 1e-12)
    large, small = (recommend("all_reduce", nbytes, Topology((4, 4), **LINKS)).candidates[0] for nbytes in (1e8, 8))
    assert (large.schedule.algorithm, large.spent.most, small.spent.most) == ("hierarchical", "link", "latency")


@pytest.mark.parametrize("size", [*range(1, 34), 64, 65])
def test_no_rank_is_inner_in_both_trees(size: int) -> None:
    """At odd sizes rank 0 once was: it sent as much as two inner ranks."""
    inner = [set(parent[parent >= 0].tolist()) for parent in _two_trees(size)]
    assert not inner[0] & inner[1]


def test_prices_do_not_depend_on_the_processor() -> None:
    """Their last bits did, so a rank on another kind of processor chose another one of two nearly equal prices. They
    were matrix products, which use other instructions on each kind."""
    program = """
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology
for collective in ("all_reduce", "reduce", "all_gather"):
    for hosts in ((3, 3), (3, 3, 3), (1,) * 7, (7, 6, 5)):
        for beta in (1e-9, 2.7e-9):
            topology = Topology(hosts, Level(3e-6, 2e-10), Level(5e-4, beta), 1e-10)
            print([(each.name, each.seconds.hex()) for each in recommend(collective, 1.5, topology).candidates])
"""
    printed = []
    for processor in ("", "Prescott", "Haswell"):  # of x86; OpenBLAS ignores the name elsewhere
        env = {**os.environ, "OPENBLAS_CORETYPE": processor}
        command = [sys.executable, "-c", program]
        printed.append(subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True).stdout)
    assert printed[0] == printed[1] == printed[2]


def test_a_price_is_the_same_on_every_version_of_python() -> None:
    """``sum()`` of floats compensates what rounding loses since Python 3.12: it gave 1e16 before, and then 1e16 + 2."""
    assert Cost(1, Fraction(1), Fraction(1)).seconds(1, alpha=1e16, beta=1, gamma=1) == 1e16
