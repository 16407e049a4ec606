"""Reductions of flat tensors: what ``op`` does to two operands, and to a fold of several.

Half types are added in float32 and rounded once a fold, so that an addition order read off a schedule (``order()``)
says all there is to know about rounding. A mean is divided within the last fold, before it is rounded, and half types
do not overflow in between (``schedules.order.scales``). The mean of whole numbers is their sum, which wraps as SUM
does, divided and cut off towards zero, as in NCCL.

torch has no sums for uint16, uint32 and uint64; in two's complement sum, product and bit operations are those of the
signed type, and for an order it is enough to flip the sign bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..schedules.order import scales
from ..torch_compat import premul_factor

__all__ = ["OP_NAMES", "check_reducible", "factor_of", "fold", "plain", "premultiplied"]

Op = dist.ReduceOp.RedOpType
Factor = float | torch.Tensor
Binary = Callable[..., torch.Tensor]

_NAMES = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
OP_NAMES = {getattr(dist.ReduceOp, name): name for name in _NAMES}
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


def plain(op: Op | dist.ReduceOp) -> Op:
    """The operation alone: PREMUL_SUM comes with a factor."""
    return op if isinstance(op, Op) else op.op  # type: ignore[attr-defined]  # torch's stub lacks it


def factor_of(op: Op | dist.ReduceOp, what: str) -> Factor | None:
    """The factor that a PREMUL_SUM comes with; ValueError where it comes with none."""
    if plain(op) != dist.ReduceOp.PREMUL_SUM:
        return None
    if isinstance(op, Op):
        raise ValueError(f"{what}: PREMUL_SUM has no factor; use torch.distributed._make_nccl_premul_sum(factor)")
    found: Factor = premul_factor(op)
    return found


def check_reducible(dtype: torch.dtype, op: Op, what: str) -> None:
    """ValueError unless ``op`` can reduce ``dtype``."""
    if op not in _BINARY:
        raise ValueError(f"{what}: {op} is not a reduction; use dist.ReduceOp.{', '.join(OP_NAMES.values())}")
    if reason := _refusal(dtype, op):
        raise ValueError(f"{what}: {OP_NAMES[op]} cannot reduce {dtype}: {reason}")


@functools.lru_cache(maxsize=1024)
def _refusal(dtype: torch.dtype, op: Op) -> str:
    """Why ``op`` cannot reduce ``dtype``; empty if it can."""
    is_number = dtype.is_floating_point or dtype.is_complex
    refused = {
        "float8 is for movement only; convert to bfloat16": dtype.is_floating_point and dtype.itemsize == 1,
        "bool has no such arithmetic; convert it to a number": op in _ARITHMETIC and dtype == torch.bool,
        "complex numbers have no order; use SUM or PRODUCT": op in _ORDERED and dtype.is_complex,
        "bits belong to whole numbers and bool": op in _BITWISE and is_number,
    }
    return next((reason for reason, applies in refused.items() if applies), "")


def premultiplied(flat: torch.Tensor, factor: Factor, what: str) -> torch.Tensor:
    """What PREMUL_SUM adds: a flat tensor times this rank's factor, in the tensor's type."""
    value = _number(factor, what)
    if flat.dtype.is_floating_point:
        return flat * float(value)
    if flat.is_complex():
        return torch.view_as_complex(torch.view_as_real(flat) * float(value))
    held = torch.iinfo(flat.dtype)
    if not (held.min <= value <= held.max and value == int(value)):
        raise ValueError(
            f"{what}: PREMUL_SUM cannot multiply {flat.dtype} by {value}, which that type does not hold; "
            "convert the tensor to a floating type first"
        )
    signed = _SIGNED.get(flat.dtype, flat.dtype)
    bits = int(value) - (1 << held.bits) * (value > torch.iinfo(signed).max)
    return (flat.view(signed) * bits).view(flat.dtype)


def _number(factor: Factor, what: str) -> float:
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
    """``out`` = the operands reduced left to right, rounded once; ``out`` may be the first or second operand.

    For a mean over ``ranks`` ranks, ``terms`` is the number of ranks whose data is in each operand.
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
        held = first
        for operand in rest:
            _apply(op, held, operand, out)
            held = out


def _fold_mean(out: torch.Tensor, operands: Sequence[torch.Tensor], terms: Sequence[int], ranks: int) -> None:
    if out.dtype in _HALF:
        factors, divisor = scales(terms, ranks)
        total = operands[0].float().mul_(factors[0])
        for operand, factor in zip(operands[1:], factors[1:], strict=True):
            total.add_(operand.float(), alpha=factor)  # a power of two: nothing is rounded but the sum
        out.copy_(total.div_(divisor))
    else:
        fold(dist.ReduceOp.SUM, out, operands)
        if sum(terms) == ranks:
            _divide(out, ranks)


def _apply(op: Op, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
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
    """In place; whole numbers are cut off towards zero."""
    if out.is_complex():
        torch.view_as_real(out).div_(ranks)  # a complex division would round more than once
    elif out.dtype.is_floating_point:
        out.div_(ranks)
    elif out.dtype == torch.uint64:  # torch divides none: its upper 63 bits first, then what is left
        bits = out.view(torch.int64)
        quotient = ((bits >> 1) & torch.iinfo(torch.int64).max).div_(ranks, rounding_mode="trunc") * 2
        bits.copy_(quotient + (bits - quotient * ranks >= ranks))
    else:
        out.copy_(out.to(torch.int64).div(ranks, rounding_mode="trunc"))
