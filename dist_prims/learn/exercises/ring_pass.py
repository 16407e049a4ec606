"""Exercise: a message travels once round a ring, without a deadlock."""

from __future__ import annotations

from ..exercise import Answer, Exercise, WrongAnswerError, function
from ..messages import run

__all__: list[str] = []

EXERCISE = Exercise(
    title="Send around the ring",
    task="""
Every rank sends its own number to the next rank, rank 0 being next to the last one, and returns the number that it
gets from the previous rank. ``yield Send(to=..., value=...)`` sends, ``value = yield Receive(source=...)`` receives.

A send ends only when the other rank receives. If all ranks send first, none receives: a deadlock.
""",
    template="""
from dist_prims.learn.messages import Receive, Send


def program(rank, size):
    following, previous = (rank + 1) % size, (rank - 1) % size
    ...  # yield Send(to=following, value=rank) and received = yield Receive(source=previous)
    return received
""",
    hints=(
        "At least one rank must receive before it sends.",
        "If one rank receives first, the rank before it can finish its send, and then receives, and so on round "
        "the ring.",
        "if rank == 0: receive, then send. All other ranks: send, then receive.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    program = function(answer, "program")
    for size in range(2, 9):
        found = run(program, size)
        for rank, value in enumerate(found):
            if value != (rank - 1) % size:
                raise WrongAnswerError(
                    f"{size} ranks: rank {rank} returns {value!r}; it must return {(rank - 1) % size}"
                )
    return "2 to 8 ranks end, each with the number of the rank before it"
