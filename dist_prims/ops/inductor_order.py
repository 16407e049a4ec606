"""The compiler must not change the order of collectives, nor leave one out.

An operator without side effects may be moved or dropped, and each rank compiles by itself: where graphs differ a little
(another branch, another constant), rank 0 would begin with a collective that rank 1 makes last, and both wait for ever.
So each operator here has the effect "ordered": AOTAutograd threads a token through them, in forward and in backward.

Inductor turns tokens into dependences of its scheduler. Up to torch 2.13 it files them under the name of a buffer and
looks them up by that of an operation, so that none is found (github.com/pytorch/pytorch/pull/189209). The lowering here
files them under both; where torch has been put right it adds nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from torch._library.effects import EffectType
from torch.utils._pytree import tree_map

__all__ = ["keep_order", "teach_inductor"]

_kept: list[Any] = []


def keep_order(operator: Any) -> None:
    """Give a custom operator its place among the others: that of the program."""
    operator.register_effect(EffectType.ORDERED)
    _kept.append(operator._opoverload)


def teach_inductor() -> None:
    """Called while shapes are worked out, which happens before any lowering; Inductor is never loaded for it."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    for operator in _kept if lowering else []:
        if operator not in lowering.lowerings:
            lowering.register_lowering(operator, type_promotion_kind=None)(_after_the_one_before(operator))


def _after_the_one_before(operator: Any) -> Any:
    def lower(*args: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        begin, before = len(V.graph.operations), V.graph.effectful_ops.get(EffectType.ORDERED)
        made = ir.FallbackKernel.create(operator, *args)
        for operation in V.graph.operations[begin:] if before else []:
            V.graph.additional_star_deps[operation.get_operation_name()].add(before.get_name())  # type: ignore[union-attr]
        return tree_map(lambda each: each.wrap_for_lowering() if isinstance(each, ir.IRNode) else each, made)

    return lower
