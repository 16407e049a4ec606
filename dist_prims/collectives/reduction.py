"""Reductions of flat tensors: ``op`` applied to two operands, and to a fold of several operands.

A *fold* reduces several operands in their order. Half types are added in float32 and rounded once per fold, so that the
order of additions of a schedule (``order()``) determines the rounding completely. A mean is divided within the last
fold, before the result is rounded. Half types do not overflow in the earlier folds, which are scaled
(``schedules.order.scales``). The mean of integers is their sum, which wraps as SUM does, divided and truncated towards
zero, as in NCCL.

torch has no sums for uint16, uint32 and uint64. In two's complement, sum, product and bit operations are the same as in
the signed type, and comparisons are the same after the sign bits have been inverted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..schedules.order import scales
from ..torch_compat import premul_factor

__all__: list[str] = []

Op = dist.ReduceOp.RedOpType
Factor = float | torch.Tensor
Binary = Callable[..., torch.Tensor]

_NAMES = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
OP_NAMES = {getattr(dist.ReduceOp, name): name for name in _NAMES}
_OPS: dict[str, Op] = {name.lower(): op for op, name in OP_NAMES.items()}
_BINARY: dict[Op, Binary] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PREMUL_SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_ARITHMETIC = (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_HALF = (torch.float16, torch.bfloat16)


def op_named(name: str, what: str) -> Op:
    """Return the reduction of a name such as "sum"; ValueError if there is none."""
    if name in _OPS:
        return _OPS[name]
    known = ", ".join(f'"{each}"' for each in _OPS)
    raise ValueError(f"{what}: op={name!r}: there are {known}, and the members of torch.distributed.ReduceOp")


def plain(op: Op | dist.ReduceOp) -> Op:
    """Return the operation without the factor of a PREMUL_SUM."""
    return op if isinstance(op, Op) else op.op  # type: ignore[attr-defined]  # torch's stub lacks it


def factor_of(op: Op | dist.ReduceOp, what: str) -> Factor | None:
    """Return the factor of a PREMUL_SUM, None for other operations; ValueError for a PREMUL_SUM without a factor."""
    if plain(op) != dist.ReduceOp.PREMUL_SUM:
        return None
    if isinstance(op, Op):
        raise ValueError(f"{what}: PREMUL_SUM has no factor; use torch.distributed._make_nccl_premul_sum(factor)")
    factor: Factor = premul_factor(op)
    return factor


def check_reducible(dtype: torch.dtype, op: Op, what: str) -> None:
    """Raise ValueError unless ``op`` can reduce ``dtype``."""
    if op not in _BINARY:
        raise ValueError(f"{what}: {op} is not a reduction; use dist.ReduceOp.{', '.join(OP_NAMES.values())}")
    if reason := _unsupported_reason(dtype, op):
        raise ValueError(f"{what}: {OP_NAMES[op]} cannot reduce {dtype}: {reason}")


@functools.lru_cache(maxsize=1024)
def _unsupported_reason(dtype: torch.dtype, op: Op) -> str:
    """Return why ``op`` cannot reduce ``dtype``; an empty string if it can."""
    is_number = dtype.is_floating_point or dtype.is_complex
    reasons = {
        "float8 can be transferred but not reduced; convert it to bfloat16": dtype.is_floating_point
        and dtype.itemsize == 1,
        "bool does not support arithmetic; convert it to a number": op in _ARITHMETIC and dtype == torch.bool,
        "complex numbers have no order; use SUM or PRODUCT": op in _ORDERED and dtype.is_complex,
        "bitwise operations need integers or bool": op in _BITWISE and is_number,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def premultiplied(flat: torch.Tensor, factor: Factor, what: str) -> torch.Tensor:
    """Return a flat tensor times this rank's factor of a PREMUL_SUM, in the tensor's type."""
    value = _number(factor, what)
    if flat.dtype.is_floating_point:
        return flat * float(value)
    if flat.is_complex():
        return torch.view_as_complex(torch.view_as_real(flat) * float(value))
    limits = torch.iinfo(flat.dtype)
    if not (limits.min <= value <= limits.max and value == int(value)):
        raise ValueError(
            f"{what}: PREMUL_SUM cannot multiply {flat.dtype} by {value}, which that type does not hold; "
            "convert the tensor to a floating type first"
        )
    signed = _SIGNED.get(flat.dtype, flat.dtype)
    bits = int(value) - (1 << limits.bits) * (value > torch.iinfo(signed).max)
    return (flat.view(signed) * bits).view(flat.dtype)


def _number(factor: Factor, what: str) -> float:
    """Return a factor as a number; ValueError for a tensor that is not one real number. ``what`` begins the error."""
    if not isinstance(factor, torch.Tensor):
        return factor
    if factor.numel() != 1 or factor.is_complex() or factor.dtype == torch.bool:
        raise ValueError(
            f"{what}: the factor of PREMUL_SUM is a tensor of {factor.numel()} elements of {factor.dtype}; "
            "give a number, or a tensor of one real number"
        )
    return factor.item()


def fold(
    op: Op, out: torch.Tensor, operands: Sequence[torch.Tensor], terms: Sequence[int] = (), ranks: int = 0
) -> None:
    """Reduce the operands from left to right into ``out``, and round once.

    Args:
        op: the reduction.
        out: receives the result; it may be the first or the second operand.
        operands: flat tensors of one type and length.
        terms: for a mean: the number of ranks whose data is in each operand.
        ranks: for a mean: the number of ranks. The fold that has the data of all ranks divides.
    """
    first, *rest = operands
    if not rest:
        out.copy_(first)
    elif op == dist.ReduceOp.AVG:
        _fold_mean(out, operands, terms, ranks)
    elif len(rest) > 1 and out.dtype in _HALF:
        total = first.float()
        for operand in rest:
            _BINARY[op](total, operand.float(), out=total)
        out.copy_(total)
    else:
        current = first
        for operand in rest:
            _apply(op, current, operand, out)
            current = out


def _fold_mean(out: torch.Tensor, operands: Sequence[torch.Tensor], terms: Sequence[int], ranks: int) -> None:
    """See :func:`fold`. A partial sum of a half type is stored times a power of two that is at most 1."""
    if out.dtype in _HALF:
        factors, divisor = scales(terms, ranks)
        total = operands[0].float().mul_(factors[0])
        for operand, factor in zip(operands[1:], factors[1:], strict=True):
            total.add_(operand.float(), alpha=factor)  # a power of two, which is exact: only the sum is rounded
        out.copy_(total.div_(divisor))
    else:
        fold(dist.ReduceOp.SUM, out, operands)
        if sum(terms) == ranks:
            _divide(out, ranks)


def _apply(op: Op, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Reduce two operands into ``out``. Unsigned types are computed in the signed type of the same width."""
    signed = _SIGNED.get(out.dtype)
    if signed is None:
        _BINARY[op](left, right, out=out)
        return
    left, right, out = left.view(signed), right.view(signed), out.view(signed)
    if op in _ORDERED:
        flip = torch.iinfo(signed).min
        torch.bitwise_xor(_BINARY[op](left ^ flip, right ^ flip), flip, out=out)
    else:
        _BINARY[op](left, right, out=out)


def _divide(out: torch.Tensor, ranks: int) -> None:
    """Divide in place; truncate integers towards zero."""
    if out.is_complex():
        torch.view_as_real(out).div_(ranks)  # a complex division would round more than once
    elif out.dtype.is_floating_point:
        out.div_(ranks)
    elif out.dtype == torch.uint64:  # torch has no division: divide the upper 63 bits, then correct by the remainder
        bits = out.view(torch.int64)
        quotient = ((bits >> 1) & torch.iinfo(torch.int64).max).div_(ranks, rounding_mode="trunc") * 2
        bits.copy_(quotient + (bits - quotient * ranks >= ranks))
    else:
        out.copy_(out.to(torch.int64).div(ranks, rounding_mode="trunc"))
