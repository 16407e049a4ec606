"""The registry of pipeline schedules.

One function that yields the actions of one rank, with the decorator :func:`pipeline_schedule`, adds a schedule.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ..registry import nearest
from .actions import Action, PlanData

__all__: list[str] = []

Order = Callable[[int, int, int, int], Iterator[Action]]  # of rank, ranks, num_microbatches, stages a rank


@dataclass(frozen=True)
class PipelineCard:
    """The cost card of a schedule: formulas that a test evaluates against its plans.

    ``idle``: time units of a step that every rank is idle, if F, B and W of a stage take one each, and BW two.
    ``peak``: the most activations (of one stage and micro-batch) that rank r holds. In the formulas ``p`` is the number
    of ranks, ``m`` of micro-batches, ``v`` of stages a rank, ``r`` the rank; ``where`` adds names, functions of p, m.

    >>> card = PipelineCard("all F, then all B", "3*(p-1)", "m", wins="never", source="Huang et al. 2019")
    >>> card.evaluate("idle", p=2, m=8), card.evaluate("peak", p=2, m=8), card.bubble(p=2, m=8)
    (Fraction(3, 1), Fraction(8, 1), Fraction(1, 9))
    """

    idea: str
    idle: str
    peak: str
    wins: str
    source: str
    where: Mapping[str, Callable[[int, int], int]] = field(default_factory=dict)

    def bubble(self, p: int, m: int, v: int = 1) -> Fraction:
        """The fraction of the step that a rank is idle; it works 3 units for every stage and micro-batch."""
        idle = self.evaluate("idle", p, m, v)
        return idle / (3 * v * m + idle)

    def evaluate(self, formula: str, p: int, m: int, v: int = 1, r: int = 0) -> Fraction:
        """The exact value of ``formula``, "idle" or "peak"."""
        names = {"p": p, "m": m, "v": v, "r": r, **{name: function(p, m) for name, function in self.where.items()}}
        exact = {name: Fraction(value) for name, value in names.items()}
        return Fraction(eval(getattr(self, formula), {"__builtins__": {}, "min": min, "max": max}, exact))


@dataclass(frozen=True)
class PipelineSchedule:
    """A registered pipeline schedule; calling it makes a plan. :func:`pipeline_schedule` explains the fields."""

    name: str
    order: Order
    card: PipelineCard
    stages_a_rank: int
    any_more: bool
    v_shape: bool
    built_in: bool

    def __call__(self, ranks: int, num_microbatches: int, stages_a_rank: int) -> PlanData:
        stages = ranks * stages_a_rank
        down = [stage % ranks for stage in range(stages)]
        rank_of = [ranks - 1 - rank if self.v_shape and stage // ranks % 2 else rank for stage, rank in enumerate(down)]
        most = 3 * stages_a_rank * num_microbatches + 1  # with F, B and W: an order that does not end has one twice
        orders = (self.order(rank, ranks, num_microbatches, stages_a_rank) for rank in range(ranks))
        actions = tuple(tuple(itertools.islice(order, most)) for order in orders)
        return PlanData(self.name, ranks, stages, num_microbatches, tuple(rank_of), actions)


_registry: dict[str, PipelineSchedule] = {}


def pipeline_schedule(
    name: str, card: PipelineCard, *, stages_a_rank: int = 1, any_more: bool = False, v_shape: bool = False
) -> Callable[[Order], Order]:
    """Register a function ``order(rank, ranks, num_microbatches, stages_a_rank)`` that yields the actions of one rank.

    ``stages_a_rank``: the number that the schedule is made for; ``any_more``: the schedule supports any other number.
    Stage s is on rank ``s % ranks``; with ``v_shape`` the stages go down the ranks and up again, so that the first
    rank has both the first and the last stage.

    >>> from dist_prims.schedules.pipelines import Action, pipeline_plan
    >>> card = PipelineCard("F and BW at once", "0", "1", wins="one rank", source="an example")
    >>> @pipeline_schedule("at_once", card)
    ... def at_once(rank, ranks, num_microbatches, stages_a_rank):
    ...     for micro in range(num_microbatches):
    ...         yield Action("F", rank, micro)
    ...         yield Action("BW", rank, micro)
    >>> plan = pipeline_plan("at_once", ranks=1, num_microbatches=2)
    >>> plan.verify()
    >>> plan.peaks()
    (1,)
    >>> unregister("at_once")
    """

    def register(order: Order) -> Order:
        # An example in a docstring of this module is not built in.
        built_in = order.__module__ != __name__ and order.__module__.startswith(f"{__package__}.")
        if not built_in:
            _load()
            _check_not_built_in(name, "register it under another name")
        _registry[name] = PipelineSchedule(name, order, card, stages_a_rank, any_more, v_shape, built_in)
        return order

    return register


def _check_not_built_in(name: str, remedy: str) -> None:
    if name in _registry and _registry[name].built_in:
        raise ValueError(f"the pipeline schedule {name!r} is one of dist_prims, which all ranks rely on; {remedy}")


def unregister(name: str) -> None:
    """Remove a schedule that the program registered; schedules of the package stay.

    >>> @pipeline_schedule("empty", PipelineCard("nothing", "0", "0", wins="never", source="an example"))
    ... def empty(rank, ranks, num_microbatches, stages_a_rank):
    ...     yield from ()
    >>> unregister("empty")
    >>> "empty" in pipeline_plans()
    False
    """
    lookup(name)
    _check_not_built_in(name, "only a schedule that the program registered can be removed")
    del _registry[name]


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    for name in sorted(_registry, key=lambda name: _registry[name].order.__module__):  # not by what was imported first
        _registry[name] = _registry.pop(name)


def pipeline_plans() -> list[str]:
    """Names of the registered schedules.

    >>> "1f1b" in pipeline_plans()
    True
    """
    _load()
    return list(_registry)


def lookup(name: str) -> PipelineSchedule:
    """The schedule registered under a name; ValueError with the most similar names if there is none."""
    known = pipeline_plans()
    if name not in known:
        raise ValueError(nearest("pipeline schedule", name, known))
    return _registry[name]


def plan_data(name: str, ranks: int, num_microbatches: int, stages_a_rank: int | None = None) -> PlanData:
    """The plan of a schedule as data; see ``pipeline_plan``."""
    schedule = lookup(name)
    stages = schedule.stages_a_rank if stages_a_rank is None else stages_a_rank
    counts = {"ranks": ranks, "num_microbatches": num_microbatches, "stages_a_rank": stages}
    for parameter, count in counts.items():
        if operator.index(count) < 1:
            raise ValueError(f"pipeline {name}: {parameter}={count}; it must be at least 1")
    if stages != schedule.stages_a_rank and not schedule.any_more:
        raise ValueError(
            f"pipeline {name}: stages_a_rank={stages}, but the schedule supports {schedule.stages_a_rank} only; "
            f"cut the model into {ranks * schedule.stages_a_rank} stages, or use a schedule for any number: "
            f"{', '.join(other for other, registered in _registry.items() if registered.any_more)}"
        )
    return schedule(ranks, num_microbatches, stages)
