"""Exercise: 1F1B made from fill and drain."""

from __future__ import annotations

from ..answer import Answer
from ..exercise import Exercise
from ..plan_check import check_plans

__all__: list[str] = []

EXERCISE = Exercise(
    title="Make 1F1B from fill and drain",
    task="""
A pipeline with one stage a rank. The order below computes all forwards (F), then all backwards (BW), so every rank
holds the activations of all micro-batches at once. Reorder the actions: rank r may hold at most ranks - r activations
(each is held from its F until its BW), and the step must not take longer. ``python -m dist_prims pipeline
fill_drain`` draws the order below.
""",
    template="""
from dist_prims.schedules.pipelines import Action


def order(rank, ranks, num_microbatches):
    for micro in range(num_microbatches):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        yield Action("BW", rank, micro)
""",
    hints=(
        "The last rank can compute BW of a micro-batch directly after its F.",
        "Rank r computes some forwards ahead, then one forward and one backward alternate.",
        "Ahead are min(ranks - 1 - rank, num_microbatches) forwards. Then for each backward first the next "
        "forward, if one is left.",
    ),
    check=lambda answer: _check(answer),
)


def _check(answer: Answer) -> str:
    def most_held(rank: int, ranks: int, count: int) -> int:
        return min(ranks - rank, count)

    return check_plans(answer, "fill_drain", most_held)
