"""Prices on hosts and links: by hand, against a plain count of every transfer, and at the sizes they are made for."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_prims.schedules import COLLECTIVES, Step, algorithm, algorithms, build, lookup, replay, unregister
from dist_prims.schedules.algorithms.tree import _two_trees
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.cost import best_segments, parts, price, seconds
from dist_prims.schedules.recommend import bound, recommend
from dist_prims.schedules.replay import patterns
from dist_prims.schedules.schedule import Schedule, WideStep
from dist_prims.schedules.topology import Level, Topology

REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
FREE = Level(0, 0)
GIGABYTE = Level(0, 1e-9)
LINKS: dict[str, Any] = {"inner": Level(2e-6, 1e-10), "outer": Level(30e-6, 7e-10), "gamma": 2e-10, "congestion": 3e-10}
HOSTS = [(1,), (4,), (1, 1), (1, 3), (2, 3), (2, 2, 2), (1, 1, 5), (3, 1, 2, 2), (1,) * 9]


def plain(schedule: Schedule, nbytes: float, topology: Topology, segments: int = 1) -> float:
    """The same model with nothing clever: each transfer, each resource, each tick."""
    steps = [_plain_step(step, nbytes * float(schedule.share) / segments, topology) for step in schedule.steps]
    ticks = [steps[max(0, last - segments + 1) : last + 1] for last in range(len(steps) + segments - 1 if steps else 0)]
    inside = [max(busy.values(), default=0) for busy, message in steps if not message]  # added for one segment
    return sum(
        max([*sum((busy for busy, _ in tick), Counter()).values(), *(message for _, message in tick)]) for tick in ticks
    ) + (sum(inside) if segments > 1 else 0)


def _plain_step(step: Step, nbytes: float, topology: Topology) -> tuple[Counter[tuple[str, int]], float]:
    """The seconds of each resource, and those of one message between hosts from start to end."""
    core = topology.processor or Level(topology.outer.alpha, 0)
    host = [number for number, ranks in enumerate(topology.hosts) for _ in range(ranks)]
    rank: Any = Counter()  # of seconds, as the others; the type of a Counter is for whole numbers
    work: Any = Counter()  # what takes a core another time than the rank
    link: Any = Counter()
    congested: Any = Counter()
    met = set()
    hosts_to = [
        {host[src] for src, dst, *_ in step.rows() if host[dst] == to} - {to} for to in range(len(topology.hosts))
    ]
    for src, dst, _, _, reduce in step.rows():
        near = host[src] == host[dst]
        if reduce:
            rank["out", dst] += nbytes * topology.gamma
            rank["in", dst] += nbytes * topology.gamma
        if src == dst:
            continue
        message = 0.0 if (src, dst) in met else (topology.inner if near else topology.outer).alpha
        met.add((src, dst))
        for way, who in (("out", src), ("in", dst)):
            rank[way, who] += message + (nbytes * topology.inner.beta if near else 0)
            if not near:
                work[way, who] += (core.alpha if message else 0) - message + nbytes * core.beta
            link[f"link {way}", host[who]] += 0 if near else nbytes * topology.outer.beta
        congested[host[dst]] += nbytes * topology.congestion if not near and len(hosts_to[host[dst]]) > 1 else 0
    busiest = max(link.values(), default=0) + max(congested.values(), default=0)
    message = topology.outer.alpha + busiest if any(host[src] != host[dst] for src, dst, *_ in step.rows()) else 0.0
    for who, time in congested.items():
        link["link in", who] += time
    cores: Any = Counter()
    for (way, who), time in rank.items():
        if topology.cores is not None:
            time += work[way, who]
            cores[f"cores {way}", 0 if topology.one_machine else host[who]] += time / topology.cores
    return Counter({**rank, **link, **cores}), message


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([0, 1000, 1e7]), st.sampled_from([1, 2, 3, 16]))
def test_the_replay_equals_the_plain_count(case: tuple[Schedule, Topology], nbytes: float, segments: int) -> None:
    schedule, topology = case
    assert seconds(schedule, nbytes, topology, segments) == pytest.approx(
        plain(schedule, nbytes, topology, segments), rel=1e-9
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([0, 1000, 1e7]))
def test_the_best_segments_are_those_of_the_shortest_time(case: tuple[Schedule, Topology], nbytes: float) -> None:
    schedule, topology = case
    times = {segments: plain(schedule, nbytes, topology, segments) for segments in (1, 2, 4, 8, 16, 32, 64)}
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
    assert times[int(best_segments(schedule, nbytes, topology))] <= min(times.values()) * (1 + 1e-8)


@st.composite
def one_step(draw: st.DrawFn) -> tuple[Topology, np.ndarray, np.ndarray | None]:
    """A topology, pairs of ranks in any order, and numbers of chunks."""
    topology = Topology(draw(st.sampled_from(HOSTS)), **LINKS)
    pairs = np.array(draw(st.lists(st.integers(0, topology.size**2 - 1), max_size=40)), np.int64)
    spans = draw(st.lists(st.integers(1, 9), min_size=len(pairs), max_size=len(pairs)))
    return topology, pairs, draw(st.sampled_from([None, np.array(spans, np.int64)]))


@settings(deadline=None)
@given(one_step())
def test_both_ways_to_count_a_step_are_equal(case: tuple[Topology, np.ndarray, np.ndarray | None]) -> None:
    topology, pairs, chunks = case
    by_message, by_table = topology._count_messages(pairs, chunks), topology._count_table(pairs, chunks)
    for some, others in zip(by_message, by_table, strict=True):
        assert some.tolist() == others.tolist()


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_counts_are_those_of_every_single_step(collective: str, name: str) -> None:
    """Exactly: recognised patterns and classes against a count of each step as if it were the only one."""
    for hosts in HOSTS:
        schedule, topology = build(collective, name, sum(hosts)), Topology(hosts, **LINKS)
        found = replay.replay(schedule, topology)
        for step, pattern in zip(schedule.steps, found.pattern.tolist(), strict=True):
            rows = set(map(tuple, topology.loads(step).tolist()))
            assert set(map(tuple, found.counts[pattern].tolist())) == rows
        crossing = [
            (topology.host_of[step.src[away]], topology.host_of[step.dst[away]])
            for step in schedule.steps
            for away in [topology.host_of[step.src] != topology.host_of[step.dst]]
        ]
        for way, found_way in enumerate((found.sent, found.received)):
            totals = sum((np.bincount(each[way], minlength=len(hosts)) for each in crossing), np.zeros(len(hosts), int))
            assert found_way.tolist() == totals.tolist()


def test_links_by_hand() -> None:
    """64 MB on 2 hosts of 2: a ring sends 6 quarters over each link, a hierarchical all-reduce 2 for each rank."""
    cluster = Topology((2, 2), FREE, GIGABYTE)
    ring, hierarchical = build("all_reduce", "ring", 4), build("all_reduce", "hierarchical", 4, hosts=(2, 2))
    for schedule, quarters in ((ring, 6), (hierarchical, 4)):
        assert schedule.cost(64e6, topology=cluster) == pytest.approx(quarters * 16e-3)
        found: Any = replay.replay(schedule, cluster)
        assert (found.sent * schedule.share * 4).tolist() == [quarters, quarters]
        assert (found.received * schedule.share * 4).tolist() == [quarters, quarters]
    within = Topology((2, 2), Level(1e-3, 0), Level(5e-3, 0))  # reduce-scatter 1, ring of 2 hosts 2, all-gather 1
    assert hierarchical.cost(64e6, topology=within) == pytest.approx(2 * 1e-3 + 2 * 5e-3)


def test_streams_that_meet_by_hand() -> None:
    """Two hosts send a chunk each into the link of a third; in a ring every link has one sender."""
    three = Topology((1, 1, 1), FREE, GIGABYTE, congestion=0.25e-9)
    assert three.loads(Step(src=[1, 2], dst=[0, 0], chunk=[1, 2]))[:, 9].tolist() == [0] * 9 + [2, 0, 0, 2]
    assert three.loads(Step(src=[0, 1, 2], dst=[1, 2, 0], chunk=0))[:, 9].sum() == 0
    two_shot, ring = build("all_reduce", "two_shot", 3), build("all_reduce", "ring", 3)
    assert seconds(two_shot, 3e6, three) == pytest.approx(2 * 2e-3 * 1.25)
    assert seconds(ring, 3e6, three) == pytest.approx(4 * 1e-3)


def test_ranks_share_a_link_and_cores() -> None:
    cluster = Topology((3, 3), FREE, GIGABYTE)
    side = Step(src=[0, 1, 2], dst=[3, 4, 5], chunk=0)
    assert cluster.loads(side)[12:, 4].tolist() == [3, 0, 0, 3, 3]
    work = Topology((4,), Level(1e-6, 1e-9), FREE)
    ring = build("all_reduce", "ring", 4)
    alone, shared = (Topology((4,), work.inner, FREE, cores=cores) for cores in (4, 2))
    assert seconds(ring, 1e6, alone) == pytest.approx(float(seconds(ring, 1e6, work)))
    assert seconds(ring, 1e6, shared) == pytest.approx(2 * float(seconds(ring, 1e6, work)))
    box = Topology((2, 2), work.inner, work.inner, cores=2, one_machine=True)
    hosts = Topology((2, 2), work.inner, work.inner, cores=2)
    assert float(seconds(ring, 0, box)) == pytest.approx(2 * float(seconds(ring, 0, hosts)))


def test_a_core_needs_time_for_each_byte_between_hosts() -> None:
    """Four hosts on one core: a ring loads all links at once, a chain one after the other."""
    found = {"inner": {"alpha": 0, "beta": 0}, "outer": {"alpha": 4e-6, "beta": 1e-9}, "cores": 1, "one_machine": True}
    before = Topology.measured((1, 1, 1, 1), found)  # a file of an earlier version
    assert before.processor is None
    now = Topology.measured((1, 1, 1, 1), {**found, "processor": {"alpha": 1e-6, "beta": 0.5e-9}})
    ring, chain = build("all_gather", "ring", 4), build("broadcast", "chain", 4, chunks=1)
    assert [float(seconds(ring, nbytes, before)) for nbytes in (0, 4e6)] == pytest.approx([48e-6, 3e-3 + 12e-6])
    assert [float(seconds(ring, nbytes, now)) for nbytes in (0, 4e6)] == pytest.approx([12e-6, 6e-3 + 12e-6])
    assert [float(seconds(chain, 4e6, each)) for each in (before, now)] == pytest.approx([12e-3 + 12e-6] * 2)
    hosts = Topology((1,) * 4, FREE, now.outer, cores=1, processor=now.processor)  # each with a core of its own
    assert float(seconds(ring, 4e6, hosts)) == pytest.approx(3e-3 + 12e-6)


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_a_flat_topology_is_the_flat_price(collective: str, name: str) -> None:
    for size in (1, 2, 3, 4, 7, 8, 13, 16):
        schedule = build(collective, name, size)
        for nbytes in (0, 1e3, 1e7):
            old, flat = schedule.cost(nbytes, 50e-6, 1e-9), Topology.flat(size, 50e-6, 1e-9)
            assert schedule.cost(nbytes, topology=flat) == pytest.approx(old, rel=1e-12)
            old, flat = schedule.cost(nbytes, 50e-6, 1e-9, 3e-10), Topology.flat(size, 50e-6, 1e-9, 3e-10)
            new = schedule.cost(nbytes, topology=flat)
            assert new <= old * (1 + 1e-12) if "tree" in name else new == pytest.approx(old, rel=1e-12)


def test_the_flat_price_is_what_it_was() -> None:
    """Its definition, step by step, without patterns."""
    for collective, name in REGISTRY:
        schedule = build(collective, name, 12)
        messages = moved = reduced = 0
        for step in schedule.steps:
            far = [row for row in step.rows() if row[0] != row[1]]
            pairs = {row[:2] for row in far}
            most = [Counter(each).most_common(1) for each in ([p[0] for p in pairs], [p[1] for p in pairs])]
            most += [Counter(each).most_common(1) for each in ([row[0] for row in far], [row[1] for row in far])]
            out, into, sent, got = (found[0][1] if found else 0 for found in most)
            sums = Counter(row[1] for row in step.rows() if row[4])
            messages, moved, reduced = (
                messages + max(out, into),
                moved + max(sent, got),
                reduced + max([0, *sums.values()]),
            )
        found = price(schedule)
        assert (found.messages, found.moved, found.reduced) == (
            messages,
            moved * schedule.share,
            reduced * schedule.share,
        )


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_more_costs_more(collective: str, name: str) -> None:
    schedule, hosts = build(collective, name, 8), (2, 3, 3)
    base = Topology(hosts, **LINKS)
    times = seconds(schedule, np.array([[0, 10, 1e3], [1e5, 1e6, 1e8]]), base).ravel()
    assert (np.diff(times) >= 0).all()
    slower = [{**LINKS, "inner": Level(4e-6, 2e-10)}, {**LINKS, "outer": Level(60e-6, 9e-10)}, {**LINKS, "gamma": 1e-9}]
    for links in slower:
        assert (seconds(schedule, [10, 1e6], Topology(hosts, **links)) >= seconds(schedule, [10, 1e6], base)).all()
    assert bound(collective, 1e6, base) <= float(seconds(schedule, 1e6, base)) * (1 + 1e-12)


def test_segments_keep_links_and_processors_busy_at_once() -> None:
    """One step in a host and one between, 8 ms each for the whole data: 16 ms uncut, 8 + 2 * 8/S in S segments."""

    @algorithm("broadcast", name="two hops", chunks=1)
    def two_hops(size: int, root: int = 0) -> Iterator[Step]:
        yield Step(src=0, dst=1, chunk=0)
        yield Step(src=1, dst=2, chunk=0)

    try:
        schedule, links = build("broadcast", "two hops", 3), Topology((2, 1), GIGABYTE, GIGABYTE)
        times = [float(seconds(schedule, 8e6, links, segments)) for segments in (1, 2, 4, 8)]
        assert times == pytest.approx([16e-3, 16e-3, 12e-3, 10e-3])
        assert best_segments(schedule, [8e6, 0], links).tolist() == [16, 1]  # of 0.56 ms; 32 would be shorter than 0.5
        slow = Topology((2, 1), Level(8e-4, 2e-9), Level(8e-4, 2e-9))
        assert best_segments(schedule, 8e6, slow) == min((1, 2, 4, 8, 16), key=lambda s: plain(schedule, 8e6, slow, s))
        assert parts(schedule, 8e6, slow, 2).sum() == pytest.approx(plain(schedule, 8e6, slow, 2))
    finally:
        unregister("broadcast", "two hops")


def test_patterns_are_found_and_not_imagined() -> None:
    ring = [number for number, _ in patterns(iter(build("all_reduce", "ring", 5).steps))]
    assert ring == [0] * 4 + [1] * 4
    to_and_fro = build("all_gather", "neighbour_exchange", 8)
    assert [number for number, _ in patterns(iter(to_and_fro.steps))][1:] == [1, 2, 1]  # the first has single chunks

    def one_array() -> Iterator[Step]:
        rank = np.arange(3)
        for _ in range(3):
            yield Step(src=rank, dst=rank + 1, chunk=0)
            rank += 1

    assert [number for number, _ in patterns(one_array())] == [0, 1, 2]
    wide = [WideStep(Step(src=0, dst=1, chunk=0), span) for span in (1, 2, 1)]
    assert [number for number, _ in patterns(iter(wide))] == [0, 1, 0]


def test_a_wide_step_is_its_rows() -> None:
    for hosts, inner in (((2, 3), "direct"), ((1, 3), "ring"), ((4, 4), "pat")):
        schedule, topology = (
            build("all_reduce", "hierarchical", sum(hosts), hosts=hosts, inner=inner),
            Topology(hosts, FREE, FREE),
        )
        for step in schedule.steps:
            narrow = Step(step.src, step.dst, step.chunk, step.reduce, step.into)
            assert step.rows() == narrow.rows()
            assert len(step) == len(narrow)
            assert topology.loads(step).tolist() == topology.loads(narrow).tolist()


@pytest.mark.parametrize("hosts", [(2, 3), (1, 3), (4,), (2, 2, 2)])
@pytest.mark.parametrize("outer", ["ring", "direct", "two_shot", "bidirectional_ring", "halving_doubling", "tree"])
def test_direct_inside_uneven_hosts_is_right(hosts: tuple[int, ...], outer: str) -> None:
    build("all_reduce", "hierarchical", sum(hosts), hosts=hosts, inner="direct", outer=outer).verify()


def test_what_is_too_large_to_follow_still_has_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_COUNTS", 200)
    for name in ("chain", "binomial"):
        schedule, topology = build("broadcast", name, 9), Topology((4, 5), **LINKS)
        assert not replay.replay(schedule, topology).followed
        assert float(seconds(schedule, 1e6, topology)) == pytest.approx(plain(schedule, 1e6, topology))
        assert best_segments(schedule, 1e6, topology) == 1
        with pytest.raises(ValueError, match="segments=2; the schedule is too large for segments"):
            seconds(schedule, 1e6, topology, 2)


def test_a_long_ring_is_not_stored() -> None:
    """998 steps of 4,000 transfers, 130 MB if stored."""
    schedule = build("all_reduce", "hierarchical", 4000, hosts=(8,) * 500)
    topology = Topology((8,) * 500, **LINKS)
    tracemalloc.start()
    found = replay.replay(schedule, topology)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
    assert found.counts.shape[:2] == (4, 3)  # patterns: in, between, between, in; classes: ranks, links, a message
    assert found.sent.tolist() == [2 * 499 * 8] * 500


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
                assert not advice.left_out
    large, small = (recommend("all_reduce", nbytes, Topology((4, 4), **LINKS)).candidates[0] for nbytes in (1e8, 8))
    assert (large.schedule.algorithm, large.bound_by, small.bound_by) == ("hierarchical", "link", "latency")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("halving_doubling", (1,) * 1024),
        ("halving_doubling", (8,) * 128),
        ("tree", (8,) * 12_500),
        ("tree", (1,) * 100_000),
        ("ring", (1,) * 12_500),
        ("hierarchical", (8,) * 12_500),
    ],
)
def test_large_clusters_are_replayed_and_priced(name: str, hosts: tuple[int, ...]) -> None:
    """The deadline is the timeout; docs and reports say what it takes."""
    given = {"hosts": hosts} if name == "hierarchical" else {}
    schedule = build("all_reduce", name, sum(hosts), **given)
    topology = Topology(hosts, **LINKS)
    found = replay.replay(schedule, topology)
    assert found.sent.sum() == found.received.sum()
    if name in ("ring", "hierarchical"):
        sent = 2 * (len(hosts) - 1) * hosts[0]  # chunks over each link
        assert found.sent.tolist() == [sent] * len(hosts)
    assert float(seconds(schedule, 1e8, topology)) >= bound("all_reduce", 1e8, topology)


@pytest.mark.parametrize("size", [*range(1, 34), 64, 65])
def test_no_rank_is_inner_in_both_trees(size: int) -> None:
    """At odd sizes rank 0 once was: it sent as much as two inner ranks."""
    inner = [set(parent[parent >= 0].tolist()) for parent in _two_trees(size)]
    assert not inner[0] & inner[1]
