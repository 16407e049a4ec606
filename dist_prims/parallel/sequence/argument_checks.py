"""Argument checks of attention over a split sequence, and agreement of all ranks on the call, before anything is sent.

A rank with wrong arguments must not leave the others waiting for its keys. So each rank sends a description of its
call, or its error, to all, and all go on or all raise. On a CPU that is 256 bytes a call. On CUDA reading the answer
would synchronise the stream, so ranks agree only once on each kind of call. A later error is then raised on its rank
alone: the others do not communicate before they wait for its keys, until the group's timeout.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ...agreement import check_same
from ...torch_compat import default_group, has_holes, ragged_dim
from .layout import ORDERS

__all__: list[str] = []

_REMEDY = "Every rank must make the same call, with parts of one sequence of equal length: split_sequence() gives them"
_P = ParamSpec("_P")
_R = TypeVar("_R")
_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()  # the kinds of calls on CUDA
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call, unchecked until the ranks agree. ``lengths``: of the whole sequences."""

    name: str
    group: dist.ProcessGroup
    causal: bool
    scale: float | None
    order: str
    enable_gqa: bool
    lengths: Any
    dropout_p: float

    @staticmethod
    def of(
        name: str, group: dist.ProcessGroup | None, lengths: Sequence[int] | torch.Tensor | None, options: Any
    ) -> AttentionCall:
        group = group or default_group()
        if not isinstance(group, dist.ProcessGroup):  # new_group() gives something else to ranks outside
            raise ValueError(f"rank {dist.get_rank()} is not in the group of this {name}; nothing was sent")
        return AttentionCall(name=name, group=group, lengths=lengths, **options)


def agree(call: AttentionCall, tensors: Tensors) -> AttentionCall:
    """Return, with the scale filled in, when all ranks are about to do the same; else raise on every rank.

    >>> options = {"causal": True, "scale": None, "order": "zigzag", "enable_gqa": False, "dropout_p": 0.0}
    >>> call = AttentionCall.of("ring_attention", None, None, options)
    >>> agree(call, (torch.ones(1, 1, 4, 16),) * 3).scale
    0.25
    """
    device = tensors[0].device
    problem = _options(call)
    if not problem:
        call = replace(call, scale=None if call.scale is None else float(call.scale), lengths=_numbers(call.lengths))
        problem = _problem(call, *tensors)
    if problem:
        refuse(call.name, problem, call.group, device)
    described = _words(call, tensors)
    if described not in _AGREED.get(call.group, ()):
        check_same(described, _REMEDY, call.group, device)
        if device.type != "cpu":
            _AGREED.setdefault(call.group, set()).add(described)
    return replace(call, scale=tensors[0].shape[-1] ** -0.5 if call.scale is None else call.scale)


def refuse(name: str, problem: str, group: dist.ProcessGroup, device: torch.device) -> NoReturn:
    """Raise, and send the error to the ranks that are about to agree.

    >>> refuse("ring_attention", "a mistake", torch.distributed.group.WORLD, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: rank 0: ring_attention: a mistake; nothing was sent
    """
    error = ValueError(f"rank {group.rank()}: {name}: {problem}; nothing was sent")
    if device.type == "cpu" or not _AGREED.get(group):  # else other ranks may not communicate here
        check_same(name, _REMEDY, group, device, error)
    raise error


