"""Interleaved 1F1B: several thin stages a rank instead of one thick stage, so that the pipeline fills sooner.

With v stages a rank (stage s on rank s % p) a micro-batch passes each rank v times. The bubble, which is the time to
fill the pipeline, shrinks to 1/v; the number of messages grows to v times. Micro-batches go in rounds: a rank computes
its first stage for all micro-batches of a round, then its second stage, and so on. 2 ranks, 4 stages, 4 micro-batches
(F1.0: stage 1, micro-batch 0):

    rank 0  F0.0 F0.1 F2.0 F2.1 F0.2      BW2.0---- F0.3 BW2.1---- F2.2 BW0.0---- F2.3 BW0.1----  ...
    rank 1       F1.0 F1.1 F3.0 BW3.0---- F3.1 BW3.1---- F1.2 BW1.0---- F1.3 BW1.1---- F3.2  ...

A round must have at least p micro-batches; otherwise a rank waits for its own results. If p does not divide the number
of micro-batches, the first rounds are longer instead of the last one shorter, which keeps the bubble equally small.
"""

import itertools
from collections.abc import Iterator

from .actions import Action
from .registry import PipelineCard, pipeline_schedule

__all__: list[str] = []

CARD = PipelineCard(
    idea="1F1B over v thin stages a rank",
    idle="3*max(p-1, v*p-1-(v-1)*m)",
    peak="min(v*m, 2*(p-1-r)+(v-1)*g+1)",
    wins="many layers, fast links: 1/v of the bubble of 1F1B",
    source="Narayanan et al., Efficient Large-Scale Language Model Training, 2021",
    where={"g": lambda p, m: len(_rounds(p, m)[0])},
)


@pipeline_schedule("interleaved_1f1b", CARD, stages_a_rank=2, any_more=True)
def interleaved(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    rounds = _rounds(ranks, num_microbatches)
    turns = [(chunk * ranks + rank, micros) for micros in rounds for chunk in range(stages_a_rank)]
    turns_back = [(chunk * ranks + rank, micros) for micros in rounds for chunk in reversed(range(stages_a_rank))]
    forwards = [Action("F", stage, micro) for stage, micros in turns for micro in micros]
    backwards = [Action("BW", stage, micro) for stage, micros in turns_back for micro in micros]
    # Two forwards for each rank behind this one. One would give the same bubble only if messages took no time.
    ahead = min(2 * (ranks - 1 - rank) + (stages_a_rank - 1) * len(rounds[0]), len(forwards))
    yield from forwards[:ahead]
    for at, backward in enumerate(backwards):
        yield from forwards[ahead + at : ahead + at + 1]
        yield backward


def _rounds(ranks: int, num_microbatches: int) -> list[range]:
    """The micro-batches in rounds of at least ``ranks``, the longest first.

    >>> [len(each) for each in _rounds(4, 11)], [len(each) for each in _rounds(4, 3)]
    ([6, 5], [3])
    """
    count = max(1, num_microbatches // ranks)
    cuts = [-(-num_microbatches * at // count) for at in range(count + 1)]
    return [range(first, last) for first, last in itertools.pairwise(cuts)]
