"""Exercise: the order of additions of a ring, reproduced to the bit."""

from __future__ import annotations

import numpy as np

from ...schedules import build
from ..answer import Answer
from ..exercise import Exercise, WrongAnswerError

__all__: list[str] = []

EXERCISE = Exercise(
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
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
