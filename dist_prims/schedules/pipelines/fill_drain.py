"""Fill and drain (GPipe): all forwards, then all backwards.

The simplest order in which the ranks work at the same time. The pipeline fills and drains once for the forwards and
once for the backwards, which costs a bubble of 3(p-1) units. All activations are held in between, so memory grows with
the number of micro-batches. 2 ranks, 3 micro-batches:

    rank 0  F0 F1 F2          BW2-- BW1-- BW0--
    rank 1     F0 F1 F2 BW2-- BW1-- BW0--

The last micro-batch goes back first: its activations are the most recent, and the last rank need not wait.
"""

from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="all F, then all BW",
    idle="3*(p-1)",
    peak="m",
    wins="memory is plentiful: fewest waits for messages",
    source="Huang et al., GPipe, 2019",
)


@pipeline_schedule("fill_drain", CARD)
def fill_drain(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    for micro in range(num_microbatches):
        yield Action("F", rank, micro)
    for micro in reversed(range(num_microbatches)):
        yield Action("BW", rank, micro)
