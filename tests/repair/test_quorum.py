"""Decisions by a majority of servers: every interleaving of two proposers over three acceptors, which may be lost."""

from __future__ import annotations

import collections
import functools
import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from exploration import Process, explore

from dist_prims.backend.quorum_ranks import quorum_ranks
from dist_prims.rendezvous.register_server import RegisterClient, RegisterServer
from dist_prims.repair.quorum import Acceptor, AcceptorState, NoMajorityError, QuorumRegisters, propose

ACCEPTORS, PROPOSERS = 3, 2
MOST_BALLOTS = 3  # of each proposer: two that hinder each other could go on without end


class Proposer(NamedTuple):
    process: Process
    lost: frozenset[int] = frozenset()  # the acceptors that it cannot reach


class State(NamedTuple):
    proposers: tuple[Proposer, ...]
    values: tuple[str, ...]  # by acceptor
    losses: int  # connections that may still be lost


def is_too_long(state: State) -> bool:
    promised = max(AcceptorState.parse(value).promised for value in state.values)
    return promised >= (MOST_BALLOTS + 1) * PROPOSERS


def following(state: State) -> Iterator[State]:
    if is_too_long(state):
        return
    for place, one in enumerate(state.proposers):
        request = one.process.request
        if request is None:
            continue
        if request.acceptor not in one.lost:
            value, values = state.values[request.acceptor], list(state.values)
            if value == request.expected:
                value = values[request.acceptor] = request.desired
            yield moved(state, place, one._replace(process=one.process.after(value)))._replace(values=tuple(values))
        if request.acceptor in one.lost or state.losses:
            is_new = request.acceptor not in one.lost
            after = Proposer(one.process.after(None), one.lost | {request.acceptor})
            yield moved(state, place, after)._replace(losses=state.losses - is_new)


def moved(state: State, place: int, one: Proposer) -> State:
    return state._replace(proposers=(*state.proposers[:place], one, *state.proposers[place + 1 :]))


def check(state: State) -> None:
    ends = [one.process.end for one in state.proposers if one.process.end]
    assert len(ends) == PROPOSERS or is_too_long(state)
    assert len({end.value for end in ends if end.error is None}) <= 1, f"two values were decided: {ends}"
    assert {end.error for end in ends if end.error} <= {NoMajorityError}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("losses", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_interleavings(losses: int) -> None:
    """With up to so many losses: that includes all interleavings with fewer. Three losses take six minutes."""
    start = [
        functools.partial(propose, "key", f"value {rank}", rank, PROPOSERS, ACCEPTORS) for rank in range(PROPOSERS)
    ]
    first = State(tuple(Proposer(Process(each)) for each in start), ("",) * ACCEPTORS, losses)
    print(explore(first, following, check, most=2_000_000))


def proposed(values: list[str], value: str, rank: int, reached: Callable[[int], set[int]]) -> str:
    """The outcome of a proposal whose request of a number reaches these acceptors only; "" if it raises."""
    steps, number = propose("key", value, rank, 4, ACCEPTORS), 0
    answer: str | None = None
    try:
        while True:
            request = next(steps) if number == 0 else steps.send(answer)
            number, answer = number + 1, None
            if request.acceptor in reached(number):
                if values[request.acceptor] == request.expected:
                    values[request.acceptor] = request.desired
                answer = values[request.acceptor]
    except StopIteration as ended:
        return str(ended.value)
    except NoMajorityError:
        return ""


def test_a_rank_that_proposes_another_value() -> None:
    """All acceptors promise and one accepts, and shrink() raises. Its next call proposes another value to the others.

    It once took the promises of the first proposal for its own: then there were two values with one ballot.
    """
    values = [""] * ACCEPTORS
    assert proposed(values, "A", 1, lambda number: {0, 1, 2} if number <= 6 else {0}) == ""
    assert proposed(values, "B", 1, lambda number: {1, 2}) == "B"
    assert proposed(values, "C", 2, lambda number: {0, 1}) == "B"
    assert proposed(values, "D", 3, lambda number: {1, 2}) == "B"


class LosableServer:
    """A server of registers that can be lost."""

    def __init__(self) -> None:
        self.listening, self.is_lost = socket.create_server(("127.0.0.1", 0)), False
        self.server = RegisterServer(self.listening)
        self.registers = self.server.add("group", b"key")

    def connect(self) -> RegisterClient:
        server = self

        class LosableClient(RegisterClient):
            def call(self, *request: Any) -> Any:
                if server.is_lost:
                    raise ConnectionResetError
                return super().call(*request)

        return LosableClient(f"127.0.0.1:{self.listening.getsockname()[1]}", "group", b"key", timeout=20)


def registers(servers: list[LosableServer], rank: int) -> QuorumRegisters:
    return QuorumRegisters([Acceptor(each.connect) for each in servers], "agreement", rank, 2)


def test_registers_on_servers() -> None:
    """A record is replaced, the first value of a decision stands, and one of three servers may be lost."""
    servers = [LosableServer() for _ in range(ACCEPTORS)]
    first, second = registers(servers, 0), registers(servers, 1)
    first.announce("old")
    first.announce("new")
    second.announce("other")
    assert first.decide("key", "a") == "a"
    servers[0].is_lost = True
    late = registers(servers, 1)
    assert late.read() == ({0: "new", 1: "other"}, {"key": "a"})
    assert late.decide("key", "b") == "a"
    assert second.decide("other key", "c") == "c"
    assert late.read()[1] == {"key": "a", "other key": "c"}
    servers[1].is_lost = True
    with pytest.raises(NoMajorityError):
        registers(servers, 0).read()
    with pytest.raises(NoMajorityError):
        registers(servers, 0).decide("third key", "d")


def test_a_decision_whose_proposer_has_not_published_it() -> None:
    """Another rank learns it by proposing."""
    servers = [LosableServer() for _ in range(ACCEPTORS)]
    first, second = registers(servers, 0), registers(servers, 1)
    call = first._call_majority
    first._call_majority = lambda *request: [] if request[0] == "publish" else call(*request)  # type: ignore[method-assign]
    assert first.decide("key", "a") == "a"
    assert "key" not in second.read()[1]
    assert second.decide("key", "b") == "a"


def test_ranks_of_the_quorum() -> None:
    assert quorum_ranks(["a"] * 8 + ["b"] * 8) == [0, 8, 1, 9, 2]
    assert quorum_ranks(["a", "b", "c", "d"]) == [0, 1, 2]
    assert quorum_ranks(["a", "b"] * 2 + ["c"]) == [0, 1, 4, 2, 3]


def test_of_three_hosts_and_more_each_can_be_lost() -> None:
    """Of 4 ranks on one host and 1 on each of two others, 3 of 5 registers were once on the first host."""
    for hosts in (3, 4, 5, 6):
        for ranks in itertools.product((1, 2, 4), repeat=hosts):
            names = [str(host) for host, count in enumerate(ranks) for _ in range(count)]
            servers = collections.Counter(names[rank] for rank in quorum_ranks(names))
            assert servers.total() in (3, 5)
            assert 2 * max(servers.values()) < servers.total()


def test_agreements_of_a_group_are_separate() -> None:
    servers = [LosableServer() for _ in range(ACCEPTORS)]
    first = QuorumRegisters([Acceptor(each.connect) for each in servers], "first", 0, 2)
    second = QuorumRegisters([Acceptor(each.connect) for each in servers], "second", 0, 2)
    first.announce("record")
    assert first.decide("key", "a") == "a"
    assert second.read() == ({}, {})
    assert second.decide("key", "b") == "b"
    second.announce("other record")
    assert first.read() == ({}, {"key": "a"})
