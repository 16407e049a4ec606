"""Argument checks of attention over a split sequence, and agreement of all ranks on the call, before anything is sent.

A rank with wrong arguments must not leave the others waiting for its keys. So each rank sends a description of its
call, or its error, to all ranks, and all go on or all raise.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ...agreement import check_same
from ...torch_compat import default_group
from .kernels import Tensors
from .layout import ORDERS

__all__: list[str] = []

_REMEDY = "Every rank must make the same call, with parts of one sequence of equal length: split_sequence() gives them"
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call of an attention function. They are unchecked, and may be None, before :func:`agree`."""

    name: str  # of the function
    group: Any
    causal: bool
    scale: Any  # of the scores
    order: str  # of the tokens over the ranks, a key of layout.ORDERS
    enable_gqa: bool  # several heads of queries share a head of keys
    lengths: Any  # the number of tokens of each sequence over all ranks, without padding


def agree(call: AttentionCall, tensors: Tensors) -> tuple[AttentionCall, Tensors]:
    """Return when all ranks make the same call; otherwise raise on every rank. Every rank of the group calls this.

    The results are the call with its group, scale and lengths, and q, k, v in the dtype of autocast.

    >>> call = AttentionCall("ring_attention", None, True, None, "zigzag", False, None)
    >>> agree(call, (torch.ones(1, 1, 4, 16),) * 3)[0].scale
    0.25
    """
    call = replace(call, group=call.group or default_group())
    if not isinstance(call.group, dist.ProcessGroup):  # new_group() gives something else to ranks outside
        raise ValueError(f"rank {dist.get_rank()} is not in the group of this {call.name}; nothing was sent")
    try:
        tensors = _lowered(tensors)
        call = _checked(call, *tensors)
    except Exception as error:
        refuse(call.name, str(error), call.group)
    has_backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    text = f"{call.name}({_sizes(*tensors)}, {tensors[0].dtype}, order {call.order}, causal={call.causal}, scale "
    text += f"{call.scale}, {'with' if has_backward else 'without'} a backward, lengths {list(call.lengths)})"
    check_same(text, _REMEDY, call.group)
    return call, tensors


def refuse(name: str, problem: str, group: dist.ProcessGroup) -> NoReturn:
    """Raise ValueError, and make the other ranks raise, which wait for this rank in :func:`agree`."""
    error = ValueError(f"rank {group.rank()}: {name}: {problem}; nothing was sent")
    check_same(name, _REMEDY, group, error)
    raise error


def uncompiled(function: T) -> T:  # a decorator would import the compiler, which takes seconds
    """The function, excluded from compilation: the compiled graph ends before it, and not between its messages."""
    disabled: T = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
    return disabled


def refuse_second_derivative() -> None:
    """Raise in a backward pass that itself must be differentiable.

    torch's ``once_differentiable`` raises only if the incoming gradient requires a gradient. The gradient of a sum does
    not, and the second derivative would silently be omitted.
    """
    if torch.is_grad_enabled():  # in a backward: only with create_graph
        raise RuntimeError("a second derivative is not offered here (create_graph=True)")


def _lowered(tensors: Tensors) -> Tensors:
    """The tensors, cast within autocast as ``scaled_dot_product_attention`` does."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    low = torch.get_autocast_dtype("cpu")
    q, k, v = (x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return q, k, v


def _checked(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionCall:
    """The call with its scale and lengths; an error for wrong arguments of this rank."""
    # 1. What the three tensors are.
    if any(x.is_nested or x.device.type != "cpu" for x in (q, k, v)):
        raise ValueError("q, k and v must be dense tensors on the CPU; on CUDA use torch's context_parallel")
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one floating type")
    # 2. Their shapes.
    if {x.dim() for x in (q, k, v)} != {4} or len({x.shape[2] for x in (q, k, v)}) > 1:
        raise ValueError(f"{_sizes(q, k, v)} are not (batch, heads, tokens, features) with equally many tokens")
    if len(q) != len(k) or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3] or not q.shape[3] * v.shape[3]:
        raise ValueError(f"{_sizes(q, k, v)} do not fit: batch, heads of k and v, features of q and k, one at least")
    # 3. The heads: equally many heads of queries share each head of keys, and Ulysses splits both evenly.
    ranks, heads, key_heads, tokens = call.group.size(), q.shape[1], k.shape[1], q.shape[2]
    if not key_heads or heads % key_heads or (heads != key_heads and not call.enable_gqa):
        raise ValueError(f"{heads} heads of queries cannot share {key_heads} of keys: a multiple, and enable_gqa=True")
    if call.name == "ulysses_attention" and (heads % ranks or key_heads % ranks):
        raise ValueError(f"{heads} heads of queries and {key_heads} of keys cannot be split evenly over {ranks} ranks")
    # 4. The order of the tokens over the ranks.
    if call.order not in ORDERS:
        raise ValueError(f"order={call.order!r}; choose {' or '.join(map(repr, ORDERS))}")
    if tokens % ORDERS[call.order]:
        raise ValueError(f"{tokens} tokens on this rank cannot be the two chunks of order 'zigzag'; make them even")
    # 5. The scale, and the lengths of the sequences over all ranks.
    if isinstance(call.scale, torch.Tensor):
        raise ValueError(f"scale={call.scale!r} would have no gradient; give a float")
    whole = tokens * ranks
    lengths = tuple(map(operator.index, [whole] * len(q) if call.lengths is None else call.lengths))
    if len(lengths) != len(q) or not all(0 <= length <= whole for length in lengths):
        raise ValueError(f"lengths={list(lengths)} must be one for each of {len(q)} sequences, from 0 to {whole}")
    return replace(call, scale=float(q.shape[3] ** -0.5 if call.scale is None else call.scale), lengths=lengths)


def _sizes(*tensors: torch.Tensor) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", tensors, strict=True))
