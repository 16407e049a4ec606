"""Tables of the registered pipeline schedules, and the description of one plan, for the README and the terminal."""

from __future__ import annotations

from .cost import lower_bound
from .plan import pipeline_plan
from .registry import lookup, pipeline_plans

__all__: list[str] = []

SYMBOLS = (
    "p: ranks; m: micro-batches; v: stages a rank; r: the rank; g: the longest round, p to 2p-1, or m below p; "
    "idle: time units of a step, where F, B and W of a stage take one each; a rank works for 3*v*m of them"
)


def markdown_table() -> str:
    """A Markdown table with one row for each registered schedule."""
    headings = ("schedule", "idea", "idle", "activations of a stage held", "wins when", "source")
    cards = [(name, lookup(name).card) for name in pipeline_plans()]
    rows = [(f"`{name}`", c.idea, f"`{c.idle}`", f"`{c.peak}`", c.wins, c.source) for name, c in cards]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headings, ("---",) * len(headings), *rows])


def show(name: str, ranks: int, num_microbatches: int, stages_a_rank: int | None = None) -> str:
    """A plan as a chart, with its cost if F, B and W of a stage take one time unit each.

    >>> print(show("zb_h1", ranks=2, num_microbatches=2))
    pipeline zb_h1, 2 ranks, 2 stages, 2 micro-batches
    rank 0  F0 F1    B0 W0 B1 W1
    rank 1     F0 B0 F1 B1 W0 W1
    1F1B, the backward split: B at once, W later
    proved: every action runs once, and no deadlock is possible
    time  7 units, lower bound 6; ranks are idle 14.3 % of it
    held  at most 2, 2 activations of a stage, on ranks 0..1
    """
    plan = pipeline_plan(name, ranks, num_microbatches, stages_a_rank)
    plan.verify()
    cost = plan.cost()
    held = ", ".join(map(str, plan.peaks()))
    return "\n".join(
        [
            plan.draw(times=cost),
            lookup(name).card.idea,
            "proved: every action runs once, and no deadlock is possible",
            f"time  {cost.makespan:g} units, lower bound {lower_bound(plan):g}; "
            f"ranks are idle {100 * cost.bubble:.1f} % of it",
            f"held  at most {held} activations of a stage, on ranks 0..{ranks - 1}",
        ]
    )
