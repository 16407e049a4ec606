"""Exercise: ranks on a line exchange values with both sides; the given order of calls hangs."""

from __future__ import annotations

from ..answer import Answer, private_values, run_programs
from ..exercise import Exercise, WrongAnswerError

__all__: list[str] = []

EXERCISE = Exercise(
    title="Repair a deadlock: exchange with both sides",
    task="""
Ranks are on a line. Each has a value, gives it to the ranks beside it, if there are such, and returns the pair (value
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    for size in range(1, 9):
        values = private_values(size)
        for rank, pair in enumerate(run_programs(answer, values)):
            wanted = (values[rank - 1] if rank else None), (values[rank + 1] if rank < size - 1 else None)
            if pair != wanted:
                raise WrongAnswerError(
                    f"{size} ranks with the values {values}: rank {rank} returns {pair!r}; it must return {wanted}"
                )
    return "1 to 8 ranks end, each with the values from both sides"
