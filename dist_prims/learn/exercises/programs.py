"""Exercises whose answers are programs of ranks, or functions that return numbers."""

from __future__ import annotations

import math

import numpy as np

from ...schedules import build
from ..answer import Answer, private_values, run_programs
from ..exercise import Exercise, WrongAnswerError
from ..messages import run

__all__: list[str] = []

RING_PASS = Exercise(
    title="Send around the ring",
    task="""
Every rank has a value, which no other rank knows. It sends the value to the next rank, rank 0 being next to the
last one, and returns the value that it gets from the previous rank. ``yield Send(to=..., value=...)`` sends,
``received = yield Receive(source=...)`` receives.

A send ends only when the other rank receives. If all ranks send first, none receives: a deadlock.
""",
    template="""
from dist_prims.learn.messages import Receive, Send


def program(rank, size, value):
    following, previous = (rank + 1) % size, (rank - 1) % size
    ...  # yield Send(to=following, value=value) and received = yield Receive(source=previous)
    return received
""",
    hints=(
        "At least one rank must receive before it sends.",
        "If one rank receives first, the rank before it can finish its send, and then receives, and so on round "
        "the ring.",
        "if rank == 0: receive, then send. All other ranks: send, then receive.",
    ),
    check=lambda answer: _check_ring_pass(answer),
)


def _check_ring_pass(answer: Answer) -> str:
    for size in range(2, 9):
        values = private_values(size)
        for rank, value in enumerate(run_programs(answer, values)):
            if value != values[rank - 1]:
                raise WrongAnswerError(
                    f"{size} ranks with the values {values}: rank {rank} returns {value!r}; it must return the value "
                    f"of rank {(rank - 1) % size}, {values[rank - 1]}"
                )
    return "2 to 8 ranks end, each with the value of the rank before it"


DEADLOCK = Exercise(
    title="Repair a deadlock: exchange with both sides",
    task="""
Ranks are on a line. Each has a value, gives it to the ranks beside it, if they exist, and returns the pair (value
of rank-1, value of rank+1), with None where there is no rank. The program below hangs. Change the order of its calls.
""",
    template="""
from dist_prims.learn.messages import Receive, Send


def program(rank, size, value):
    left = right = None
    if rank > 0:
        yield Send(to=rank - 1, value=value)
        left = yield Receive(source=rank - 1)
    if rank < size - 1:
        yield Send(to=rank + 1, value=value)
        right = yield Receive(source=rank + 1)
    return left, right
""",
    hints=(
        "Of two ranks that exchange values, one must receive first.",
        "Ranks 0 and 1 both send first. Which property do two ranks that are beside each other never share?",
        "Ranks with an even number send first and receive then; ranks with an odd number receive first.",
    ),
    check=lambda answer: _check_deadlock(answer),
)


def _check_deadlock(answer: Answer) -> str:
    for size in range(1, 9):
        values = private_values(size)
        for rank, pair in enumerate(run_programs(answer, values)):
            wanted = (values[rank - 1] if rank else None), (values[rank + 1] if rank < size - 1 else None)
            if pair != wanted:
                raise WrongAnswerError(
                    f"{size} ranks with the values {values}: rank {rank} returns {pair!r}; it must return {wanted}"
                )
    return "1 to 8 ranks end, each with the values from both sides"


DESYNC = Exercise(
    title="Repair ranks that make different calls",
    task="""
Every rank has a list of values, one for each of its batches, and all-reduces each of them. The lists have different
lengths, so some rank waits in an all_reduce that the others never call. Repair the program: every rank returns the
sum of all values of all ranks, whatever the lengths. ``total = yield AllReduce(value)`` is the sum of the values of
all ranks; all must call it.
""",
    template="""
from dist_prims.learn.messages import AllReduce


def program(values):
    total = 0
    for value in values:
        total += yield AllReduce(value)
    return total
""",
    hints=(
        "A rank without batches can go on calling with a value that changes nothing.",
        "How does a rank know that no other rank has a batch left? It can ask by an all_reduce.",
        "Repeat: left = yield AllReduce(1 if there is a batch left, else 0); end if left == 0; else all-reduce "
        "the value, or 0.",
    ),
    check=lambda answer: _check_desync(answer),
)

LENGTHS: tuple[tuple[int, ...], ...] = ((2, 2), (1, 3), (0, 1, 0), (0, 0), (5, 0, 1, 2))


def _check_desync(answer: Answer) -> str:
    for lengths in LENGTHS:
        _check_sums(answer, [private_values(length) for length in lengths])
    for values in ([[0, 0, 0], [0]], [[1, 2, 3], [], [-3], [7, 7]]):
        _check_sums(answer, values)
    return "all ranks end with the sum of all values, for lists of all lengths"


def _check_sums(answer: Answer, values: list[list[int]]) -> None:
    programs = [answer.program("program", rank, own) for rank, own in enumerate(values)]
    for rank, total in enumerate(run(lambda rank, _: programs[rank], len(values))):
        if total != sum(map(sum, values)):
            raise WrongAnswerError(
                f"values {values}: rank {rank} returns {total!r}; the sum of all is {sum(map(sum, values))}"
            )


