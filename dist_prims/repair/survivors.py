"""The agreement of the survivors of a group: which ranks form the next group, and whether all of them have made it.

The *survivors* are the ranks that are left after a failure. They agree by *registers* (:mod:`.registers`), which
outlive a rank and hold two kinds of texts:

- *records*: what each rank has announced last. Only the rank itself replaces its record; all ranks read it.
- *decisions*, by key. Any rank may propose a value for a key. The first proposal becomes the decision and stays.

The agreement proceeds in rounds, which are numbered from 0. Round N has two decisions:

1. ``members/N``. Each survivor announces that it is in the round. When every candidate is in the round or gone, the
   candidates in the round are decided to be the members, but of two hosts that cannot reach each other only one host
   (:func:`without_cut_links`). A rank that is not a member has to stop: it raises LeftOut.
2. ``outcome/N``. The members make the group together, and each announces that it has made it. When all have announced
   it, they propose "made". A member that cannot make the group, or sees that another member is gone, proposes
   "failed". If "failed" is decided, the next round begins with these members as candidates.

"Made" can only be decided after all members have announced it, so no member is left without the group. Two groups
cannot form: the members of a round are decided once, and only they take part in the next round. Whether a rank is gone
is a guess that only determines how long the others wait. If it is wrong, the rank finds that it is not a member.

Each rank runs the protocol as a generator without I/O: it yields a :data:`Request`, and RepairAttempt performs the
request and sends the answer. The tests explore all interleavings of the same code, with a model in the place of
RepairAttempt.
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

# Cut links, which do not deliver: pairs of ranks, the lower first, whose hosts cannot reach each other.
Links = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Record:
    """What a rank has announced last."""

    round: int
    gone: frozenset[int] = frozenset()  # the ranks whose processes have ended, as this rank knows
    store: str = ""  # announced by the first member: the address of the store at which the members meet
    made: bool = False  # whether this rank has made the group of the round
    cut: Links = frozenset()  # as this rank knows

    def text(self) -> str:
        return json.dumps([self.round, sorted(self.gone), self.store, self.made, sorted(self.cut)])

    @classmethod
    def parse(cls, text: str) -> Record:
        round_number, gone, store, made, cut = json.loads(text)
        return cls(round_number, frozenset(gone), store, made, frozenset((low, high) for low, high in cut))


@dataclass(frozen=True)
class View:
    """What a rank sees: the registers, and what this rank itself knows about other ranks."""

    records: Mapping[int, Record]  # by rank
    decisions: Mapping[str, str]  # by key
    dead: frozenset[int] = frozenset()  # the ranks whose processes have ended
    suspected: frozenset[int] = frozenset()  # ranks that are believed to be gone
    is_late: bool = False  # whether the view has not changed for the timeout
    cut: Links = frozenset()


@dataclass(frozen=True)
class Announce:
    """Request to replace this rank's record."""

    record: Record


@dataclass(frozen=True)
class Look:
    """Request for a View. If the last request was the same, the answer comes when the view has changed."""

    awaited: str  # the key of the decision that the rank waits for: requests for different keys are not the same


@dataclass(frozen=True)
class Decide:
    """Request to propose a value for a key. The answer is the decision, which may be another value."""

    key: str
    value: str


@dataclass(frozen=True)
class Serve:
    """Request to serve a store for the next group. The answer is the address of the store, empty after a failure."""


@dataclass(frozen=True)
class Make:
    """Request to make the group of these members. The answer is whether this rank has made it."""

    members: tuple[int, ...]
    store: str  # the address of the store at which they meet


@dataclass(frozen=True)
class Discard:
    """Request to discard the group that was made last: another member could not make it."""


Request = Announce | Look | Decide | Serve | Make | Discard


# The ends of an agreement without a group. The callers turn them into errors for the user.


@dataclass(eq=False)
class LeftOut(Exception):
    """This rank is not among the members that have been decided. ``reason`` completes "go on without this rank"."""

    members: tuple[int, ...]
    reason: str


@dataclass(eq=False)
class OtherMembers(Exception):
    """The members that have been decided are not all ranks that are not excluded: further ranks are gone."""

    members: tuple[int, ...]


class MadeBefore(Exception):
    """The members have made this group already: this rank took part in an earlier call, which has raised here."""


class GaveUp(Exception):
    """The group could not be made in several rounds, although all candidates were members."""


_MOST_FAILURES = 3  # rounds that fail although all candidates were members


def survive(
    rank: int, ranks: Iterable[int], excluded: frozenset[int] = frozenset(), hosts: Sequence[Hashable] = ()
) -> Generator[Request, Any, tuple[int, ...]]:
    """Agree with the other survivors, make the next group, and return its members.

    Args:
        rank: this rank in the old group, as all other ranks here.
        ranks: the ranks that may be members.
        excluded: the ranks among them that are left out even if alive. If any rank is excluded, all other ranks must be
            left. Otherwise OtherMembers is raised before a group is made, so that another call can make one.
        hosts: the host of each rank; by default each rank has a host of its own.
    """
    candidates = expected = tuple(sorted(set(ranks) - excluded))
    failures = 0
    for round_number in itertools.count():
        members = yield from _decide_members(rank, round_number, candidates, hosts or range(max(candidates) + 1))
        if excluded and members != expected:
            raise OtherMembers(members)
        if (yield from make_together(rank, round_number, members)):
            return members
        failures += members == candidates
        if failures == _MOST_FAILURES:
            raise GaveUp
        candidates = members
    raise AssertionError("unreachable")


