"""ZB-H1: 1F1B with the backward split into B and W, so that the gradients of the weights fill idle time.

The previous rank waits only for the gradient of the input (B); no rank waits for the gradient of the weights (W). So B
runs at once, which halves the time of the way back, and W runs when the rank has time. Up to the last p micro-batches W
follows its B, as in 1F1B. From there on W waits until the rank's last forward is done. Thus the last backwards reach
the first rank earlier, and the later ranks run their W while the pipeline drains. 3 ranks, 5 micro-batches; F, B and W
take equally long:

    rank 0  F0 F1 F2       B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
    rank 1     F0 F1    B0 W0 F2 B1 W1 F3 B2 F4 B3 W2 B4 W3 W4
    rank 2        F0 B0 W0 F1 B1 W1 F2 B2 F3 B3 F4 B4 W2 W3 W4

An activation is held until its W. On the first rank W never waits. On rank r the delayed W replace the forwards that
1F1B has in flight on the ranks before it, so no rank holds more than p activations, like the first rank of 1F1B.

For any durations of F, B and W, p or more micro-batches have a bubble of (p-1) * max(F, B, F+B-W); the bubble of 1F1B
is (p-1) * (F+B+W). These formulas hold for stages of equal duration; otherwise compare the two with ``cost()``.
"""

from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="1F1B, the backward split: B at once, W later",
    idle="max(p-1, 2*p-1-m)",
    peak="min(p, m)",
    wins="one stage a rank: 1/3 of the bubble of 1F1B, in the memory of its first rank",
    source="Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism, 2024",
)


@pipeline_schedule("zb_h1", CARD)
def zb_h1(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    ahead = min(ranks - 1 - rank, num_microbatches)
    last = num_microbatches - ahead - 1  # the backward that the last forward precedes
    done = 0  # the W actions so far
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if micro <= last:
            yield Action("F", rank, ahead + micro)
        yield Action("B", rank, micro)
        if not num_microbatches - ranks <= micro < last:  # in between, W waits until the last forward is done
            yield Action("W", rank, done)
            done += 1
    for micro in range(done, num_microbatches):
        yield Action("W", rank, micro)
