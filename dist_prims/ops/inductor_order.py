"""Order of collectives in compiled graphs: the compiler must neither reorder nor remove them.

A compiler may move or remove an operator without side effects, and each rank compiles its own graph. Where the graphs
differ slightly (another branch, another constant), rank 0 could begin with a collective that rank 1 calls last, which
is a deadlock. Each operator therefore has the effect "ordered": AOTAutograd passes a token through all of them, in the
forward and the backward pass.

Inductor converts tokens to dependencies of its scheduler. Up to torch 2.13 it stores them under the name of a buffer
and looks them up by the name of an operation, and finds none (github.com/pytorch/pytorch/pull/189209). The lowering in
this module adds them under the name of the operation. In a version of torch with the correction it adds nothing new.
"""

from __future__ import annotations

import sys
from typing import Any

from torch._library.effects import EffectType
from torch.utils._pytree import tree_map

__all__: list[str] = []

_ordered: list[Any] = []


def keep_order(operator: Any) -> None:
    """Make the compiler keep a custom operator in program order with the other operators registered here."""
    operator.register_effect(EffectType.ORDERED)
    _ordered.append(operator._opoverload)


def register_lowerings() -> None:
    """Register lowerings with Inductor if it is loaded.

    The fake implementations of the operators call this function: shape propagation precedes every lowering.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    for operator in _ordered if lowering else []:
        if operator not in lowering.lowerings:
            lowering.register_lowering(operator, type_promotion_kind=None)(_lowering_after_previous(operator))


def _lowering_after_previous(operator: Any) -> Any:
    def lower(*args: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        begin, previous = len(V.graph.operations), V.graph.effectful_ops.get(EffectType.ORDERED)
        result = ir.FallbackKernel.create(operator, *args)
        for operation in V.graph.operations[begin:] if previous else []:
            V.graph.additional_star_deps[operation.get_operation_name()].add(previous.get_name())  # type: ignore[union-attr]
        return tree_map(lambda each: each.wrap_for_lowering() if isinstance(each, ir.IRNode) else each, result)

    return lower
