"""ZBV: two stages a rank in the shape of a V, so that the way back begins on the rank where the way there began.

Stage s is with rank s on the way down, and with rank 2p-1-s on the way up: the first rank has the first stage and the
last one, and the last rank's two stages need no message between them. A rank can turn round as soon as the first
micro-batch comes up to it, and with the backward split (see :mod:`.zero_bubble`) there is always an F, a B or a W that
is due: from its first action to its last no rank waits, if all take equally long and micro-batches are 2p-1 or more.
2 ranks, 3 micro-batches (F3.0: stage 3, micro-batch 0):

    rank 0  F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 B0.0 W0.0 F3.2 B3.2 W3.2 B0.1 W0.1 B0.2 W0.2
    rank 1       F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 W2.1 B1.1 B2.2 B1.2 W1.1 W2.2 W1.2

A rank holds at most 2p activations of its stages, each half as thick
as one of 1F1B's: as much as the first rank of 1F1B.
"""

from collections import Counter
from collections.abc import Iterator

from .plan import Action
from .registry import PipelineCard, pipeline_schedule

__all__ = ["zbv"]

CARD = PipelineCard(
    idea="two stages a rank, down the ranks and up again; the backward split",
    idle="max(p-1, 4*p-2-2*m)",
    peak="min(2*m, 2*p, m+1+r)",
    wins="F, B and W take about as long, 2p-1 micro-batches or more: a sixth of the bubble of 1F1B",
    source="Qi, Wan, Amar and Lin, Pipeline Parallelism with Controllable Memory, 2024",
)


@pipeline_schedule("zbv", CARD, stages_a_rank=2, v_shape=True)
def zbv(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    done: Counter[tuple[str, int]] = Counter()
    # For fewer micro-batches than fill the pipeline: the plan for so many, without those that there are not.
    for kind, stage in _turns(rank, ranks, max(num_microbatches, 2 * ranks - 1)):
        micro = done[kind, stage]
        done[kind, stage] += 1
        if micro < num_microbatches:
            yield Action(kind, stage, micro)


def _turns(rank: int, ranks: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
    """Kind and stage of each action; micro-batches follow each other in each kind and stage."""
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - rank
    more = num_microbatches - (
        2 * ranks - 1 - rank
    )  # forwards of the first stage that are left when the pipeline is full
    yield from [("F", down)] * (2 * behind - 1)
    yield from [("F", up), ("F", down)] * rank
    yield from [("F", up), ("B", up), ("W", up)] * behind
    for turn in range(num_microbatches - ranks):
        yield from [("F", down)] * (turn < more)
        yield from [("B", down), ("W", down), ("F", up), ("B", up), ("W", up)]
    yield from [("B", down), ("B", up)] * rank
    yield from [("B", down), ("W", down)] * behind
    yield from [("W", up)] * rank
    yield from [("W", down)] * rank
