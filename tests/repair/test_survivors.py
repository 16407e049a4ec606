"""The agreement of survivors: every interleaving of a few ranks, with deaths, wrong suspicions and timeouts.

The explored code is that which runs; the model replaces the registers, the processes and the making of a group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from dist_prims.repair.survivors import (
    Announce,
    Decide,
    Discard,
    GaveUp,
    LeftOut,
    Look,
    Make,
    Record,
    Serve,
    View,
    survive,
)
from tests.helpers.exploration import Process, explore


class Budget(NamedTuple):
    """How often something may still happen, over all ranks."""

    deaths: int = 0
    timeouts: int = 0  # that fire although a rank is only slow
    suspicions: int = 0  # of a rank that is only slow
    failures: int = 0  # to make a group, although all members are there


class Rank(NamedTuple):
    process: Process
    is_alive: bool = True
    last: Any = None  # the last request and the view that answered it, if it was a Look


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    records: tuple[tuple[int, Record], ...]
    decisions: tuple[tuple[str, str], ...]
    budget: Budget


def start(size: int, budget: Budget) -> State:
    ranks = [Rank(Process(functools.partial(survive, rank, range(size)))) for rank in range(size)]
    return State(tuple(ranks), (), (), budget)


def key(state: State) -> Any:
    ranks = tuple((each.process.state, each.is_alive, repr(each.last)) for each in state.ranks)
    return ranks, state.records, state.decisions, state.budget


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
        for answer, last, after, budget in answers(state, rank, all_late):
            yield changed(after, rank, Rank(one.process.after(answer), True, last), budget)


def changed(state: State, rank: int, one: Rank, budget: Budget) -> State:
    return state._replace(ranks=(*state.ranks[:rank], one, *state.ranks[rank + 1 :]), budget=budget)


def answers(state: State, rank: int, all_late: bool) -> Iterator[tuple[Any, Any, State, Budget]]:
    budget, request = state.budget, state.ranks[rank].process.request
    match request:
        case Announce(record):
            records = {**dict(state.records), rank: record}
            yield None, None, state._replace(records=tuple(sorted(records.items()))), budget
        case Decide(name, value):
            decisions = {name: value, **dict(state.decisions)}
            yield decisions[name], None, state._replace(decisions=tuple(sorted(decisions.items()))), budget
        case Look():
            for view, after in views(state, rank, all_late):
                if state.ranks[rank].last != (request, view):
                    yield view, (request, view), state, after
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
    view = View(dict(state.records), dict(state.decisions), dead)
    yield view, budget
    last = state.ranks[rank].last
    if last and last[1].dead != dead:
        yield dataclasses.replace(view, dead=last[1].dead), budget  # the death is not known yet
    if all_late:
        yield dataclasses.replace(view, is_late=True), budget
    if budget.timeouts:
        yield dataclasses.replace(view, is_late=True), budget._replace(timeouts=budget.timeouts - 1)
    if budget.suspicions:
        other = (rank + 1) % len(state.ranks)
        yield (
            dataclasses.replace(view, suspected=frozenset({other})),
            budget._replace(suspicions=budget.suspicions - 1),
        )


def check(state: State) -> None:
    ends = {rank: one.process.end for rank, one in enumerate(state.ranks) if one.is_alive}
    assert all(ends.values()), f"a rank waits without end: {ends}"
    groups = {end.value for end in ends.values() if end and end.error is None}
    assert len(groups) <= 1, f"two groups: {ends}"
    for members in groups:
        assert all(end is None or (end.error is None) == (rank in members) for rank, end in ends.items()), ends
    assert {end.error for end in ends.values() if end and end.error} <= {LeftOut, GaveUp}, ends


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "budget"),
    [
        (2, Budget(deaths=1, timeouts=1, suspicions=1, failures=1)),
        (3, Budget()),
        (3, Budget(deaths=1)),
        (3, Budget(timeouts=1)),
        (3, Budget(suspicions=1)),
        (3, Budget(failures=1)),
        pytest.param(3, Budget(deaths=2), marks=pytest.mark.slow),
    ],
)
def test_all_interleavings(size: int, budget: Budget) -> None:
    """Every rank ends; those that go on are in one group, and no member is left without it."""
    explore(start(size, budget), key, following, check, most=3_000_000)