SHARDS = Exercise(
    title="Cut parameters into shards",
    task="""
ZeRO keeps the optimizer's state of each parameter on one rank only. Cut ``count`` elements into ``size`` shards:
shard ``rank`` is the range begin to end - 1. The shards follow each other, contain every element once, and their
lengths differ by at most 1, also where ``size`` does not divide ``count``.
""",
    template="""
def shard(count, rank, size):
    length = count // size  # loses elements
    return rank * length, (rank + 1) * length
""",
    hints=(
        "What happens to the last count % size elements?",
        "Give one element more to some of the ranks, or compute both ends by one formula.",
        "The shard of rank begins at rank * count // size, and ends where the next one begins.",
    ),
    check=lambda answer: _check_shards(answer),
)


def _check_shards(answer: Answer) -> str:
    for count in (*range(18), 100, 1023):
        for size in range(1, 9):
            shards = [answer.value("shard", count, rank, size) for rank in range(size)]
            if not all(isinstance(each, tuple | list) and [type(end) for end in each] == [int, int] for each in shards):
                raise WrongAnswerError(f"{count} elements on {size} ranks: the shards are {shards}; return 2 integers")
            here = f"{count} elements on {size} ranks: the shards are {shards}"
            ends = [0, *(end for _, end in shards)]
            if [begin for begin, _ in shards] != ends[:-1] or ends[-1] != count:
                raise WrongAnswerError(f"{here}; they must follow each other from 0 to {count}")
            lengths = [end - begin for begin, end in shards]
            if min(lengths) < 0 or max(lengths) - min(lengths) > 1:
                raise WrongAnswerError(f"{here}; their lengths must differ by at most 1")
    return "every element is in one shard, and lengths differ by at most 1"


RING_ORDER = Exercise(
    title="Reproduce a sum to the bit",
    task="""
Floats are rounded after every addition, so (a + b) + c and a + (b + c) may differ. A schedule fixes the order. Write
the sum that a ring all-reduce computes for one chunk: ``values[rank]`` is the number of that rank in the chunk, a
numpy.float32. The result must have the same bits. ``python -m dist_prims show all_reduce ring --size 4`` shows the
schedule.
""",
    template="""
def add(values, chunk):
    return sum(values)  # the wrong order for most chunks
""",
    hints=(
        "Which rank sends the chunk first?",
        "Chunk c begins on rank c and visits every rank once; each adds its own number to what has come.",
        "total = values[chunk]; then add values[(chunk + k) % size] for k = 1, 2, ..., size - 1.",
    ),
    check=lambda answer: _check_ring_order(answer),
)


def _check_ring_order(answer: Answer) -> str:
    random = np.random.default_rng(0)
    for size in range(2, 9):
        ring = build("all_reduce", "ring", size)
        for chunk in range(size):
            order = ring.order(chunk)
            for _ in range(20):
                values = [np.float32(each) for each in random.normal(size=size) * 10.0 ** random.integers(-3, 4, size)]
                found, want = answer.value("add", values, chunk), order.evaluate(values)
                if np.float32(found) != want:
                    raise WrongAnswerError(
                        f"{size} ranks, chunk {chunk}: the sum of {[float(each) for each in values]} is {found}; the "
                        f"ring computes {want}, as {order}"
                    )
    return "the same bits as the ring for 2 to 8 ranks and every chunk"


CROSSOVER = Exercise(
    title="When does a ring win?",
    task="""
A message costs ``alpha`` seconds and each of its bytes ``beta``. On a power of two of ranks, n:

    ring                  2 (n-1) messages, in which a rank sends 2 (n-1) / n of the data
    recursive doubling    log2(n) messages, each with the whole data

Return the number of bytes for which both take equally long (n is at least 4). Reductions cost nothing here.
""",
    template="""
import math


def crossover(n, alpha, beta):
    ...
""",
    hints=(
        "Write both times as a * alpha + b * beta * bytes, and set them equal.",
        "ring = 2 (n-1) alpha + 2 (n-1) / n * beta * bytes; doubling = L alpha + L beta * bytes, with L = log2(n).",
        "bytes = alpha * (2 (n-1) - L) / (beta * (L - 2 (n-1) / n)).",
    ),
    check=lambda answer: _check_crossover(answer),
)


def _check_crossover(answer: Answer) -> str:
    for n in (4, 8, 16, 64):
        for alpha, beta in ((1e-5, 1e-9), (1e-6, 1e-10), (5e-4, 1e-8)):
            nbytes = answer.value("crossover", n, alpha, beta)
            if not isinstance(nbytes, (int, float)) or not 0 < nbytes < math.inf:
                raise WrongAnswerError(f"crossover({n}, {alpha}, {beta}) is {nbytes!r}; it must be a number of bytes")
            names = ("ring", "recursive_doubling")
            ring, doubling = (build("all_reduce", name, n).cost(nbytes, alpha, beta) for name in names)
            if not math.isclose(ring, doubling, rel_tol=1e-6):
                raise WrongAnswerError(
                    f"crossover({n}, {alpha}, {beta}) is {nbytes:g} bytes, for which the ring takes {ring:.4g} s and "
                    f"recursive doubling {doubling:.4g} s"
                )
    return "both algorithms take equally long there, by the cost model"
