"""ZBV: two stages a rank in the shape of a V; each backward begins on the rank on which its forward began.

Stage s is on rank s on the way down, and on rank 2p-1-s on the way up. The first rank has the first and the last stage,
and the two middle stages are both on the last rank and need no message between them. A rank can start a backward as
soon as the first micro-batch returns to it. With the backward split (see :mod:`.zero_bubble`) an F, a B or a W is then
always due: no rank waits between its first and its last action, if all actions take equally long and there are at least
2p-1 micro-batches. 2 ranks, 3 micro-batches (F3.0: stage 3, micro-batch 0):

    rank 0  F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 B0.0 W0.0 F3.2 B3.2 W3.2 B0.1 W0.1 B0.2 W0.2
    rank 1       F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 W2.1 B1.1 B2.2 B1.2 W1.1 W2.2 W1.2

A rank holds at most 2p activations. Its stages are half as large as the stages of 1F1B, so it needs as much memory as
the first rank of 1F1B.
"""

from collections import Counter
from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="two stages a rank, down the ranks and up again; the backward split",
    idle="max(p-1, 4*p-2-2*m)",
    peak="min(2*m, 2*p, m+1+r)",
    wins="F, B and W take equally long, at least 2p-1 micro-batches: 1/6 of the bubble of 1F1B",
    source="Qi, Wan, Amar and Lin, Pipeline Parallelism with Controllable Memory, 2024",
)


@pipeline_schedule("zbv", CARD, stages_a_rank=2, v_shape=True)
def zbv(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    done: Counter[tuple[str, int]] = Counter()
    # Fewer micro-batches than fill the pipeline: make the order for as many as fill it, and skip the missing ones.
    for kind, stage in _turns(rank, ranks, max(num_microbatches, 2 * ranks - 1)):
        micro = done[kind, stage]
        done[kind, stage] += 1
        if micro < num_microbatches:
            yield Action(kind, stage, micro)


def _turns(rank: int, ranks: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
    """Kind and stage of each action; for each kind and stage the micro-batches come in order."""
    down, up = rank, 2 * ranks - 1 - rank
    ranks_from_here = ranks - rank
    more = num_microbatches - (2 * ranks - 1 - rank)  # forwards of the first stage left when the pipeline is full
    yield from [("F", down)] * (2 * ranks_from_here - 1)  # until micro-batch 0 comes up again
    yield from [("F", up), ("F", down)] * rank  # until the gradient of the second stage comes
    yield from [("F", up), ("B", up), ("W", up)] * ranks_from_here  # until the gradient of the first stage comes
    for turn in range(num_microbatches - ranks):
        yield from [("F", down)] * (turn < more)
        yield from [("B", down), ("W", down), ("F", up), ("B", up), ("W", up)]
    # Drain: the ranks before this one wait for its B, so its W come last.
    yield from [("B", down), ("B", up)] * rank
    yield from [("B", down), ("W", down)] * ranks_from_here
    yield from [("W", up)] * rank
    yield from [("W", down)] * rank
