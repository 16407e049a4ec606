"""The protocols of csrc/shm under the memory model of C++11, in all executions of two or three ranks.

The steps of a protocol are written by hand, after the functions that the docstrings name. Their memory orders are
not: ``orders`` reads them from the sources. So a weaker order in a source fails here, and so does a changed access,
which its expression no longer finds. Nothing here notices a new access, or steps that are in another order in C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_model import Thread, Violation, add, explore, load, read, sleep_while, store, write

SHM = Path(__file__).parents[2] / "csrc" / "shm"
Orders = dict[str, str]
Steps = Generator[Any, Any, Any]

# Each access of the protocols: its file, and an expression whose only group is the text of the order.
ACCESSES = {
    # Membership::sleep() and wake()
    "register": ("membership.cpp", r"sleepers\.fetch_add\(1(.*?)\)"),
    "count seen": ("membership.cpp", r"return rank_state\(rank_\)\.wake_count\.load\((.*?)\)"),
    "unregister": ("membership.cpp", r"sleepers\.fetch_sub\(1(.*?)\)"),
    "look for sleepers": ("membership.cpp", r"state\.sleepers\.load\((.*?)\)"),
    "wake": ("membership.cpp", r"state\.wake_count\.fetch_add\(1(.*?)\)"),
    # SlotExchange::phase()
    "post": ("slot_exchange.cpp", r"entry\(rank\(\)\)\.phase\.store\(phase_(.*?)\)"),
    "see a post": ("slot_exchange.cpp", r"precedes\(entry\(rank\)\.phase\.load\((.*?)\), phase_\)"),
    # PointToPoint::write_ring() and read_ring()
    "written": ("p2p.cpp", r"ring_state\.written\.store\(written(.*?)\)"),
    "see written": ("p2p.cpp", r"unread = ring_state\.written\.load\((.*?)\)"),
    "read": ("p2p.cpp", r"ring_state\.read\.store\(read(.*?)\)"),
    "see read": ("p2p.cpp", r"written - ring_state\.read\.load\((.*?)\)"),
    # Stamps::set() and All::are_set()
    "stamp": ("stamps.cpp", r"\.store\(token_ \+ round(.*?)\)"),
    "see a stamp": ("stamps.cpp", r"number\)\.load\((.*?)\)"),
}


@pytest.fixture(scope="module")
def orders() -> Orders:
    """The order of each access, from the sources."""
    found = {}
    for name, (file, expression) in ACCESSES.items():
        texts = {*re.findall(expression, (SHM / file).read_text())}
        assert len(texts) == 1, f"{name}: {file} has the orders {texts}"
        found[name] = texts.pop().replace(", ", "").replace("std::memory_order_", "") or "seq_cst"
    return found


def sleep(orders: Orders, rank: int, is_over: Callable[[], Steps]) -> Steps:
    """Membership::sleep(), without its limit of 10 ms: a lost wake-up is a thread that sleeps forever."""
    yield add(f"sleepers {rank}", 1, orders["register"])
    seen = yield load(f"wakes {rank}", orders["count seen"])
    if not (yield from is_over()):
        yield sleep_while(f"wakes {rank}", seen)
    yield add(f"sleepers {rank}", -1, orders["unregister"])


def wake(orders: Orders, rank: int) -> Steps:
    """Membership::wake(); :func:`sleep_while` stands for the call of the kernel."""
    if (yield load(f"sleepers {rank}", orders["look for sleepers"])):
        yield add(f"wakes {rank}", 1, orders["wake"])


def slot_exchange(orders: Orders, ranks: int = 2, phases: int = 2, slots: int = 2) -> None:
    """SlotExchange::phase(), with each rank's slots of data. A rank sleeps at once instead of spinning first.

    At the end a rank writes the data of one more phase, into a slot that it has used before.
    """

    def is_behind(peer: int, phase: int) -> Steps:
        return (yield load(f"phase {peer}", orders["see a post"])) < phase

    def rank_steps(rank: int) -> Thread:
        peers = [peer for peer in range(ranks) if peer != rank]

        def is_over(phase: int) -> Steps:
            for peer in peers:
                if (yield from is_behind(peer, phase)):
                    return False
            return True

        for phase in range(1, phases + 1):
            yield write(f"slot {rank} {phase % slots}", phase)
            yield store(f"phase {rank}", phase, orders["post"])
            if (yield from is_over(phase)):
                for peer in peers:
                    yield from wake(orders, peer)
            for peer in peers:
                while (yield from is_behind(peer, phase)):
                    yield from sleep(orders, rank, lambda phase=phase: is_over(phase))  # type: ignore[misc]
            for peer in peers:
                assert (yield read(f"slot {peer} {phase % slots}")) == phase, "the data of another phase"
                if ranks == 2:  # the only reader takes the cache lines
                    yield write(f"slot {peer} {phase % slots}", phase)
        yield write(f"slot {rank} {(phases + 1) % slots}", phases + 1)

    all_ranks = range(ranks)
    explore(
        [lambda rank=rank: rank_steps(rank) for rank in all_ranks],  # type: ignore[misc]
        [f"{name} {rank}" for name in ("phase", "sleepers", "wakes") for rank in all_ranks],
        [f"slot {rank} {slot}" for rank in all_ranks for slot in range(slots)],
    )


def ring_buffer(orders: Orders, messages: int = 3, space: int = 2) -> None:
    """A ring of PointToPoint: write_ring() on the sender, read_ring() on the receiver, each with try_progress()."""

    def sender() -> Thread:
        written = 0

        def progress() -> Steps:
            nonlocal written
            before = written
            while written < messages and written - (yield load("read", orders["see read"])) < space:
                yield write(f"line {written % space}", written)
                written += 1
                yield store("written", written, orders["written"])
            if written != before:
                yield from wake(orders, 1)
            return written != before

        while written < messages:
            if not (yield from progress()):
                yield from sleep(orders, 0, progress)

    def receiver() -> Thread:
        done = 0

        def progress() -> Steps:
            nonlocal done
            before = done
            while done < messages and (yield load("written", orders["see written"])) > done:
                assert (yield read(f"line {done % space}")) == done
                yield write(f"line {done % space}", done)  # the receiver takes the cache line
                done += 1
                yield store("read", done, orders["read"])
            if done != before:
                yield from wake(orders, 0)
            return done != before

        while done < messages:
            if not (yield from progress()):
                yield from sleep(orders, 1, progress)

    counters = ["written", "read", "sleepers 0", "sleepers 1", "wakes 0", "wakes 1"]
    explore([sender, receiver], counters, [f"line {line}" for line in range(space)])


def stamps(orders: Orders) -> None:
    """IncrementalReduce::put(): a rank that sees the stamps of all ranks reduces its share of a piece."""

    def rank_steps(rank: int) -> Thread:
        for share in range(2):
            yield write(f"share {share} of {rank}", 1)
        yield store(f"stamp {rank}", 1, orders["stamp"])
        if (yield load(f"stamp {1 - rank}", orders["see a stamp"])):
            for peer in range(2):
                assert (yield read(f"share {rank} of {peer}")) == 1
                yield write(f"share {rank} of {peer}", 2)

    explore(
        [lambda: rank_steps(0), lambda: rank_steps(1)],
        ["stamp 0", "stamp 1"],
        [f"share {share} of {rank}" for share in range(2) for rank in range(2)],
    )


PROTOCOLS: dict[str, Callable[[Orders], None]] = {
    "two ranks": slot_exchange,
    "three ranks": lambda orders: slot_exchange(orders, ranks=3, phases=1),
    "ring buffer": ring_buffer,
    "stamps": stamps,
}


def weaker() -> Iterator[tuple[str, str, str, str]]:
    """Protocol, access, a weaker order for it, and what must go wrong then."""
    for protocol, stored, loaded in [
        ("two ranks", "post", "see a post"),
        ("ring buffer", "written", "see written"),
        ("ring buffer", "read", "see read"),
        ("stamps", "stamp", "see a stamp"),
    ]:
        yield protocol, stored, "relaxed", "races"
        yield protocol, loaded, "relaxed", "races"
        if protocol != "stamps":
            yield protocol, stored, "release", "sleep forever"
            yield protocol, loaded, "acquire", "sleep forever"
    for protocol in ("two ranks", "three ranks", "ring buffer"):
        yield protocol, "register", "acq_rel", "sleep forever"
        yield protocol, "look for sleepers", "acquire", "sleep forever"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_has_no_race_and_no_lost_wake_up(protocol: str, orders: Orders) -> None:
    PROTOCOLS[protocol](orders)


@pytest.mark.parametrize(("protocol", "access", "order", "fault"), weaker())
def test_a_weaker_order_is_found(protocol: str, access: str, order: str, fault: str, orders: Orders) -> None:
    with pytest.raises(Violation, match=fault):
        PROTOCOLS[protocol](orders | {access: order})


def test_the_second_slot_of_a_rank_is_needed(orders: Orders) -> None:
    with pytest.raises(Violation, match=r"races with a read|the data of another phase"):
        slot_exchange(orders, slots=1)


def outcomes(*threads: Callable[[], Thread], variables: str = "xy") -> set[tuple[int, ...]]:
    """What the accesses of all threads may return together, the first thread first. A store returns 0."""
    return {sum(results, ()) for results in explore(threads, list(variables))}


def test_the_model_permits_what_processors_do_and_no_more() -> None:
    """Beside what the protocols need: a flag that publishes a message, and two stores of which one is seen."""

    def two(first: Any, second: Any) -> Callable[[], Thread]:
        def thread() -> Thread:
            yield first
            yield second

        return thread

    # 1. One variable: no thread sees the values in another order, whatever the memory order.
    both = outcomes(
        two(store("x", 1, "relaxed"), store("x", 2, "relaxed")), two(load("x", "relaxed"), load("x", "relaxed"))
    )
    assert {results[2:] for results in both} == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}
    # 2. Independent readers of independent writers: they disagree about the order with acquire, not with seq_cst.
    for order, excludes in [("acquire", False), ("seq_cst", True)]:
        stores = "release" if order == "acquire" else order

        def writer(variable: str, order: str = stores) -> Callable[[], Thread]:
            def thread() -> Thread:
                yield store(variable, 1, order)

            return thread

        both = outcomes(
            writer("x"), writer("y"), two(load("x", order), load("y", order)), two(load("y", order), load("x", order))
        )
        assert ((0, 0, 1, 0, 1, 0) not in both) == excludes

    # 3. An addition without an order of its own passes on what the value that it has read has published.
    def published() -> Thread:
        yield write("data", 1)
        yield add("x", 1, "release")

    def adds() -> Thread:
        yield add("x", 1, "relaxed")

    def reads() -> Thread:
        if (yield load("x", "acquire")) == 2:
            assert (yield read("data")) == 1

    explore([published, adds, reads], ["x"], ["data"])
