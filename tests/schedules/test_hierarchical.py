"""Hierarchical collectives: what crosses the links, in how many messages, and which ranks exchange them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dist_prims.schedules import COLLECTIVES, Schedule, Step, algorithms, build
from dist_prims.schedules.algorithms._hierarchy import Groups
from dist_prims.schedules.contract import contract
from dist_prims.schedules.host_order import HostOrder
from dist_prims.schedules.program import compile_program
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.steps import CountedStep, Steps
from dist_prims.schedules.topology import Level, Topology

CLUSTER = Level(2e-6, 1e-10), Level(30e-6, 1e-9), 1e-10
EQUAL = ["all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier"]
ANY = ["all_reduce", "broadcast", "reduce"]


def hierarchical(collective: str, hosts: tuple[int, ...], **given: object) -> Schedule:
    return build(collective, "hierarchical", sum(hosts), hosts=hosts, **given)


def crossing(schedule: Schedule, hosts: tuple[int, ...]) -> Step:
    """All transfers between hosts."""
    host = np.repeat(np.arange(len(hosts)), hosts)
    return Step.concat([step.take(host[step.src] != host[step.dst]) for step in schedule.steps])


def test_ranks_that_are_not_consecutive_change_no_limit_of_steps() -> None:
    """Large groups with one message a step had more steps than the limit once their ranks were renumbered."""
    renumbered = HostOrder.of(["a", "b", "a", "b"]).build("all_to_all", "hierarchical")
    assert renumbered.steps._most == hierarchical("all_to_all", (2, 2)).steps._most > 100_000


def test_the_rows_of_a_small_step_are_computed_when_they_are_read() -> None:
    """A price needs the messages only, but each small step computed a row for each of its chunks all the same."""
    computed: list[Step] = []

    def rows() -> Step:
        computed.append(Step(src=0, dst=1, chunk=[0, 1]))
        return computed[-1]

    groups = Groups(np.array([[0, 1], [2, 3]]), np.array([0, 2]), 1)
    spread = groups.spread(CountedStep(Step(src=0, dst=1, chunk=0), 2, rows))
    assert (len(spread), len(spread.narrow[0]), len(computed)) == (4, 2, 0)
    assert [row[:3] for row in spread.rows()] == [(0, 1, 0), (0, 1, 1), (2, 3, 2), (2, 3, 3)]
    assert len(computed) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hosts", [(1,), (3, 1), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize(("collective", "kind"), [("broadcast", "all_gather"), ("reduce", "reduce_scatter")])
def test_uneven_hosts_every_root_and_every_phase(collective: str, kind: str, hosts: tuple[int, ...]) -> None:
    inners, outers = ({*algorithms(each)} - {"hierarchical"} for each in (kind, collective))
    for inner, outer, root in itertools.product(sorted(inners), sorted(outers), range(sum(hosts))):
        hierarchical(collective, hosts, inner=inner, outer=outer, root=root).verify()


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3, 3), (1, 1, 1), (4,), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("collective", ["gather", "scatter", "all_to_all", "barrier"])
def test_equal_hosts_every_root_and_every_phase(collective: str, hosts: tuple[int, ...]) -> None:
    names = [name for name in algorithms(collective) if name != "hierarchical"]
    roots = range(sum(hosts)) if collective in ("gather", "scatter") else [None]
    for inner, outer, root in itertools.product(names, names, roots):
        given = {} if root is None else {"root": root}
        hierarchical(collective, hosts, inner=inner, outer=outer, **given).verify()


@pytest.mark.parametrize("hosts", [(2, 2), (3, 3, 3), (2, 4), (1, 2, 3)])
def test_the_data_of_a_broadcast_or_reduce_crosses_each_link_once_in_a_share_of_each_rank(
    hosts: tuple[int, ...],
) -> None:
    for root in range(sum(hosts)):
        own = int(np.searchsorted(np.cumsum(hosts), root, side="right"))
        others = [int(host != own) for host in range(len(hosts))]
        reach, collect = (hierarchical(kind, hosts, root=root, outer="binomial") for kind in ("broadcast", "reduce"))
        for schedule, way in ((reach, "received"), (collect, "sent")):
            far = crossing(schedule, hosts)
            ends = np.searchsorted(np.cumsum(hosts), far.dst if way == "received" else far.src, side="right")
            assert (np.bincount(ends, minlength=len(hosts)) / schedule.chunks).tolist() == others
            ranks = np.bincount(far.dst if way == "received" else far.src, minlength=sum(hosts))
            shares = [schedule.chunks // m * (host != own) for host, m in enumerate(hosts) for _ in range(m)]
            assert ranks.tolist() == shares  # every rank of a host carries as much as the others
        assert not any((step.dst == root).any() for step in reach.steps)


@pytest.mark.parametrize(("number", "each"), [(2, 2), (3, 2), (3, 4)])
def test_every_block_crosses_one_link_once(number: int, each: int) -> None:
    hosts, size = (each,) * number, number * each
    last = size - 1
    gathered = crossing(hierarchical("gather", hosts, root=last), hosts)
    assert sorted(gathered.chunk[gathered.dst >= size - each].tolist()) == [*range(size - each)]
    scattered = crossing(hierarchical("scatter", hosts, root=last), hosts)
    assert sorted(scattered.chunk[scattered.src >= size - each].tolist()) == [*range(size - each)]
    for schedule in (hierarchical("gather", hosts, outer="direct"), hierarchical("scatter", hosts, outer="direct")):
        far = crossing(schedule, hosts)
        assert len(far) == size - each
        assert np.array_equal(far.src % each, far.dst % each)  # only ranks with the same place meet
    exchanged = crossing(hierarchical("all_to_all", hosts), hosts)
    for ends in (exchanged.src, exchanged.dst):
        assert np.bincount(ends // each).tolist() == [each * (size - each)] * number


@pytest.mark.parametrize(("number", "each"), [(2, 2), (3, 4)])
def test_an_all_to_all_sends_one_message_to_few_ranks(number: int, each: int) -> None:
    """Traeff and Hunold: m-1 messages within the host and one to each other host, with the blocks of m ranks."""
    schedule = hierarchical("all_to_all", (each,) * number)
    pairs = [(src, dst) for step in schedule.steps for src, dst in {row[:2] for row in step.rows()} if src != dst]
    assert len(pairs) == len(set(pairs)) == number * each * (each - 1 + number - 1)
    assert all(src // each == dst // each or src % each == dst % each for src, dst in pairs)


def test_a_barrier_meets_its_host_first() -> None:
    schedule = hierarchical("barrier", (4, 4, 4, 4))
    partners = [sorted({dst for src, dst, *_ in step.rows() if src == 5}) for step in schedule.steps]
    assert partners == [[6], [7], [9], [13]]


def test_a_reduce_adds_within_the_hosts_first() -> None:
    assert str(hierarchical("reduce", (2, 2)).order(chunk=0)) in ("(r1+r0)+(r3+r2)", "(r0+r1)+(r2+r3)")


@pytest.mark.parametrize("collective", EQUAL)
def test_uneven_hosts_are_refused_where_blocks_need_equal_places(collective: str) -> None:
    with pytest.raises(ValueError, match=r"hosts=\(2, 1\) must have equally many ranks"):
        hierarchical(collective, (2, 1))


@pytest.mark.parametrize("collective", ANY + EQUAL)
@pytest.mark.parametrize("parameter", ["inner", "outer"])
def test_hierarchies_are_not_nested(collective: str, parameter: str) -> None:
    with pytest.raises(ValueError, match=f"{parameter}='hierarchical' cannot be nested; use a flat algorithm of"):
        hierarchical(collective, (2, 2), **{parameter: "hierarchical"})


@pytest.mark.parametrize("collective", ANY + EQUAL)
def test_recommend_prices_hierarchies(collective: str) -> None:
    for hosts in ((2, 2), (2, 3), (4,), (1, 1)):
        names = {each.schedule.algorithm for each in recommend(collective, 1e6, Topology(hosts, *CLUSTER)).candidates}
        assert ("hierarchical" in names) == (hosts == (2, 2) or (hosts == (2, 3) and collective in ANY))


def test_large_data_over_many_hosts_is_broadcast_by_all_ranks() -> None:
    for collective in ("broadcast", "reduce"):
        best = recommend(collective, 1e8, Topology((8,) * 4, *CLUSTER)).candidates[0]
        assert best.schedule.algorithm == "hierarchical"
    small = recommend("all_to_all", 1e3, Topology((4,) * 4, *CLUSTER)).candidates[0]
    assert small.schedule.algorithm == "hierarchical"


@pytest.mark.parametrize("hosts", [(1,), (2, 2), (3, 1), (2, 3, 3), (3, 3, 3)])
@pytest.mark.parametrize("collective", [*ANY, *EQUAL])
def test_programs_by_phase_are_those_of_single_chunks(collective: str, hosts: tuple[int, ...]) -> None:
    if collective in EQUAL and len(set(hosts)) > 1:
        pytest.skip("only for hosts with equally many ranks")
    by_phase = hierarchical(collective, hosts)
    by_chunk = replace(by_phase, steps=Steps(lambda: iter(by_phase.steps)))
    if collective in ANY and hosts == (2, 3, 3):
        assert max(width for _, width in by_phase.steps.with_width()) > 1
    for rank in range(sum(hosts)):
        assert compile_program(by_phase, rank) == compile_program(by_chunk, rank)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_contract_says_whether_all_ranks_start_with_the_same(collective: str) -> None:
    of = contract(collective, size=4, chunks=1 if collective == "barrier" else 4)
    starts = {(tuple(start.chunk.tolist()), tuple(start.piece.tolist())) for start in map(of.start, range(4))}
    assert of.same_start == (len(starts) == 1)
