"""The exercises in their order, each with its task, hints and check.

>>> exercise(1).title, file_name(3)
('Send around the ring', 'exercise_03_broadcast_tree.py')
"""

from __future__ import annotations

from ..exercise import Exercise
from . import exchanges, pipelines, programs, trees_and_rings

__all__: list[str] = []

EXERCISES = {
    "ring_pass": programs.RING_PASS,
    "deadlock": programs.DEADLOCK,
    "broadcast_tree": trees_and_rings.BROADCAST_TREE,
    "reduce_tree": trees_and_rings.REDUCE_TREE,
    "ring_reduce_scatter": trees_and_rings.RING_REDUCE_SCATTER,
    "ring_all_gather": trees_and_rings.RING_ALL_GATHER,
    "ring_all_reduce": trees_and_rings.RING_ALL_REDUCE,
    "same_bits": trees_and_rings.SAME_BITS,
    "ring_order": programs.RING_ORDER,
    "recursive_doubling": exchanges.RECURSIVE_DOUBLING,
    "crossover": programs.CROSSOVER,
    "halving_doubling": exchanges.HALVING_DOUBLING,
    "pairwise": exchanges.PAIRWISE,
    "dissemination": exchanges.DISSEMINATION,
    "two_hosts": exchanges.TWO_HOSTS,
    "shards": programs.SHARDS,
    "one_f_one_b": pipelines.ONE_F_ONE_B,
    "zero_bubble": pipelines.ZERO_BUBBLE,
    "desync": programs.DESYNC,
}
ORDER = (*EXERCISES,)


def exercise(number: int) -> Exercise:
    """The exercise with a number, from 1 on."""
    if not 1 <= number <= len(ORDER):
        raise ValueError(f"there is no exercise {number}; the numbers are 1 to {len(ORDER)}")
    return EXERCISES[ORDER[number - 1]]


def file_name(number: int) -> str:
    """The name of the file of an exercise."""
    return f"exercise_{number:02}_{ORDER[number - 1]}.py"
