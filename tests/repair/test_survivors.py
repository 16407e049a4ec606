"""The agreement of survivors: every interleaving of a few ranks, with deaths, wrong suspicions and timeouts.

The explored code is that which runs; the model replaces the registers, the processes and the making of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import pytest
from exploration import Process, explore

from dist_prims.repair.survivors import (
    Announce,
    Decide,
    Discard,
    GaveUp,
    LeftOut,
    Look,
    MadeBefore,
    Make,
    Record,
    Serve,
    View,
    make_together,
    prevent_group,
    survive,
)

GROW, SHRINK = "grow", "shrink"  # agreements


class Budget(NamedTuple):
    """How often something may still happen, over all ranks."""

    deaths: int = 0
    timeouts: int = 0  # that fire although a rank is only slow
    suspicions: int = 0  # of a rank that is only slow
    failures: int = 0  # to make a group, although all members are there
    cuts: int = 0  # of a rank in grow(), which raises


class CutOff(Exception):
    """The rank cannot reach the others."""


class OneView(View):
    """A view that is equal to itself only: ``view_of`` makes one of each kind."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@functools.cache
def view_of(records: Any, decisions: Any, dead: frozenset[int], suspected: frozenset[int], is_late: bool) -> OneView:
    return OneView(dict(records), dict(decisions), dead, suspected, is_late)


class Begin(NamedTuple):
    """Request to the model: what follows is another agreement of the group."""

    agreement: str


class Rank(NamedTuple):
    process: Process
    is_alive: bool = True
    last: Any = None  # the last request and the view that answered it, if it was a Look
    agreement: str = ""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    records: tuple[tuple[tuple[str, int], Record], ...]  # by agreement and rank
    decisions: tuple[tuple[tuple[str, str], str], ...]  # by agreement and key
    budget: Budget


Program = Callable[[int, range], Generator[Any, Any, Any]]  # of a rank


def start(program: Program, size: int, budget: Budget) -> State:
    ranks = [Rank(Process(functools.partial(program, rank, range(size)))) for rank in range(size)]
    return State(tuple(ranks), (), (), budget)


def following(state: State) -> Iterator[State]:
    found = list(steps(state))
    yield from found or list(steps(state, all_late=True))


def steps(state: State, all_late: bool = False) -> Iterator[State]:
    for rank, one in enumerate(state.ranks):
        if not one.is_alive or one.process.end:
            continue
        if state.budget.deaths:
            budget = state.budget._replace(deaths=state.budget.deaths - 1)
            yield changed(state, rank, one._replace(is_alive=False), budget)
        if isinstance(one.process.request, Begin):
            agreement = one.process.request.agreement
            yield changed(state, rank, Rank(one.process.after(None), agreement=agreement), state.budget)
            continue
        if state.budget.cuts and one.agreement == GROW:
            budget = state.budget._replace(cuts=state.budget.cuts - 1)
            yield changed(state, rank, Rank(one.process.after(CutOff()), agreement=GROW), budget)
        for answer, last, after, budget in answers(state, rank, all_late):
            yield changed(after, rank, one._replace(process=one.process.after(answer), last=last), budget)


def changed(state: State, rank: int, one: Rank, budget: Budget) -> State:
    return state._replace(ranks=(*state.ranks[:rank], one, *state.ranks[rank + 1 :]), budget=budget)


def answers(state: State, rank: int, all_late: bool) -> Iterator[tuple[Any, Any, State, Budget]]:
    budget, request, agreement = state.budget, state.ranks[rank].process.request, state.ranks[rank].agreement
    match request:
        case Announce(record):
            records = {**dict(state.records), (agreement, rank): record}
            yield None, None, state._replace(records=tuple(sorted(records.items()))), budget
        case Decide(name, value):
            decisions = {(agreement, name): value, **dict(state.decisions)}
            after = state._replace(decisions=tuple(sorted(decisions.items())))
            yield decisions[agreement, name], None, after, budget
        case Look():
            for view, left in views(state, rank, all_late):
                if state.ranks[rank].last != (request, view):
                    yield view, (request, view), state, left
        case Serve():
            yield "address", None, state, budget
            if budget.failures:
                yield "", None, state, budget._replace(failures=budget.failures - 1)
        case Make(members, _):
            yield True, None, state, budget
            if not all(state.ranks[each].is_alive for each in members):
                yield False, None, state, budget
            elif budget.failures:
                yield False, None, state, budget._replace(failures=budget.failures - 1)
        case Discard():
            yield None, None, state, budget


def views(state: State, rank: int, all_late: bool) -> Iterator[tuple[View, Budget]]:
    budget = state.budget
    dead = frozenset(each for each, one in enumerate(state.ranks) if not one.is_alive)
    agreement = state.ranks[rank].agreement
    records = tuple((each, record) for (name, each), record in state.records if name == agreement)
    decisions = tuple((each, value) for (name, each), value in state.decisions if name == agreement)
    view = functools.partial(view_of, records, decisions)
    none: frozenset[int] = frozenset()
    yield view(dead, none, False), budget
    last = state.ranks[rank].last
    if last and last[1].dead != dead:
        yield view(last[1].dead, none, False), budget  # the death is not known yet
    if all_late:
        yield view(dead, none, True), budget
    if budget.timeouts:
        yield view(dead, none, True), budget._replace(timeouts=budget.timeouts - 1)
    if budget.suspicions:
        other = (rank + 1) % len(state.ranks)
        yield view(dead, frozenset({other}), False), budget._replace(suspicions=budget.suspicions - 1)


