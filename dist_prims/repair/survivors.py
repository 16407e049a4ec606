"""The agreement of the survivors of a group: which ranks form the next group, and whether all of them have made it.

The ranks agree by two means that outlive a rank (see :mod:`registers`): a *record* of each rank, which the others read,
and *decisions*, of which the first value that a rank proposes stands. A round has two decisions:

1. Each rank that is left announces the round. When every rank has announced it or is gone, the members are decided:
   the ranks that are left, but of two hosts that cannot reach each other only one (:func:`without_cut_links`). A rank
   that is not among them has to stop: it raises.
2. The members make the group, and announce that they have. When all have, "made" is decided. A rank that cannot make
   the group, or sees that a member is gone, proposes "failed"; if that is decided, the next round begins among these
   members.

"Made" can only be decided after all members have announced it, so no member is left without the group. Two groups
cannot form: the members of a round are decided once, and only they take part in the next round. Whether a rank is gone
is a guess that only determines how long the others wait. If it is wrong, the rank finds that it is not a member.

The protocol is a generator: it yields what it wants to be done, and receives the answers. So the tests explore all
interleavings of the same code that runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []

MADE, FAILED = "made", "failed"

Links = frozenset[tuple[int, int]]  # each between the hosts of two ranks, of which the first has the lower number


@dataclass(frozen=True)
class Record:
    """What a rank has announced last."""

    round: int
    gone: frozenset[int] = frozenset()  # the ranks whose processes have ended, as this rank knows
    store: str = ""  # the address of the store for the next group, from the first member
    made: bool = False
    cut: Links = frozenset()  # the links that do not deliver, as this rank knows

    def text(self) -> str:
        return json.dumps([self.round, sorted(self.gone), self.store, self.made, sorted(self.cut)])

    @classmethod
    def parse(cls, text: str) -> Record:
        number, gone, store, made, cut = json.loads(text)
        return cls(number, frozenset(gone), store, made, frozenset((low, high) for low, high in cut))


@dataclass(frozen=True)
class View:
    """What a rank sees: the records by rank, the decisions, and what it knows about other ranks itself."""

    records: Mapping[int, Record]
    decisions: Mapping[str, str]
    dead: frozenset[int] = frozenset()  # the ranks whose processes have ended
    suspected: frozenset[int] = frozenset()  # others that are believed to be gone
    is_late: bool = False  # nothing has changed for the timeout
    cut: Links = frozenset()  # the links that do not deliver


@dataclass(frozen=True)
class Announce:
    """Request to replace this rank's record."""

    record: Record


@dataclass(frozen=True)
class Look:
    """Request for a View. If the request before was the same, it is answered when the view has changed."""

    awaited: str  # the key of the decision that the rank waits for


@dataclass(frozen=True)
class Decide:
    """Request to propose a value. The answer is the value that stands."""

    key: str
    value: str


@dataclass(frozen=True)
class Serve:
    """Request to the first member to serve a store for the next group. The answer is its address; empty: failed."""


@dataclass(frozen=True)
class Make:
    """Request to make the group of these members. The answer is whether it has been made."""

    members: tuple[int, ...]
    store: str


@dataclass(frozen=True)
class Discard:
    """Request to discard the group that was made last: another member could not make it."""


Request = Announce | Look | Decide | Serve | Make | Discard


class LeftOut(Exception):  # not an error of the program: the caller raises one for the user
    """This rank is not among the members that have been decided, because of ``reason``."""

    def __init__(self, members: tuple[int, ...], reason: str) -> None:
        super().__init__(members, reason)
        self.members, self.reason = members, reason


class OtherMembers(Exception):
    """Further ranks are gone than those that are excluded."""

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__(members)
        self.members = members


class MadeBefore(Exception):
    """An earlier call on this rank, which has raised, was part of making a group that the others have."""


class GaveUp(Exception):
    """The group could not be made several times, although no member was gone."""


_MOST_FAILURES = 3  # rounds in which no member is gone


def survive(
    rank: int, ranks: Iterable[int], excluded: frozenset[int] = frozenset(), hosts: Sequence[Hashable] = ()
) -> Generator[Request, Any, tuple[int, ...]]:
    """Agree with the other survivors, make the next group, and return its members.

    ``ranks``: the ranks that may be members; ``excluded``: the ranks among them that are left out even if alive. With
    excluded ranks all others must be left. If not, no group is made, so that another call can make one. ``hosts``: the
    host of each rank, by default one of its own.
    """
    candidates = expected = tuple(sorted(set(ranks) - excluded))
    failures = 0
    for number in itertools.count():
        members = yield from _decide_members(rank, number, candidates, hosts or range(max(candidates) + 1))
        if excluded and members != expected:
            raise OtherMembers(members)
        if (yield from make_together(rank, number, members)):
            return members
        failures += members == candidates
        if failures == _MOST_FAILURES:
            raise GaveUp
        candidates = members
    raise AssertionError("unreachable")


