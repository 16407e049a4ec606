"""Exercise: cut data into shards, one for each rank."""

from __future__ import annotations

from ..answer import Answer
from ..exercise import Exercise, WrongAnswerError

__all__: list[str] = []

EXERCISE = Exercise(
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
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
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
