"""Plain model parallelism: one micro-batch at a time through all stages and back. The baseline for all other schedules.

A model whose layers are on several devices runs like this without a plan. Memory is divided, work is not: all ranks but
one are idle at any time. 2 ranks, 2 micro-batches:

    rank 0  F0          BW0-- F1          BW1--
    rank 1     F0 BW0--          F1 BW1--
"""

from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="a micro-batch forwards and backwards, then the next",
    idle="3*(p-1)*m",
    peak="1",
    wins="never: a baseline",
    source="PyTorch's tutorial on model parallelism",
)


@pipeline_schedule("model_parallel", CARD)
def model_parallel(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    for micro in range(num_microbatches):
        yield Action("F", rank, micro)
        yield Action("BW", rank, micro)
