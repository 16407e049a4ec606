"""The proof itself is put to the test: right schedules changed in one place, against an oracle of its own.

The oracle runs the changed schedule on numbers that tell all: each rank's piece is a vector with a single one in a
place of its own, so a sum counts how often every contribution is in it. It shares no code with the symbolic proof.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_prims.schedules import COLLECTIVES, ScheduleError, Step, algorithm, algorithms, build, unregister
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.schedule import Schedule
from dist_prims.schedules.simulate import states
from dist_prims.schedules.steps import Steps

REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
Rows = list[list[Any]]


def accepts(schedule: Schedule) -> bool:
    try:
        schedule.verify()
    except ScheduleError:
        return False
    return True


def places(schedule: Schedule) -> int:
    """How many different contributions there are: one of each rank to each piece."""
    return schedule.chunks * schedule.size * (schedule.size if schedule.collective == "all_to_all" else 1)


def is_right(schedule: Schedule) -> bool:
    """The oracle: every rank ends with each contribution that it was promised, once, and with nothing else."""
    size, pieces = schedule.size, places(schedule) // schedule.size
    one = np.eye(size * pieces, dtype=np.int64)
    inputs = []
    for rank in range(size):
        start = schedule.contract.start(rank)
        inputs.append([one[rank * pieces + piece] for piece in start.piece.tolist()])
    add = np.add if schedule.contract.counts_once else np.maximum
    try:
        outputs = schedule.simulate(inputs, add)
    except (KeyError, IndexError):
        return False  # a chunk or a rank that is not there
    return all(
        np.array_equal(found, one[first * pieces + piece : last * pieces : pieces].sum(0))
        for rank, output in enumerate(outputs)
        for found, piece, first, last in zip(output, *promised(schedule, rank), strict=True)
    )


def promised(schedule: Schedule, rank: int) -> tuple[list[int], ...]:
    end = schedule.contract.end(rank)
    return end.piece.tolist(), end.first.tolist(), end.last.tolist()


def has_same_bits(schedule: Schedule) -> bool:
    """Whether ranks with the same promise end with the same floats, on numbers where the order matters."""
    shape = (schedule.size, places(schedule) // schedule.size, 64)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    noise *= np.float32(10.0) ** np.arange(-3, 5).repeat(8)
    inputs = [noise[rank][schedule.contract.start(rank).piece] for rank in range(schedule.size)]
    seen: dict[tuple[int, ...], bytes] = {}
    for rank, output in enumerate(schedule.simulate(inputs)):
        for found, *promise in zip(output, *promised(schedule, rank), strict=True):
            if seen.setdefault(tuple(promise), found.tobytes()) != found.tobytes():
                return False
    return True


def changed(schedule: Schedule, change: Callable[[list[Rows]], object]) -> Schedule:
    steps = [[list(row) for row in step.rows()] for step in schedule.steps]
    change(steps)
    made = [
        Step(src=src, dst=dst, chunk=chunk, into=into, reduce=reduce)
        for src, dst, chunk, into, reduce in (zip(*rows, strict=True) for rows in steps if rows)
    ]
    return dataclasses.replace(schedule, steps=Steps(lambda: iter(made)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    collective, name = draw(st.sampled_from(REGISTRY))
    size = draw(st.integers(2, 9))
    root = {"root": draw(st.integers(0, size - 1))} if collective in ROOTED else {}
    return build(collective, name, size, **root)


@st.composite
def mutants(draw: st.DrawFn) -> Schedule:
    schedule = draw(schedules())
    kinds = ["drop", "double", "repeat", "src", "dst", "chunk", "into", "reduce", "swap", "move"]
    kind = draw(st.sampled_from(kinds))

    def change(steps: list[Rows]) -> None:
        at = draw(st.integers(0, len(steps) - 1))
        row = draw(st.integers(0, len(steps[at]) - 1))
        if kind == "drop":
            del steps[at][row]
        elif kind == "double":
            steps[at].append(list(steps[at][row]))
        elif kind == "repeat":
            steps.append([list(steps[at][row])])
        elif kind == "swap":
            other = draw(st.integers(0, len(steps) - 1))
            steps[at], steps[other] = steps[other], steps[at]
        elif kind == "move":
            steps[draw(st.integers(0, len(steps) - 1))].append(steps[at].pop(row))
        elif kind == "reduce":
            steps[at][row][4] = not steps[at][row][4]
        else:
            column = ["src", "dst", "chunk", "into"].index(kind)
            limit = schedule.size if column < 2 else schedule.contract.total
            steps[at][row][column] = draw(st.integers(-1, limit))

    return changed(schedule, change)


def check_mutant(schedule: Schedule) -> None:
    if accepts(schedule):
        assert is_right(schedule)
        assert not schedule.contract.same_bits or has_same_bits(schedule)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants())
def test_what_the_proof_accepts_is_right(schedule: Schedule) -> None:
    check_mutant(schedule)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants())
def test_what_the_proof_accepts_is_right_at_length(schedule: Schedule) -> None:
    check_mutant(schedule)


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_the_oracle_agrees_on_right_schedules(schedule: Schedule) -> None:
    assert accepts(schedule)
    assert is_right(schedule)
    assert not schedule.contract.same_bits or has_same_bits(schedule)


def drop(at: int, row: int, steps: list[Rows]) -> None:
    steps[at].pop(row)


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_a_dropped_transfer_is_missed(collective: str, name: str) -> None:
    """Unless it was not needed: a chunk that opens a fold where it lies, or one that its receiver had already."""
    schedule = build(collective, name, 5)
    transfers = [(at, row) for at, step in enumerate(schedule.steps) for row in range(len(step))]
    missed = 0
    for at, row in transfers:
        without = changed(schedule, functools.partial(drop, at, row))
        right = is_right(without)
        assert accepts(without) == (right and (not schedule.contract.same_bits or has_same_bits(without)))
        missed += not right
    assert missed > len(transfers) // 2 or collective == "barrier"


def refusal(collective: str, chunks: int, size: int, *steps: Step) -> str:
    def make(size: int) -> Any:
        yield from steps

    algorithm(collective, name="wrong", chunks=chunks)(make)
    try:
        with pytest.raises(ScheduleError) as caught:
            build(collective, "wrong", size).verify()
    finally:
        unregister(collective, "wrong")
    return str(caught.value)


def test_a_counterexample_names_step_rank_chunk_and_what_is_wrong() -> None:
    gather = Step(src=[1, 2], dst=0, chunk=0, reduce=True)
    assert refusal("all_reduce", 1, 3, gather).startswith("at the end rank 1, chunk 0: r0+r2 is missing")
    doubled = refusal("all_reduce", 1, 3, gather, Step(src=1, dst=0, chunk=0, reduce=True))
    assert "step 1, rank 1 -> rank 0" in doubled
    assert "adds r1 to chunk 0 of rank 0, which already contains it" in doubled
    assert "src=7 is out of range; ranks are 0..2" in refusal("all_reduce", 1, 3, Step(src=7, dst=0, chunk=0))
    assert "holds nothing yet" in refusal("all_gather", 3, 3, Step(src=0, dst=1, chunk=2))
    assert "which an earlier row also writes" in refusal("all_gather", 3, 3, Step(src=[0, 0], dst=[1, 1], chunk=[0, 0]))
    mixed = refusal("all_reduce", 2, 2, Step(src=0, dst=1, chunk=0, into=1, reduce=True))
    assert "holds another piece of the data" in mixed


def test_replicas_that_would_drift_apart_are_refused() -> None:
    """Every rank adds its own number first: right sums, other roundings. The tutorial's ring does that."""
    exchange = Step(src=[0, 1, 2], dst=[1, 2, 0], chunk=0, into=1)
    add = Step(src=[0, 1, 2], dst=[0, 1, 2], chunk=1, into=0, reduce=True)

    def make(size: int) -> Any:
        yield exchange
        yield add
        yield Step(src=[0, 1, 2], dst=[1, 2, 0], chunk=1, into=2)
        yield Step(src=[0, 1, 2], dst=[0, 1, 2], chunk=2, into=0, reduce=True)

    for replicas in ("same", "may differ"):
        algorithm("all_reduce", name="drifting", chunks=1, scratch=2, replicas=replicas)(make)
        try:
            schedule = build("all_reduce", "drifting", 3)
            assert is_right(schedule)
            assert not has_same_bits(schedule)
            if replicas == "may differ":
                schedule.verify()
                continue
            with pytest.raises(ScheduleError, match=r"\(r0\+r2\)\+r1 on rank 0 but \(r0\+r1\)\+r2 on rank 1"):
                schedule.verify()
        finally:
            unregister("all_reduce", "drifting")


