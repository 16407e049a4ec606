"""Registers on several servers, of which a majority must be reachable: the agreement of survivors on several hosts.

Up to five ranks of a group that spans hosts serve registers, at first the first rank of each host. A record is written
to all of them, and read from a majority. A decision is made by Paxos. An acceptor is a key of a server, which the
proposer changes by compare-and-set, so a server needs to know nothing about Paxos:

1. The proposer raises the ballot that each acceptor has promised, and learns the value that it has accepted last. A
   promise counts only if this proposal has raised it: a rank that proposes again after an error may have another
   value.
2. Where a majority has promised, the proposer lets a majority accept: the value with the highest ballot among the
   accepted ones, or its own if there is none.

Ranks that reach no majority, as on the smaller side of a network that is cut in two, raise: so no second group forms.

The steps are generators, like those of :mod:`survivors`, which the tests explore in all interleavings.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..rendezvous.register_server import GroupRegisters, RegisterClient

__all__: list[str] = []

Server = GroupRegisters | RegisterClient

_TIME_TO_RETURN, _LONGEST_TIME_TO_RETURN = 1.0, 8.0  # seconds


class NoMajorityError(Exception):
    """Less than a majority of the servers can be reached."""


@dataclass(frozen=True)
class CompareAndSet:
    """Request to change a key of one acceptor from ``expected`` to ``desired``.

    The answer is the value of the key afterwards, or None if the acceptor cannot be reached. "" stands for no value.
    """

    acceptor: int
    key: str
    expected: str
    desired: str


@dataclass(frozen=True)
class AcceptorState:
    """The state of an acceptor."""

    promised: int = 0
    ballot: int = 0  # of the value that it has accepted, 0 for none
    value: str = ""

    def text(self) -> str:
        return json.dumps([self.promised, self.ballot, self.value])

    @classmethod
    def parse(cls, text: str) -> AcceptorState:
        return cls(*json.loads(text)) if text else cls()


Ask = Generator[CompareAndSet, "str | None", Any]


def propose(key: str, value: str, rank: int, ranks: int, acceptors: int) -> Ask:
    """Return the value that stands, which is ``value`` if there was none. Raise NoMajorityError."""
    majority = acceptors // 2 + 1
    ballot = ranks + rank
    while True:
        answers = yield from _ask_all(key, acceptors, functools.partial(_promised, ballot))
        states = [state for state, _ in answers]
        if accepted := _decided(states, majority):
            return accepted
        if sum(is_changed for _, is_changed in answers) >= majority:
            last = max(states, key=lambda state: state.ballot)
            chosen = last.value if last.ballot else value
            answers = yield from _ask_all(key, acceptors, functools.partial(_accepted, ballot, chosen))
            states = [state for state, _ in answers]
            if sum(state.ballot == ballot for state in states) >= majority:
                return chosen
        ballot = (max(state.promised for state in states) // ranks + 1) * ranks + rank


def _promised(ballot: int, state: AcceptorState) -> AcceptorState:
    return AcceptorState(ballot, state.ballot, state.value) if ballot > state.promised else state


def _accepted(ballot: int, value: str, state: AcceptorState) -> AcceptorState:
    return AcceptorState(ballot, ballot, value) if ballot >= state.promised else state


def _decided(states: Sequence[AcceptorState], majority: int) -> str:
    """The value that a majority has accepted with one ballot; empty if there is none."""
    for state in states:
        if state.ballot and sum(each.ballot == state.ballot for each in states) >= majority:
            return state.value
    return ""


def _ask_all(key: str, acceptors: int, change: Callable[[AcceptorState], AcceptorState]) -> Ask:
    """Change the state of each acceptor that can be reached; return the states afterwards, and whether each was
    changed by this call."""
    answers: list[tuple[AcceptorState, bool]] = []
    for acceptor in range(acceptors):
        expected = AcceptorState().text()
        found = yield CompareAndSet(acceptor, key, "", expected)
        while found is not None:
            state = AcceptorState.parse(found)
            desired = change(state)
            if desired == state:
                answers.append((state, False))
                break
            expected, found = found, (yield CompareAndSet(acceptor, key, found, desired.text()))
            if found == desired.text():
                answers.append((desired, True))
                break
    if len(answers) <= acceptors // 2:
        raise NoMajorityError
    return answers


class Acceptor:
    """One of the servers. ``connect`` opens a connection, or raises OSError as its calls may.

    A call returns None if the server cannot be reached. It is then not called for a second, and twice as long after
    each further failure. A server that ``is_suspected`` counts as one that could not be reached twice.
    """

    def __init__(self, connect: Callable[[], Server], is_suspected: bool = False) -> None:
        self._connect = connect
        self._pause = 2 * _TIME_TO_RETURN if is_suspected else _TIME_TO_RETURN
        self._resume = time.monotonic() + self._pause if is_suspected else -math.inf
        self._client: Server | None = None

    def call(self, operation: str, *arguments: Any) -> Any:
        if time.monotonic() < self._resume:
            return None
        try:
            if self._client is None:
                self._client = self._connect()
            answer = self._client.call(operation, *arguments)
        except OSError:
            self.close()
            self._resume = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_TIME_TO_RETURN)
            return None
        self._pause = _TIME_TO_RETURN
        return answer

    def close(self) -> None:
        """Close the connection; a further call opens another one."""
        if self._client is not None:
            self._client.close()
        self._client = None


class QuorumRegisters:
    """Registers on servers that may be lost. Every call raises NoMajorityError if a majority of them is.

    A group has several agreements, one after another, whose keys begin with the name of the agreement. A record belongs
    to the agreement that its text names.
    """

    def __init__(self, acceptors: Sequence[Acceptor], agreement: str, rank: int, size: int) -> None:
        self._acceptors, self._agreement, self._rank, self._size = acceptors, agreement, rank, size
        self._decisions: dict[str, str] = {}

    def announce(self, text: str) -> None:
        self._ask("announce", self._rank, time.monotonic_ns(), json.dumps([self._agreement, text]))

    def read(self) -> tuple[Mapping[int, str], Mapping[str, str]]:
        found: dict[int, tuple[int, str]] = {}
        for records, decisions in self._ask("read"):
            for rank, (number, text) in records:
                found[rank] = max(found.get(rank, (0, "")), (number, text))
            prefix = f"{self._agreement}/"
            self._decisions.update(
                (key.removeprefix(prefix), value) for key, value in decisions.items() if key.startswith(prefix)
            )
        records = {rank: json.loads(text) for rank, (_, text) in found.items()}
        return {rank: text for rank, (name, text) in records.items() if name == self._agreement}, self._decisions

    def decide(self, key: str, value: str) -> str:
        if key not in self._decisions:
            name = f"{self._agreement}/{key}"
            steps = propose(name, value, self._rank, self._size, len(self._acceptors))
            try:
                request = next(steps)
                while True:
                    request = steps.send(self._perform(request))
            except StopIteration as ended:
                self._decisions[key] = ended.value
            self._ask("publish", name, self._decisions[key])  # so that others need not propose
        return self._decisions[key]

    def close(self) -> None:
        """Close the connections to the servers."""
        for each in self._acceptors:
            each.close()

    def _perform(self, request: CompareAndSet) -> str | None:
        acceptor = self._acceptors[request.acceptor]
        found: str | None = acceptor.call("compare_and_set", request.key, request.expected, request.desired)
        return found

    def _ask(self, operation: str, *arguments: Any) -> list[Any]:
        """Return what the servers answer that can be reached, if they are a majority."""
        answers = [answer for each in self._acceptors if (answer := each.call(operation, *arguments)) is not None]
        if len(answers) <= len(self._acceptors) // 2:
            raise NoMajorityError
        return answers
