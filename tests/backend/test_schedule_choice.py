"""The choice of a schedule between hosts: what roots, sizes and groups share, and that sharing changes no choice."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import run

from dist_prims.backend import multi_host
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.schedules import Schedule, Step, algorithm, build, program, registry, schedule_builder, unregister
from dist_prims.schedules.program import compile_program
from dist_prims.schedules.recommend import _counts_of_phase, recommend
from dist_prims.schedules.topology import Topology

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    *("all_to_all", "gather", "scatter"),
)
GIGABIT = {**ASSUMED, "outer": {"alpha": 5e-5, "beta": 8.5e-9}}
SLOW_LINKS = {**ASSUMED, "outer": {"alpha": 1e-3, "beta": 1e-7}, "congestion": 2e-8, "cores": 2}


def schedules(names: str, rank: int = 0, measured: Mapping[str, Any] = ASSUMED) -> MultiHostSchedules:
    return MultiHostSchedules(names.split(), rank, measured, Schedule.verify)


def clear() -> None:
    for cached in (
        multi_host._recommended,
        schedule_builder._build_once,
        registry._known_load,
        program._compiled,
        _counts_of_phase,
    ):
        cached.cache_clear()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The calls of ``recommend`` by the backend."""
    calls: list[tuple[Any, ...]] = []

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(given)
        return recommend(*given, **options)

    multi_host._recommended.cache_clear()
    monkeypatch.setattr(multi_host, "recommend", counted)
    yield calls
    multi_host._recommended.cache_clear()


def test_the_first_group_and_the_first_choice_import_only_what_they_need() -> None:
    """np.unique() imports numpy.ma at its first use: half of the time of the first all_to_all between 32 hosts. The
    class Schedule imported what writes pictures, pages and files. The imports for the first group of a process started
    collections of garbage, which took as long as the imports."""
    program = f"""
import gc, sys
import torch.distributed as dist
store, imported = dist.HashStore(), []
gc.collect()
gc.callbacks.append(lambda phase, facts: imported.append("dist_prims.repair" in sys.modules))
dist.init_process_group("dist_prims", store=store, rank=0, world_size=1)
assert gc.isenabled() and all(imported)
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
for names in ("a b c d", "a a b b c c d d"):
    for collective in {COLLECTIVES}:
        MultiHostSchedules(names.split(), 0, ASSUMED, print).choose(collective, 4096, 0)
rarely_needed = {{"numpy.ma", *(f"dist_prims.schedules.{{name}}" for name in ("draw", "file", "formats", "html"))}}
print(rarely_needed & {{*sys.modules}})
"""
    assert run([sys.executable, "-c", program]).stdout.splitlines()[-1] == "set()"


def test_roots_and_groups_of_one_shape_share_a_choice(searches: list[tuple[Any, ...]]) -> None:
    names = {
        schedules("a a b b b", rank).choose("broadcast", 5000, root).name for rank in range(5) for root in range(5)
    }
    schedules("x y x y y").choose("broadcast", 7000, 3)  # other hosts and another order; the same size class
    assert len(names) == len(searches) == 1


def test_other_sizes_collectives_hosts_and_costs_have_choices_of_their_own(searches: list[tuple[Any, ...]]) -> None:
    schedules("a a b b b").choose("broadcast", 5000, 0)
    for names, measured, collective, nbytes in (
        ("a a b b b", ASSUMED, "broadcast", 9000),
        ("a a b b b", ASSUMED, "reduce", 5000),
        ("a a a b b", ASSUMED, "broadcast", 5000),
        ("a a b b b", SLOW_LINKS, "broadcast", 5000),
    ):
        before = len(searches)
        schedules(names, measured=measured).choose(collective, nbytes, 0)
        assert len(searches) == before + 1


def test_a_schedule_is_built_for_each_root() -> None:
    names, rank = "a b a b b", 1
    order = schedules(names).order
    for root in range(5):
        found = schedules(names, rank).choose("broadcast", 64, root)
        name, _, chunks = found.name.rstrip(")").partition("(")
        given = {"chunks": int(chunks)} if chunks else {}
        schedule = build("broadcast", name, 5, root=order.rank_at.index(root), **given)
        assert found.program == compile_program(order.renumbered(schedule), rank)


