"""Exercise: a message travels once round a ring, without a deadlock."""

from __future__ import annotations

from ..answer import Answer, private_values, run_programs
from ..exercise import Exercise, WrongAnswerError

__all__: list[str] = []

EXERCISE = Exercise(
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    for size in range(2, 9):
        values = private_values(size)
        for rank, value in enumerate(run_programs(answer, values)):
            if value != values[rank - 1]:
                raise WrongAnswerError(
                    f"{size} ranks with the values {values}: rank {rank} returns {value!r}; it must return the value "
                    f"of rank {(rank - 1) % size}, {values[rank - 1]}"
                )
    return "2 to 8 ranks end, each with the value of the rank before it"