def check_one_group(state: State, errors: tuple[type[Exception], ...] = (LeftOut, GaveUp, MadeBefore, CutOff)) -> None:
    ends = ends_of(state)
    assert all(ends.values()), f"a rank waits without end: {ends}"
    groups = {end.value for end in ends.values() if end and end.error is None}
    assert len(groups) <= 1, f"two groups: {ends}"
    assert {end.error for end in ends.values() if end and end.error} <= {*errors}, ends


def check_members(state: State) -> None:
    ends = ends_of(state)
    check_one_group(state, (LeftOut, GaveUp))
    for members in {end.value for end in ends.values() if end and end.error is None}:
        assert all(end is None or (end.error is None) == (rank in members) for rank, end in ends.items()), ends


def ends_of(state: State) -> dict[int, Any]:
    return {rank: one.process.end for rank, one in enumerate(state.ranks) if one.is_alive}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "budget"),
    [
        (2, Budget(deaths=1, timeouts=1, suspicions=1)),  # these three have all pairs of what may happen
        (2, Budget(deaths=1, suspicions=1, failures=1)),
        (2, Budget(timeouts=1, failures=1)),
        (3, Budget(failures=1)),
        pytest.param(2, Budget(deaths=1, timeouts=1, suspicions=1, failures=1), marks=pytest.mark.slow),
        pytest.param(3, Budget(deaths=1), marks=pytest.mark.slow),
        pytest.param(3, Budget(timeouts=1), marks=pytest.mark.slow),
        pytest.param(3, Budget(suspicions=1), marks=pytest.mark.slow),
        pytest.param(3, Budget(deaths=2), marks=pytest.mark.slow),
    ],
)
def test_all_interleavings(size: int, budget: Budget) -> None:
    """Every rank ends; those that go on are in one group, and no member is left without it."""
    explore(start(survive, size, budget), following, check_members, most=3_000_000)


IN_ROUND_0 = {rank: Record(0) for rank in range(3)}


def requests_of_rank_0(*views: View) -> list[Any]:
    """What rank 0 of three asks for, apart from looking, if it sees these views one after the other."""
    agreement, found, left = survive(0, range(3)), [], list(views)
    request = next(agreement)
    while left or not isinstance(request, Look):
        if isinstance(request, Look):
            request = agreement.send(left.pop(0))
        else:
            found.append(request)
            request = agreement.send(request.value if isinstance(request, Decide) else "address")
    return found


def test_a_death_is_announced_when_it_becomes_known_and_once() -> None:
    """The others may not see it themselves, and would wait for the dead rank until they are late."""
    alone, known = View({}, {}), View({}, {}, dead=frozenset({2}))
    assert requests_of_rank_0(alone, alone, known, known) == [
        Announce(Record(0)),
        Announce(Record(0, gone=frozenset({2}))),
    ]


def test_a_rank_that_died_in_the_round_is_no_member() -> None:
    *_, decided, _, _ = requests_of_rank_0(View({}, {}), View(IN_ROUND_0, {}, dead=frozenset({2})))
    assert decided == Decide("members/0", "[0, 1]")


def test_a_rank_that_was_left_out_is_not_waited_for_in_the_next_round() -> None:
    failed = {"members/0": "[0, 1]", "outcome/0": "failed"}
    in_round_1 = View({0: Record(1), 1: Record(1), 2: Record(0)}, failed)
    *_, decided, _, _ = requests_of_rank_0(*[View(IN_ROUND_0, failed)] * 3, in_round_1)
    assert decided == Decide("members/1", "[0, 1]")


def grow_then_shrink(rank: int, ranks: range) -> Generator[Any, Any, Any]:
    """What the running ranks do if a call of grow() fails on one of them: shrink() afterwards, by another agreement."""
    yield Begin(GROW)
    is_made: bool | None = None
    try:
        is_made = yield from make_together(rank, 0, tuple(ranks))
    except CutOff:
        yield from prevent_group(0)
    if is_made:
        return GROW
    yield Begin(SHRINK)
    return (yield from survive(rank, ranks))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "budget"),
    [
        (2, Budget(cuts=2)),
        (2, Budget(cuts=1, deaths=1, timeouts=1)),
        pytest.param(3, Budget(cuts=1), marks=pytest.mark.slow),
    ],
)
def test_all_interleavings_of_a_call_of_grow_that_fails(size: int, budget: Budget) -> None:
    """A rank that is cut off in grow() does not know whether the others have made the group. Its shrink() forms no
    second one."""
    explore(start(grow_then_shrink, size, budget), following, check_one_group, most=3_000_000)