def test_an_algorithm_registered_later_is_considered() -> None:
    group = schedules("a b")
    before = group.choose("all_reduce", 8, -1).name

    @algorithm("all_reduce", name="of_no_cost", chunks=1, trust=True)
    def of_no_cost(size: int) -> Iterator[Step]:
        yield from ()

    trusting = MultiHostSchedules(["a", "b"], 0, ASSUMED, lambda schedule: None)
    assert trusting.choose("all_reduce", 8, -1).name.startswith("of_no_cost#")
    unregister("all_reduce", "of_no_cost")
    assert group.choose("all_reduce", 8, -1).name == before


def names_by_size(names: str, collective: str, measured: Mapping[str, Any] = ASSUMED) -> list[str]:
    return [schedules(names, 0, measured).choose(collective, 1 << power, 0).name for power in (6, 16, 20)]


def test_blocks_are_forwarded_only_where_that_is_much_faster() -> None:
    """On a fast link that is more often the case."""
    two_hosts = "a a a a b b b b"
    for collective in ("gather", "scatter"):
        assert names_by_size("a b", collective, GIGABIT) == ["direct"] * 3
        assert names_by_size("a b c d", collective, GIGABIT) == ["direct"] * 3  # binomial: two thirds of the time
        for costs, forwarded in ((GIGABIT, [True, False, False]), (ASSUMED, [True, True, False])):
            names = names_by_size(two_hosts, collective, costs)
            assert [name != "direct" for name in names] == forwarded
    small, medium, large = names_by_size(two_hosts, "all_to_all", GIGABIT)
    assert small.startswith("hierarchical")
    assert (medium, large) == ("direct", "pairwise")  # 16 streams at once would crowd the link
    assert names_by_size("a a b b", "all_to_all", GIGABIT)[1:] == ["direct", "pairwise"]
    assert schedules("a a b b", 0, GIGABIT).choose("all_to_all", 1 << 24, 0).name == "direct"


def test_blocks_of_different_lengths_are_sent_to_their_receivers() -> None:
    for collective in ("all_to_all", "gather"):
        found = schedules("a a b").choose(collective, 100, 1, is_even=False)
        assert (found.low, found.high, found.name, found.segments) == (0, 1 << 19, "direct", 1)


def test_an_algorithm_of_a_user_is_chosen_for_the_roots_for_which_it_works() -> None:
    def free(size: int, root: int = 0) -> Iterator[Step]:
        if root > 0:
            raise ValueError("root 0 only")
        yield from ()

    algorithm("gather", name="free", trust=True)(free)
    try:
        group = MultiHostSchedules(["a", "b"], 0, ASSUMED, lambda schedule: None)
        with pytest.warns(UserWarning, match="gather 'free' for 2 ranks is not chosen .* root 0 only"):
            names = [group.choose("gather", 64, root).name for root in (0, 1)]
    finally:
        unregister("gather", "free")
    assert names == [names[0], "direct"]
    assert names[0].startswith("free#")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    hosts=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    collective=st.sampled_from(COLLECTIVES),
    nbytes=st.integers(0, 35).map(lambda power: (1 << power) - 1),
    measured=st.sampled_from([ASSUMED, SLOW_LINKS]),
    data=st.data(),
)
def test_a_choice_from_caches_equals_one_without(
    hosts: list[int], collective: str, nbytes: int, measured: Mapping[str, Any], data: st.DataObject
) -> None:
    """Another size, root and rank come first, and leave what they computed in the caches."""
    names = " ".join(f"host{number}" for number, ranks in enumerate(hosts) for _ in range(ranks))
    rank, root, other = (data.draw(st.integers(0, sum(hosts) - 1)) for _ in range(3))
    schedules(names, other, measured).choose(collective, nbytes // 16, other)
    schedules(names, other, measured).choose(collective, nbytes, other)
    cached = schedules(names, rank, measured).choose(collective, nbytes, root)
    clear()
    assert cached == schedules(names, rank, measured).choose(collective, nbytes, root)


@pytest.mark.parametrize("nbytes", [1 << 20, 1 << 24])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_each_host_sends_to_one_other_where_the_price_is_the_same(collective: str, nbytes: int) -> None:
    """halving_doubling costs the same as a ring by the model. Between 4 hosts it took 1.28 times as long: it sends
    to two hosts in turn, and a connection that was idle begins slowly."""
    best = recommend(collective, nbytes, Topology.measured((1, 1, 1, 1), GIGABIT)).candidates[0]
    reached = {(src, dst) for step in best.schedule.steps for src, dst in zip(step.src, step.dst, strict=True)}
    assert len(reached) == 4