def _decide_members(
    rank: int, round_number: int, candidates: tuple[int, ...], hosts: Sequence[Hashable]
) -> Generator[Request, Any, tuple[int, ...]]:
    """Agree on the members of a round and return them, or raise LeftOut if this rank is not a member."""
    key = f"members/{round_number}"
    # 1. Announce that this rank is in the round, unless the members have been decided without it.
    view: View = yield Look(key)
    own = Record(round_number, view.dead, cut=view.cut)
    reason = f"which did not {'make the group with them' if round_number else 'call shrink()'} in time"
    if key not in view.decisions:
        reason = "which they have taken for dead or late"
        yield Announce(own)
    # 2. Look until every candidate is in the round or gone, then propose the members. A death or a cut link that this
    # rank sees meanwhile is announced, because other ranks may not see it.
    while key not in view.decisions:
        view = yield Look(key)
        if (view.dead, view.cut) != (own.gone, own.cut):
            own = dataclasses.replace(own, gone=view.dead, cut=view.cut)
            yield Announce(own)
        present = [other for other in candidates if _is_in_round(view, other, round_number) and other not in view.dead]
        is_complete = set(candidates) <= set(present) | _gone_ranks(view, round_number)
        if is_complete or view.is_late or _is_behind(view, round_number):
            proposal = without_cut_links(present, _cut_links(view), hosts)
            members = json.loads((yield Decide(key, json.dumps(proposal))))
            break
    else:
        members = json.loads(view.decisions[key])
    # 3. A rank that is not a member has to stop, and says why.
    if rank not in members:
        links = _cut_links(view)
        both_ways = links | {(high, low) for low, high in links}
        unreached = {other for near, other in both_ways if hosts[near] == hosts[rank] and other in members}
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
        hosts_left = [hosts[rank] for rank in left]
        link_ends = [host for link in links for host in link]
        worst = max(
            set(link_ends), key=lambda host: (link_ends.count(host), -hosts_left.count(host), hosts_left.index(host))
        )
        left = [rank for rank in left if hosts[rank] != worst]
    return left


def outcome_key(round_number: int) -> str:
    """Return the key of the decision whether all members of a round have made the group."""
    return f"outcome/{round_number}"


def make_together(rank: int, round_number: int, members: tuple[int, ...]) -> Generator[Request, Any, bool]:
    """Make a group with these members, and return whether all of them have made it."""
    key = outcome_key(round_number)
    own = Record(round_number)
    has_made = False
    # 1. The first member serves the store at which the members meet, and announces its address.
    if rank == members[0]:
        address: str = yield Serve()
        if address:
            own = dataclasses.replace(own, store=address)
            yield Announce(own)
        else:
            yield Decide(key, FAILED)
    while True:
        # 2. Look until the outcome has been decided.
        view: View = yield Look(key)
        if key in view.decisions:
            is_made = view.decisions[key] == MADE
            if is_made and not has_made:
                raise MadeBefore
            if has_made and not is_made:
                yield Discard()
            return is_made
        is_in_round = {member: _is_in_round(view, member, round_number) for member in members}
        unmade = [member for member in members if not (is_in_round[member] and view.records[member].made)]
        store = view.records[members[0]].store if is_in_round[members[0]] else ""
        # 3. Make the group once its store is known, and announce that.
        if store and not has_made:
            has_made = yield Make(members, store)
            if has_made:
                own = dataclasses.replace(own, made=True)
                yield Announce(own)
            else:
                yield Decide(key, FAILED)
        # 4. Propose the outcome. No answer is needed: step 2 sees the decision.
        elif not unmade:
            yield Decide(key, MADE)
        elif view.is_late or _is_behind(view, round_number) or _gone_ranks(view, round_number) & set(unmade):
            yield Decide(key, FAILED)


def prevent_group(round_number: int) -> Generator[Request, Any, None]:
    """Let the group of this round fail if its outcome has not been decided; raise MadeBefore if it has been made.

    For a rank whose call of :func:`make_together` has raised. Without this it would form a second group with the
    survivors of the old one.
    """
    outcome: str = yield Decide(outcome_key(round_number), FAILED)
    if outcome == MADE:
        raise MadeBefore


def _is_in_round(view: View, rank: int, round_number: int) -> bool:
    return rank in view.records and view.records[rank].round == round_number


def _is_behind(view: View, round_number: int) -> bool:
    """Whether another rank is in a later round. This round has been decided then, though this rank cannot see it."""
    return any(record.round > round_number for record in view.records.values())


def _cut_links(view: View) -> set[tuple[int, int]]:
    return set(view.cut).union(*(record.cut for record in view.records.values()))


def _gone_ranks(view: View, round_number: int) -> set[int]:
    """The ranks for which no rank needs to wait: dead ones, and suspected ones that are not in this round."""
    dead = set(view.dead).union(*(record.gone for record in view.records.values()))
    return dead | {rank for rank in view.suspected if not _is_in_round(view, rank, round_number)}