def test_a_result_that_is_only_unfinished_lacks_a_transfer() -> None:
    """A ring without its second half: every sum is complete on some rank, and no step has spoilt anything."""
    rank = np.arange(3)
    half = [Step(src=rank, dst=(rank + 1) % 3, chunk=(rank - step) % 3, reduce=True) for step in range(2)]
    message = refusal("all_reduce", 3, 3, *half)
    assert message.startswith("at the end rank 0, chunk 0: r1+r2 is missing")
    assert message.endswith("after the last step: a transfer to rank 0 is missing")


def test_the_step_that_made_a_result_impossible_is_named() -> None:
    """Rank 0's number replaces rank 1's before that was added anywhere; two right steps follow."""
    message = refusal(
        "all_reduce",
        1,
        3,
        Step(src=2, dst=0, chunk=0, reduce=True),
        Step(src=0, dst=1, chunk=0),
        Step(src=1, dst=2, chunk=0),
    )
    assert message == (
        "at the end rank 0, chunk 0: r1 is missing. It cannot be repaired after step 1: there the transfer from "
        "rank 0 to rank 1 replaces the last copy of r1, in chunk 0 of rank 1"
    )


def test_a_sum_that_took_in_too_much_is_named() -> None:
    """A scan: rank 1 was promised r0+r1, and a second step adds r2 to the only chunk that holds r1."""
    message = refusal("scan", 1, 3, Step(src=0, dst=1, chunk=0, reduce=True), Step(src=2, dst=1, chunk=0, reduce=True))
    assert "at the end rank 1, chunk 0: r2 does not belong there" in message
    assert "It cannot be repaired after step 1" in message
    assert "from rank 2 to rank 1 adds to the last copy of r0+r1, in chunk 0 of rank 1" in message


