"""Exercise: ranks on a line exchange values with both sides; the given order of calls hangs."""

from __future__ import annotations

from ..exercise import Answer, Exercise, WrongAnswerError, function
from ..messages import run

__all__: list[str] = []

EXERCISE = Exercise(
    title="Repair a deadlock: exchange with both sides",
    task="""
Ranks are on a line. Each gives its value to the ranks beside it, if there are such, and returns the pair (value of
rank-1, value of rank+1), with None where there is no rank. The program below hangs. Change the order of its calls.
""",
    template="""
from dist_prims.learn.messages import Receive, Send


def program(rank, size):
    left = right = None
    value = rank * rank
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    program = function(answer, "program")
    for size in range(1, 9):
        for rank, value in enumerate(run(program, size)):
            left, right = ((rank - 1) ** 2 if rank else None), ((rank + 1) ** 2 if rank < size - 1 else None)
            if value != (left, right):
                raise WrongAnswerError(f"{size} ranks: rank {rank} returns {value!r}; it must return {(left, right)}")
    return "1 to 8 ranks end, each with the values from both sides"
