"""1F1B: one forward, one backward in turn, so that a rank holds no more activations than there are ranks behind it.

Fill and drain keeps every activation until all forwards are done. But the last rank can go back as soon as it has gone
forward, and then each rank needs only as many micro-batches under way as it takes one to come back to it: p - r. The
bubble is the same. 3 ranks, 4 micro-batches:

    rank 0  F0 F1 F2             BW0-- F3 BW1--    BW2--    BW3--
    rank 1     F0 F1       BW0-- F2 BW1-- F3 BW2--    BW3--
    rank 2        F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3--
"""

from collections.abc import Iterator

from .plan import Action
from .registry import PipelineCard, pipeline_schedule

__all__ = ["one_f_one_b"]

CARD = PipelineCard(
    idea="one F, one BW in turn",
    idle="3*(p-1)",
    peak="min(p-r, m)",
    wins="memory is short and the backward cannot be split",
    source="Narayanan et al., PipeDream, 2019; Fan et al., DAPPLE, 2021",
)


@pipeline_schedule("1f1b", CARD)
def one_f_one_b(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, num_microbatches)  # forwards before the first backward can come
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if ahead + micro < num_microbatches:
            yield Action("F", rank, ahead + micro)
        yield Action("BW", rank, micro)
