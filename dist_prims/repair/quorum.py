"""Registers on several servers, of which a majority must be reachable: the survivors on several hosts agree by them.

Up to five ranks of a group that spans hosts serve registers, at first the first rank of each host. A record is written
to all servers, and read from a majority. A decision is made by Paxos, whose acceptors are the servers. The state of an
acceptor for one decision is a value of its server, which a proposer changes by compare-and-set. So a server needs to
know nothing about Paxos. A rank that proposes a value numbers its attempts by *ballots*, and does for each:

1. It asks each acceptor to promise this ballot: the acceptor refuses lower ballots from then on. The answer has the
   value that the acceptor has accepted last. A promise counts only if this proposal has raised it: a rank that proposes
   again after an error may have another value for the same ballot.
2. If a majority has promised, it asks the acceptors to accept a value: of the values in the answers the one with the
   highest ballot, or its own if there is none. What a majority has accepted with one ballot is decided.

Ranks that reach no majority, as on the smaller side of a network that is cut in two, raise: so no second group forms.

The steps are generators, as in :mod:`.survivors`, so the tests explore all their interleavings.
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

Server = GroupRegisters | RegisterClient  # this rank's own registers, or a connection to the registers of another rank

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 8.0  # seconds without a call to a server that could not be reached


class NoMajorityError(Exception):
    """Less than a majority of the servers can be reached."""


@dataclass(frozen=True)
class CompareAndSet:
    """Request to change the value of a key on one server to ``desired`` if it is ``expected``; "" stands for no value.

    The answer is the value of the key afterwards, or None if the server cannot be reached.
    """

    acceptor: int  # the number of the server
    key: str
    expected: str
    desired: str


@dataclass(frozen=True)
class AcceptorState:
    """The state of an acceptor for one decision."""

    promised: int = 0  # the ballot
    ballot: int = 0  # with which it has accepted the value; 0: it has accepted none
    value: str = ""

    def text(self) -> str:
        return json.dumps([self.promised, self.ballot, self.value])

    @classmethod
    def parse(cls, text: str) -> AcceptorState:
        return cls(*json.loads(text)) if text else cls()


Steps = Generator[CompareAndSet, "str | None", Any]  # yields requests, and receives their answers


def propose(key: str, value: str, rank: int, ranks: int, acceptors: int) -> Steps:
    """Propose a value for a decision. Return the decision, which another proposal may have made; raise NoMajorityError.

    ``ranks`` and ``acceptors``: how many there are.
    """
    majority = acceptors // 2 + 1
    ballot = ranks + rank  # the remainder by ``ranks`` is the rank, so no two ranks have the same ballot
    while True:
        # 1. The promises.
        answers = yield from _change_states(key, acceptors, functools.partial(_promised, ballot))
        states = [state for state, _ in answers]
        if decided := _decided(states, majority):
            return decided
        # 2. The acceptances.
        if sum(is_changed for _, is_changed in answers) >= majority:
            last = max(states, key=lambda state: state.ballot)
            chosen = last.value if last.ballot else value
            answers = yield from _change_states(key, acceptors, functools.partial(_accepted, ballot, chosen))
            states = [state for state, _ in answers]
            if sum(state.ballot == ballot for state in states) >= majority:
                return chosen
        # 3. Another rank has a higher ballot: go on with a ballot above all promises.
        ballot = (max(state.promised for state in states) // ranks + 1) * ranks + rank


def _promised(ballot: int, state: AcceptorState) -> AcceptorState:
    return AcceptorState(ballot, state.ballot, state.value) if ballot > state.promised else state


def _accepted(ballot: int, value: str, state: AcceptorState) -> AcceptorState:
    return AcceptorState(ballot, ballot, value) if ballot >= state.promised else state


def _decided(states: Sequence[AcceptorState], majority: int) -> str:
    """The value that a majority has accepted with one ballot; empty if there is none."""
    for state in states:
        if state.ballot and sum(other.ballot == state.ballot for other in states) >= majority:
            return state.value
    return ""


def _change_states(key: str, acceptors: int, change: Callable[[AcceptorState], AcceptorState]) -> Steps:
    """Apply ``change`` to the state of each acceptor that can be reached. Return for each of these its state
    afterwards, and whether this call has changed it; raise NoMajorityError if they are too few."""
    answers: list[tuple[AcceptorState, bool]] = []
    for acceptor in range(acceptors):
        current = yield CompareAndSet(acceptor, key, "", AcceptorState().text())  # reads the value, which exists then
        while current is not None:
            state = AcceptorState.parse(current)
            desired = change(state)
            if desired == state:
                answers.append((state, False))
                break
            current = yield CompareAndSet(acceptor, key, current, desired.text())
            if current == desired.text():
                answers.append((desired, True))
                break
            # Another rank has changed the state meanwhile: apply the change to that state.
    if len(answers) <= acceptors // 2:
        raise NoMajorityError
    return answers


class Acceptor:
    """The calls of this rank to one of the servers.

    A call returns None if the server cannot be reached. The server is then not called for a second, and twice as long
    after each further failure. A server that ``is_suspected`` counts as one that could not be reached twice.
    ``connect`` opens a connection. It and the calls of the connection may raise OSError.
    """

    def __init__(self, connect: Callable[[], Server], is_suspected: bool = False) -> None:
        self._connect = connect
        self._pause = 2 * _FIRST_PAUSE if is_suspected else _FIRST_PAUSE  # after the next failure
        self._resume = time.monotonic() + self._pause if is_suspected else -math.inf  # no call before this time
        self._server: Server | None = None  # the connection

    def call(self, operation: str, *arguments: Any) -> Any:
        if time.monotonic() < self._resume:
            return None
        try:
            if self._server is None:
                self._server = self._connect()
            answer = self._server.call(operation, *arguments)
        except OSError:
            self.close()
            self._resume = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return None
        self._pause = _FIRST_PAUSE
        return answer

    def close(self) -> None:
        """Close the connection; a further call opens another one."""
        if self._server is not None:
            self._server.close()
        self._server = None


class QuorumRegisters:
    """The registers (:class:`.registers.Registers`) of one agreement, on servers of which a minority may be lost.

    A call raises NoMajorityError if it reaches less than a majority. The servers keep the registers of all agreements
    of the group: the keys of decisions begin with the name of the agreement, and the text of a record contains it.
    ``rank`` and ``size`` are this rank and the number of ranks.
    """

    def __init__(self, acceptors: Sequence[Acceptor], agreement: str, rank: int, size: int) -> None:
        self._acceptors, self._agreement, self._rank, self._size = acceptors, agreement, rank, size
        self._decisions: dict[str, str] = {}  # by key without the name of the agreement, as far as this rank knows

    def announce(self, text: str) -> None:
        self._call_majority("announce", self._rank, time.monotonic_ns(), json.dumps([self._agreement, text]))

    def read(self) -> tuple[Mapping[int, str], Mapping[str, str]]:
        newest: dict[int, tuple[int, str]] = {}  # the time of a record, on the clock of its rank, and its text
        prefix = f"{self._agreement}/"
        for records, decisions in self._call_majority("read"):
            for rank, (announced, text) in records:
                newest[rank] = max(newest.get(rank, (0, "")), (announced, text))
            self._decisions.update(
                (key.removeprefix(prefix), value) for key, value in decisions.items() if key.startswith(prefix)
            )
        by_rank = {rank: json.loads(text) for rank, (_, text) in newest.items()}
        return {rank: text for rank, (name, text) in by_rank.items() if name == self._agreement}, self._decisions

    def decide(self, key: str, value: str) -> str:
        if key not in self._decisions:
            full_key = f"{self._agreement}/{key}"
            steps = propose(full_key, value, self._rank, self._size, len(self._acceptors))
            try:
                request = next(steps)
                while True:
                    acceptor = self._acceptors[request.acceptor]
                    answer = acceptor.call("compare_and_set", request.key, request.expected, request.desired)
                    request = steps.send(answer)
            except StopIteration as ended:
                self._decisions[key] = ended.value
            self._call_majority("publish", full_key, self._decisions[key])  # so that other ranks need not propose
        return self._decisions[key]

    def close(self) -> None:
        """Close the connections to the servers."""
        for acceptor in self._acceptors:
            acceptor.close()

    def _call_majority(self, operation: str, *arguments: Any) -> list[Any]:
        """Call all servers. Return the answers of those that can be reached, if they are a majority."""
        answers = [acceptor.call(operation, *arguments) for acceptor in self._acceptors]
        answers = [answer for answer in answers if answer is not None]
        if len(answers) <= len(self._acceptors) // 2:
            raise NoMajorityError
        return answers