def _decide_members(
    rank: int, number: int, candidates: tuple[int, ...], hosts: Sequence[Hashable]
) -> Generator[Request, Any, tuple[int, ...]]:
    key = f"members/{number}"
    view: View = yield Look(key)
    own = Record(number, view.dead, cut=view.cut)
    reason = "which did not call shrink() in time"
    if key not in view.decisions:
        reason = "which they have taken for dead or late"
        yield Announce(own)
    while key not in view.decisions:
        view = yield Look(key)
        if (view.dead, view.cut) != (own.gone, own.cut):
            own = dataclasses.replace(own, gone=view.dead, cut=view.cut)
            yield Announce(own)
        here = [each for each in candidates if _is_in(view, each, number) and each not in view.dead]
        if view.is_late or _is_behind(view, number) or set(candidates) <= set(here) | _gone(view, number):
            members = without_cut_links(here, _cut(view), hosts)
            members = json.loads((yield Decide(key, json.dumps(members))))
            break
    else:
        members = json.loads(view.decisions[key])
    if rank not in members:
        ends = [pair for low, high in _cut(view) for pair in ((low, high), (high, low))]
        unreached = {other for each, other in ends if hosts[each] == hosts[rank] and other in members}
        if unreached:
            reason = f"whose host cannot reach the hosts of the ranks {sorted(unreached)}"
        raise LeftOut(tuple(members), reason)
    return tuple(members)


def without_cut_links(ranks: Sequence[int], cut: Iterable[tuple[int, int]], hosts: Sequence[Hashable]) -> list[int]:
    """Return the ranks of hosts that all reach each other; the ranks of other hosts are left out.

    As long as there is a cut link, one host is left out: the host with the most cut links, of several the one with the
    fewest ranks, of several the last one.

    >>> without_cut_links([0, 1, 2, 3], [(0, 2)], hosts="aabb")
    [0, 1]
    >>> without_cut_links([0, 1, 2], [(0, 1), (1, 2)], hosts="abc")
    [0, 2]
    """
    left = list(ranks)
    while links := {frozenset((hosts[low], hosts[high])) for low, high in cut if low in left and high in left}:
        here = [hosts[rank] for rank in left]
        ends = [host for link in links for host in link]
        worst = max(set(ends), key=lambda host: (ends.count(host), -here.count(host), here.index(host)))
        left = [rank for rank in left if hosts[rank] != worst]
    return left


def outcome_key(number: int) -> str:
    """Return the key of the decision whether all members of a round have made the group."""
    return f"outcome/{number}"


def make_together(rank: int, number: int, members: tuple[int, ...]) -> Generator[Request, Any, bool]:
    """Make a group with these members, and return whether all of them have made it."""
    key = outcome_key(number)
    own = Record(number)
    has_made = False
    if rank == members[0]:
        address: str = yield Serve()
        if address:
            own = dataclasses.replace(own, store=address)
            yield Announce(own)
        else:
            yield Decide(key, FAILED)
    while True:
        view: View = yield Look(key)
        if key in view.decisions:
            is_made = view.decisions[key] == MADE
            if is_made and not has_made:
                raise MadeBefore
            if has_made and not is_made:
                yield Discard()
            return is_made
        waiting = [each for each in members if not (_is_in(view, each, number) and view.records[each].made)]
        store = view.records[members[0]].store if _is_in(view, members[0], number) else ""
        if store and not has_made:
            has_made = yield Make(members, store)
            if has_made:
                own = dataclasses.replace(own, made=True)
                yield Announce(own)
            else:
                yield Decide(key, FAILED)
        elif not waiting:
            yield Decide(key, MADE)
        elif view.is_late or _is_behind(view, number) or any(each in _gone(view, number) for each in waiting):
            yield Decide(key, FAILED)


def prevent(number: int) -> Generator[Request, Any, None]:
    """Let the group of this round fail if its outcome has not been decided; raise MadeBefore if it has been made.

    For a rank whose call of :func:`make_together` has raised. Without this it would form a second group with the
    survivors of the old one.
    """
    decided: str = yield Decide(outcome_key(number), FAILED)
    if decided == MADE:
        raise MadeBefore


def _is_in(view: View, rank: int, number: int) -> bool:
    return rank in view.records and view.records[rank].round == number


def _is_behind(view: View, number: int) -> bool:
    """Whether another rank is in a later round. This round has been decided then, though this rank cannot see it."""
    return any(record.round > number for record in view.records.values())


def _cut(view: View) -> set[tuple[int, int]]:
    return set(view.cut).union(*(each.cut for each in view.records.values()))


def _gone(view: View, number: int) -> set[int]:
    """The ranks that need not be waited for: a rank that is in this round counts as gone only if its process ended."""
    known = set(view.dead).union(*(each.gone for each in view.records.values()))
    return known | {each for each in view.suspected if not _is_in(view, each, number)}