def lowered(tensors: Tensors) -> Tensors:
    """The tensors, cast within autocast as ``scaled_dot_product_attention`` does.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     lowered((torch.ones(1), torch.ones(1), torch.ones(1)))[0].dtype
    torch.bfloat16
    """
    q, k, v = tensors
    if not torch.is_autocast_enabled(q.device.type):
        return tensors
    low = torch.get_autocast_dtype(q.device.type)
    q, k, v = (each.to(low) if each.is_floating_point() and each.dtype != torch.float64 else each for each in tensors)
    return q, k, v


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, excluded from compilation: the graph breaks here, and not between messages.

    >>> uncompiled(len)([1, 2])
    2
    """
    if not torch.compiler.is_compiling():  # a decorator would import the compiler here, which takes seconds
        return function
    disabled: Callable[_P, _R] = torch.compiler.disable(function)
    return disabled


def _words(call: AttentionCall, tensors: Tensors) -> str:
    q, k, v = tensors
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    shapes = " ".join(
        f"{name} {'x'.join(map(_number, each.shape))}" for name, each in zip("qkv", (q, k, v), strict=True)
    )
    words = [shapes, str(q.dtype).removeprefix("torch."), q.device.type, f"order {call.order}"]
    words += ["causal"] * call.causal + ["with a backward" if learns else "without a backward"]
    words += [] if call.scale is None else [f"scale {call.scale!r}"]
    words += [] if call.lengths is None else [f"lengths {list(call.lengths)}"]
    return f"{call.name}({', '.join(words)})"


def _number(extent: Any) -> str:
    return str(extent) if isinstance(extent, int) else "nested"


def _options(call: AttentionCall) -> str | None:
    """The error in the arguments other than tensors, if any; returned, not raised, since ranks must agree first."""
    if call.order not in list(ORDERS):
        return f"order={call.order!r}; choose {' or '.join(map(repr, ORDERS))}"
    if not all(isinstance(each, bool) for each in (call.causal, call.enable_gqa)):
        return f"causal={call.causal!r} and enable_gqa={call.enable_gqa!r} must be True or False"
    if not isinstance(call.dropout_p, int | float) or call.dropout_p:
        return f"dropout_p={call.dropout_p!r} is not supported; put a torch.nn.Dropout after the attention"
    scale = 1 if call.scale is None else call.scale
    if not isinstance(scale, int | float) or not abs(scale) <= sys.float_info.max:
        return f"scale={scale!r} must be a finite int or float; it has no gradient"
    try:
        _numbers(call.lengths)
    except (TypeError, RuntimeError):  # the latter of tensors that cannot be read
        return f"lengths={call.lengths!r} must be whole numbers, one for each sequence"
    return None


def _numbers(lengths: Any) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    return tuple(map(operator.index, lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths))


def _problem(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The error in the tensors of this rank, if any."""
    if len({each.dtype for each in (q, k, v)}) > 1 or not q.is_floating_point():
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; they must be of one floating type"
    if len({each.device for each in (q, k, v)}) > 1:
        return f"q, k and v are on {q.device}, {k.device} and {v.device}; they must be on one device"
    if any(each.is_nested and each.layout != torch.jagged for each in (q, k, v)):
        return "nested tensors must be made with layout=torch.jagged"
    if {each.dim() for each in (q, k, v)} != {4}:
        return f"q, k and v have {q.dim()}, {k.dim()}, {v.dim()} dimensions, not (batch, heads, tokens, features)"
    if len({each.is_nested for each in (q, k, v)}) > 1:
        return "some of q, k and v are nested; all of them must be, or none"
    if q.is_nested:
        return _nested(call, (q, k, v)) or _shapes(call, q, k, v)
    return _shapes(call, q, k, v) or _dense(call, q)


def _shapes(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        return f"q {_size(q)}, k {_size(k)} and v {_size(v)} do not fit: batch, heads of k and v, features of q and k"
    if not q.is_nested and len({each.shape[2] for each in (q, k, v)}) > 1:
        return f"q, k and v have {q.shape[2]}, {k.shape[2]} and {v.shape[2]} tokens here; the numbers must be equal"
    if min(q.shape[3], v.shape[3], k.shape[1]) < 1:
        return f"q {_size(q)}, k {_size(k)} and v {_size(v)} need a head and a feature"
    if q.shape[1] != k.shape[1] and not call.enable_gqa:
        return f"{q.shape[1]} heads of queries and {k.shape[1]} of keys; enable_gqa=True lets several share one"
    if q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys evenly"
    if call.name == "ulysses_attention" and (q.shape[1] % call.group.size() or k.shape[1] % call.group.size()):
        return (
            f"{q.shape[1]} heads of queries and {k.shape[1]} of keys cannot be split evenly over {call.group.size()} "
            "ranks; ring_attention takes any number"
        )
    return None


def _dense(call: AttentionCall, q: torch.Tensor) -> str | None:
    tokens = q.shape[2]
    if tokens % ORDERS[call.order]:
        return f"{tokens} tokens on this rank cannot be the two chunks of order 'zigzag'; their number must be even"
    if call.lengths is None:
        return None
    whole = tokens * call.group.size()
    if len(call.lengths) != q.shape[0] or not all(0 <= each <= whole for each in call.lengths):
        return f"lengths={list(call.lengths)} must be one for each of {q.shape[0]} sequences, from 0 to {whole}"
    return None


def _nested(call: AttentionCall, tensors: Tensors) -> str | None:
    if any(ragged_dim(each) != 2 for each in tensors):
        return "the tokens of a nested tensor must be in dimension 2, as in (batch, heads, tokens, features)"
    if any(has_holes(each) for each in tensors):
        return "a nested tensor must have no holes; call x.contiguous() before transposing it"
    if call.lengths is not None:
        return "lengths are given beside nested tensors, which have their own"
    offsets = [each.offsets() for each in tensors]  # type: ignore[attr-defined]
    if not all(torch.equal(each, offsets[0]) for each in offsets):
        return "q, k and v have sequences of different lengths on this rank"
    return None


def _size(tensor: torch.Tensor) -> str:
    return f"({', '.join(map(_number, tensor.shape))})"
