"""Exercise: the size at which a ring overtakes recursive doubling."""

from __future__ import annotations

import math

from ...schedules import build
from ..answer import Answer
from ..exercise import Exercise, WrongAnswerError

__all__: list[str] = []

EXERCISE = Exercise(
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
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
