"""Exercises whose answers are the orders of a pipeline."""

from __future__ import annotations

from ..exercise import Exercise
from ..plan_check import check_plans

__all__: list[str] = []

ONE_F_ONE_B = Exercise(
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
    check=lambda answer: check_plans(answer, "fill_drain", lambda rank, ranks, count: min(ranks - rank, count)),
)


ZERO_BUBBLE = Exercise(
    title="Split the backward",
    task="""
In 1F1B a rank waits for the whole backward of the next one. But only the gradient of the input (B) is needed by the
rank before; the gradients of the weights (W) can wait. Split each BW into B and W, such that the step takes no longer
than a step of ZB-H1, where F, B and W take equally long, and no rank holds more than ``ranks`` activations (each from
its F until its W). ``python -m dist_prims pipeline 1f1b`` and ``... pipeline zb_h1`` draw both.
""",
    template="""
from dist_prims.schedules.pipelines import Action


def order(rank, ranks, num_microbatches):
    ahead = min(ranks - 1 - rank, num_microbatches)
    for micro in range(ahead):
        yield Action("F", rank, micro)
    for micro in range(num_microbatches):
        if ahead + micro < num_microbatches:
            yield Action("F", rank, ahead + micro)
        yield Action("BW", rank, micro)
""",
    hints=(
        "Replace BW by B and W at once: that is right, and already shorter. Which W are in the way of a later B or F?",
        "At the end no forwards are left; B of the last micro-batches should run first, and the W that are left "
        "after them.",
        "Keep a count of the W that are done. Run W after its B, except for the last `ranks` micro-batches: until the "
        "rank's last forward is done, leave their W out; the missing ones come at the end.",
    ),
    check=lambda answer: check_plans(answer, "zb_h1", lambda rank, ranks, count: min(ranks, count)),
)