def test_sums_that_overlap_cannot_make_a_result() -> None:
    """r0+r1 and r1+r2 are left: a rank that adds them counts r1 twice."""
    message = refusal(
        "all_reduce",
        1,
        3,
        Step(src=[0, 1], dst=[1, 2], chunk=0, reduce=True),
        Step(src=1, dst=0, chunk=0),
    )
    assert "It cannot be repaired after step 1" in message
    assert "from rank 1 to rank 0 replaces the last copy of r0, in chunk 0 of rank 0" in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutants())
def test_the_named_step_is_the_first_that_cannot_be_mended(schedule: Schedule) -> None:
    """Steps cut off before the named one can be completed by direct transfers, those up to it cannot."""
    try:
        schedule.verify()
    except ScheduleError as error:
        message = str(error)
    else:
        return
    if named := re.search(r"It cannot be repaired after step (\d+)", message):
        step = int(named[1])
        assert can_be_completed(schedule, step)
        assert not can_be_completed(schedule, step + 1)
    elif message.startswith("at the end"):
        assert can_be_completed(schedule, len(schedule.steps))


def can_be_completed(schedule: Schedule, steps: int) -> bool:
    """Whether disjoint sums that are held after so many steps make up every promised sum; by plain recursion on what
    the oracle holds."""
    size = schedule.size
    held = sums_held(schedule, steps)
    for rank in range(size):
        for piece, first, last in zip(*promised(schedule, rank), strict=True):
            if not covers(held[piece], frozenset(range(first, last)), schedule.contract.counts_once):
                return False
    return True


def covers(sums: set[frozenset[int]], wanted: frozenset[int], once: bool) -> bool:
    useful = {each for each in sums if each and each <= wanted}
    if not once or not wanted:
        return frozenset().union(*useful) == wanted
    first = min(wanted)
    return any(each == wanted or covers(useful, wanted - each, once) for each in useful if first in each)


def sums_held(schedule: Schedule, steps: int) -> dict[int, set[frozenset[int]]]:
    """By piece, the sets of ranks whose contributions some chunk of some rank holds after so many steps."""
    pieces = places(schedule) // schedule.size
    one = np.eye(schedule.size * pieces, dtype=np.int64)
    start = [schedule.contract.start(rank).piece.tolist() for rank in range(schedule.size)]
    inputs = [[one[rank * pieces + piece] for piece in start[rank]] for rank in range(schedule.size)]
    first_steps = dataclasses.replace(schedule, steps=Steps(lambda: itertools.islice(iter(schedule.steps), steps)))
    nothing = dataclasses.replace(schedule, steps=Steps(lambda: iter([Step.concat([])])))
    ((_, held),) = deque(states(first_steps if steps else nothing, inputs, np.maximum), maxlen=1)
    found: dict[int, set[frozenset[int]]] = {piece: set() for piece in range(pieces)}
    for chunks in held:
        for data in chunks.values():
            ranks, piece = np.divmod(np.flatnonzero(data), pieces)
            found[int(piece[0])].add(frozenset(ranks.tolist()))
    return found
