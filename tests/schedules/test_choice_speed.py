"""The search for the best candidate alone: its result is that of pricing all, with a fraction of the steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_prims.schedules import build
from dist_prims.schedules.contract import COLLECTIVES
from dist_prims.schedules.cost import best_segments, seconds
from dist_prims.schedules.recommend import EXCHANGES, MUCH_SHORTER, Candidate, recommend
from dist_prims.schedules.registry import algorithms, lookup
from dist_prims.schedules.replay import replay
from dist_prims.schedules.schedule import CountedStep, Step, Steps, WideStep
from dist_prims.schedules.step_bounds import StepBounds
from dist_prims.schedules.topology import Level, Topology

FREE = Level(0, 0)
TOPOLOGIES = st.builds(
    Topology,
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    inner=st.builds(Level, st.sampled_from([0.0, 1e-6, 1e-4]), st.sampled_from([0.0, 1e-10, 1e-8])),
    outer=st.builds(Level, st.sampled_from([1e-6, 5e-5]), st.sampled_from([1e-10, 1e-8])),
    gamma=st.sampled_from([0.0, 1e-9]),
    cores=st.sampled_from([None, 2]),
    congestion=st.sampled_from([0.0, 1e-9]),
    processor=st.sampled_from([None, Level(2e-5, 5e-9)]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOPOLOGIES, st.sampled_from(COLLECTIVES), st.integers(0, 30))
def test_the_best_of_all_is_found_without_pricing_all(topology: Topology, collective: str, power: int) -> None:
    every = recommend(collective, 1 << power, topology).candidates
    some = recommend(collective, 1 << power, topology, only_best=True).candidates
    assert _chosen(collective, some) == _chosen(collective, every)
    assert {each.name for each in some} <= {each.name for each in every}


def _chosen(collective: str, candidates: Sequence[Candidate]) -> tuple[str, int]:
    """Name and segments of what the backend chooses: an exchange is direct unless the best takes much less time."""
    best = candidates[0]
    if collective in EXCHANGES:
        direct = next(each for each in candidates if each.name == "direct")
        best = direct if best.seconds >= MUCH_SHORTER * direct.seconds else best
    return best.name, best.segments


def test_an_exchange_is_compared_with_direct_and_little_else_is_priced() -> None:
    """The link carries the same bytes by every algorithm: a pairwise exchange has 511 steps, all different."""
    cluster = Topology((8,) * 64, Level(3e-6, 2e-10), Level(50e-6, 1e-9), 1e-10)
    found = recommend("all_to_all", 3 << 23, cluster, only_best=True).candidates
    assert [each.name for each in found] == ["direct"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOPOLOGIES, st.sampled_from(COLLECTIVES), st.integers(0, 30), st.data())
def test_a_bound_is_below_the_price(topology: Topology, collective: str, power: int, data: st.DataObject) -> None:
    flat = [name for name in algorithms(collective) if name != "hierarchical"]
    schedule = build(collective, data.draw(st.sampled_from(flat)), topology.size)
    price = float(seconds(schedule, 1 << power, topology, int(best_segments(schedule, 1 << power, topology))))
    assert not StepBounds(schedule, topology).is_longer(1 << power, price * (1 + 1e-9))


UNITS = ("all_reduce", "broadcast", "reduce")  # hierarchical for hosts of any sizes
BLOCKS = ("all_gather", "reduce_scatter", "gather", "scatter")  # for hosts with equally many ranks


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOPOLOGIES, st.sampled_from((*UNITS, *BLOCKS)), st.integers(0, 30), st.data())
def test_the_phase_between_hosts_alone_takes_no_longer_than_the_whole(
    topology: Topology, collective: str, power: int, data: st.DataObject
) -> None:
    if collective in BLOCKS:
        topology = replace(topology, hosts=topology.hosts[:1] * len(topology.hosts))
    flat = [name for name in algorithms(collective) if name != "hierarchical"]
    outer = data.draw(st.sampled_from([name for name in flat if lookup(collective, name).scratch is None]))
    whole = build(collective, "hierarchical", topology.size, outer=outer, hosts=topology.hosts)
    price = float(seconds(whole, 1 << power, topology, int(best_segments(whole, 1 << power, topology))))
    alone = StepBounds(build(collective, outer, len(topology.hosts)), topology.one_rank_a_host)
    assert not alone.is_longer(1 << power, price * (1 + 1e-9))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOPOLOGIES, st.sampled_from((*UNITS, *BLOCKS)), st.integers(0, 30))
def test_phases_have_the_load_of_their_steps(topology: Topology, collective: str, power: int) -> None:
    if collective in BLOCKS:
        topology = replace(topology, hosts=topology.hosts[:1] * len(topology.hosts))
    phases = build(collective, "hierarchical", topology.size, hosts=topology.hosts)
    steps = replace(phases, steps=Steps(lambda: iter(phases.steps)))
    assert phases.steps.phases
    assert not steps.steps.phases
    for segments in (1, 4):
        by_phase, by_step = (float(seconds(each, 1 << power, topology, segments)) for each in (phases, steps))
        assert by_phase == pytest.approx(by_step, rel=1e-12)
    for way in ("sent", "received"):
        by_phase, by_step = (getattr(replay(each, topology), way).tolist() for each in (phases, steps))
        assert by_phase == by_step


def test_a_long_ring_is_not_priced() -> None:
    """In one segment the bytes of each of its 1,022 steps take too long, in several the latency of a rank does."""
    cluster = Topology((8,) * 64, Level(3e-6, 2e-10), Level(50e-6, 1e-9), 1e-10)
    names = {each.name for each in recommend("all_reduce", 3 << 23, cluster, only_best=True).candidates}
    assert not names & {"ring", "bidirectional_ring"}


def test_a_long_schedule_is_counted_no_further_than_necessary() -> None:
    cluster = Topology((8,) * 64, Level(5e-6, 3e-10), Level(60e-6, 8e-10), congestion=1e-10)
    chain = build("broadcast", "chain", 512, chunks=1)
    bounds = StepBounds(chain, cluster)
    assert bounds.is_longer(1024, 1e-3)
    assert bounds._within + bounds._between < 150
    assert bounds.is_longer(1024, 2e-3)  # continues
    assert 150 < bounds._within + bounds._between < len(chain.steps)
    priced = len(recommend("broadcast", 1024, cluster, only_best=True).candidates)
    assert priced < len(recommend("broadcast", 1024, cluster).candidates) - 4


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_messages_of_a_step_have_the_load_of_its_rows(collective: str) -> None:
    for name in algorithms(collective):
        for hosts in ((3, 3), (2, 2, 2, 2), (4, 4, 4), (7,), (1, 1)):
            given = {"hosts": hosts} if name == "hierarchical" else {}
            topology = Topology(hosts, FREE, FREE)
            for step in build(collective, name, topology.size, **given).steps:
                size = len(step)
                full = Step(step.src, step.dst, step.chunk, step.reduce, step.into)
                assert size == len(full)
                assert topology.loads(step).tolist() == topology.loads(full).tolist()


def test_steps_of_messages_are_joined_and_run_backwards() -> None:
    two = CountedStep(Step([0, 1], [1, 0], [0, 0]), 2, lambda: Step([0, 0, 1, 1], [1, 1, 0, 0], [0, 2, 1, 3]))
    joined = Step.concat([two, Step(2, 0, 5), WideStep(two, [1, 2, 1, 1])])
    assert joined.narrow[0].src.tolist() == [0, 1, 2, 0, 1]
    assert joined.narrow[1].tolist() == [2, 2, 1, 3, 2]
    assert len(joined) == len(joined.rows()) == 10
    assert joined.rows()[5:8] == [(0, 1, 0, 0, False), (0, 1, 2, 2, False), (0, 1, 3, 3, False)]
    assert two.backwards().rows()[1] == (1, 0, 2, 2, True)


def test_threads_count_the_steps_of_a_schedule_together() -> None:
    """Groups on several threads choose at once: each step was counted by one of them only, or raised on the others."""
    cluster = Topology((8,) * 16, Level(5e-6, 3e-10), Level(60e-6, 8e-10))
    chain = build("broadcast", "chain", 128, chunks=1)
    limits = [each * 1e-4 for each in range(1, 25)]
    expected = [StepBounds(chain, cluster).is_longer(1024, limit) for limit in limits]
    assert set(expected) == {False, True}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            bounds = StepBounds(chain, cluster)
            with ThreadPoolExecutor(8) as threads:
                found = list(threads.map(lambda limit, bounds=bounds: bounds.is_longer(1024, limit), limits))
            assert found == expected
    finally:
        sys.setswitchinterval(interval)
