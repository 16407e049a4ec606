"""The search for the best candidate alone: its result is that of pricing all."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_prims.schedules.contract import COLLECTIVES
from dist_prims.schedules.recommend import MUCH_SHORTER, PERSONALIZED, Candidate, recommend
from dist_prims.schedules.steps import CountedStep, Step, WideStep
from dist_prims.schedules.topology import Level, Topology

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
    if collective in PERSONALIZED:
        direct = next(each for each in candidates if each.name == "direct")
        best = direct if best.seconds >= MUCH_SHORTER * direct.seconds else best
    return best.name, best.segments


def test_an_exchange_is_compared_with_direct_and_little_else_is_priced() -> None:
    """The link carries the same bytes by every algorithm: a pairwise exchange has 511 steps, all different."""
    cluster = Topology((8,) * 64, Level(3e-6, 2e-10), Level(50e-6, 1e-9), 1e-10)
    found = recommend("all_to_all", 3 << 23, cluster, only_best=True).candidates
    assert [each.name for each in found] == ["direct"]


def test_a_long_ring_is_not_priced() -> None:
    """In one segment the bytes of each of its 1,022 steps take too long, in several the latency of a rank does."""
    cluster = Topology((8,) * 64, Level(3e-6, 2e-10), Level(50e-6, 1e-9), 1e-10)
    names = {each.name for each in recommend("all_reduce", 3 << 23, cluster, only_best=True).candidates}
    assert not names & {"ring", "bidirectional_ring"}


def test_steps_of_messages_are_joined_and_run_backwards() -> None:
    two = CountedStep(Step([0, 1], [1, 0], [0, 0]), 2, lambda: Step([0, 0, 1, 1], [1, 1, 0, 0], [0, 2, 1, 3]))
    joined = Step.concat([two, Step(2, 0, 5), WideStep(two, [1, 2, 1, 1])])
    assert joined.narrow[0].src.tolist() == [0, 1, 2, 0, 1]
    assert joined.narrow[1].tolist() == [2, 2, 1, 3, 2]
    assert len(joined) == len(joined.rows()) == 10
    assert joined.rows()[5:8] == [(0, 1, 0, 0, False), (0, 1, 2, 2, False), (0, 1, 3, 3, False)]
    assert two.backwards().rows()[1] == (1, 0, 2, 2, True)
