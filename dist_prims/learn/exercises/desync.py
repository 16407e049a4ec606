"""Exercise: ranks with different numbers of batches make the same collective calls."""

from __future__ import annotations

from ..answer import Answer, private_values
from ..exercise import Exercise, WrongAnswerError
from ..messages import run

__all__: list[str] = []

EXERCISE = Exercise(
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
    check=lambda answer: _check(answer),
)

LENGTHS: tuple[tuple[int, ...], ...] = ((2, 2), (1, 3), (0, 1, 0), (0, 0), (5, 0, 1, 2))


def _check(answer: Answer) -> str:
    for lengths in LENGTHS:
        _check_values(answer, [private_values(length) for length in lengths])
    for values in ([[0, 0, 0], [0]], [[1, 2, 3], [], [-3], [7, 7]]):
        _check_values(answer, values)
    return "all ranks end with the sum of all values, for lists of all lengths"


def _check_values(answer: Answer, values: list[list[int]]) -> None:
    programs = [answer.program("program", rank, own) for rank, own in enumerate(values)]
    for rank, total in enumerate(run(lambda rank, _: programs[rank], len(values))):
        if total != sum(map(sum, values)):
            raise WrongAnswerError(
                f"values {values}: rank {rank} returns {total!r}; the sum of all is {sum(map(sum, values))}"
            )
