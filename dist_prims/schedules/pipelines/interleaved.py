"""Interleaved 1F1B: several thin stages a rank instead of one thick one, so that the pipeline fills sooner.

With v stages a rank, stage s with rank s % p, a micro-batch comes round v times, and the bubble, which is what filling
takes, shrinks to a v-th; for that there are v times the messages. Micro-batches go in rounds: so many of the first
stage that the second has its input when they are through. 2 ranks, 4 stages, 4 micro-batches (F1.0: stage 1,
micro-batch 0):

    rank 0  F0.0 F0.1 F2.0 F2.1 F0.2      BW2.0---- F0.3 BW2.1---- F2.2 BW0.0---- F2.3 BW0.1----  ...
    rank 1       F1.0 F1.1 F3.0 BW3.0---- F3.1 BW3.1---- F1.2 BW1.0---- F1.3 BW1.1---- F3.2  ...

A round must be at least p long, or a rank would wait for its own results. Where p does not divide the number of
micro-batches, the first rounds are longer, not the last one shorter: so the bubble is as small as if it did.
"""

import itertools
from collections.abc import Iterator

from .plan import Action
from .registry import PipelineCard, pipeline_schedule

__all__ = ["interleaved"]

CARD = PipelineCard(
    idea="1F1B over v thin stages a rank",
    idle="3*max(p-1, v*p-1-(v-1)*m)",
    peak="min(v*m, 2*(p-1-r)+(v-1)*g+1)",
    wins="many layers, fast links: a v-th of the bubble of 1F1B",
    source="Narayanan et al., Efficient Large-Scale Language Model Training, 2021",
    where={"g": lambda p, m: len(_rounds(p, m)[0])},
)


@pipeline_schedule("interleaved_1f1b", CARD, stages_a_rank=2, any_more=True)
def interleaved(rank: int, ranks: int, num_microbatches: int, stages_a_rank: int) -> Iterator[Action]:
    rounds = _rounds(ranks, num_microbatches)
    turns = [(chunk * ranks + rank, each) for each in rounds for chunk in range(stages_a_rank)]
    turns_back = [(chunk * ranks + rank, each) for each in rounds for chunk in reversed(range(stages_a_rank))]
    forwards = [Action("F", stage, micro) for stage, each in turns for micro in each]
    backwards = [Action("BW", stage, micro) for stage, each in turns_back for micro in each]
    # Twice as many as the ranks behind: with one for each the bubble is the same, but only if messages take no time.
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
