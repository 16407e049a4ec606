"""1F1B: one forward and one backward alternate, so that rank r holds at most p-r activations.

Fill and drain holds every activation until all forwards are done. The last rank, however, can start a backward directly
after its forward. Rank r then needs only as many micro-batches in flight as pass before the first one returns: p-r.
The bubble is the same. 3 ranks, 4 micro-batches:

    rank 0  F0 F1 F2             BW0-- F3 BW1--    BW2--    BW3--
    rank 1     F0 F1       BW0-- F2 BW1-- F3 BW2--    BW3--
    rank 2        F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3--
"""

from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="one F and one BW alternate",
    idle="3*(p-1)",
    peak="min(p-r, m)",
    wins="memory is scarce and the backward cannot be split",
    source="Narayanan et al., PipeDream, 2019; Fan et al., DAPPLE, 2021",
)


@pipeline_schedule("1f1b", CARD)
def one_f_one_b(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, num_microbatches)  # forwards before the first backward
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if ahead + micro < num_microbatches:
            yield Action("F", rank, ahead + micro)
        yield Action("BW", rank, micro)
