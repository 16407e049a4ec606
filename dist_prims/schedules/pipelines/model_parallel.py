"""Plain model parallelism: one micro-batch at a time, through all stages and back. The naive twin of all the others.

It is what comes of a model whose layers lie on several devices, without a plan: memory is shared out, work is not, for
all ranks but one always wait. 2 ranks, 2 micro-batches:

    rank 0  F0          BW0-- F1          BW1--
    rank 1     F0 BW0--          F1 BW1--
"""

from collections.abc import Iterator

from .plan import Action
from .registry import PipelineCard, pipeline_schedule

__all__ = ["model_parallel"]

CARD = PipelineCard(
    idea="a micro-batch forwards and backwards, then the next",
    idle="3*(p-1)*m",
    peak="1",
    wins="never: to compare with",
    source="PyTorch's tutorial on model parallelism",
)


@pipeline_schedule("model_parallel", CARD)
def model_parallel(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    for micro in range(num_microbatches):
        yield Action("F", rank, micro)
        yield Action("BW", rank, micro)
