"""Reductions of flat tensors: what ``op`` does to two operands, and to a fold of several.

Half types are added in float32 and rounded once a fold, so that an addition order read off a schedule (``order()``)
says all there is to know about rounding. torch has no sums for uint16, uint32 and uint64; in two's complement sum,
product and bit operations are those of the signed type, and for an order it is enough to flip the sign bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

__all__ = ["OP_NAMES", "check_reducible", "finish", "fold"]

Op = dist.ReduceOp.RedOpType
Binary = Callable[..., torch.Tensor]

OP_NAMES = {
    getattr(dist.ReduceOp, name): name for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_BINARY: dict[Op, Binary] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_HALF = (torch.float16, torch.bfloat16)


def check_reducible(dtype: torch.dtype, op: Op, what: str) -> None:
    """ValueError unless ``op`` can reduce ``dtype``."""
    if op not in _BINARY:
        raise ValueError(f"{what}: {op} is not a reduction; use dist.ReduceOp.{', '.join(OP_NAMES.values())}")
    is_number = dtype.is_floating_point or dtype.is_complex
    refused = {
        "float8 is for movement only; convert to bfloat16": dtype.is_floating_point and dtype.itemsize == 1,
        "the mean of whole numbers is none; use SUM": op == dist.ReduceOp.AVG and not is_number,
        "complex numbers have no order; use SUM or PRODUCT": op in _ORDERED and dtype.is_complex,
        "bits belong to whole numbers and bool": op in _BITWISE and is_number,
    }
    for reason, applies in refused.items():
        if applies:
            raise ValueError(f"{what}: {OP_NAMES[op]} cannot reduce {dtype}: {reason}")


def fold(op: Op, out: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
    """``out`` = the operands reduced left to right, rounded once; ``out`` may be the first or second operand."""
    first, *rest = operands
    if not rest:
        out.copy_(first)
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


def finish(op: Op, out: torch.Tensor, size: int) -> None:
    """What is left to do once everything is reduced: the division of a mean."""
    if op == dist.ReduceOp.AVG:
        parts = torch.view_as_real(out) if out.is_complex() else out  # a complex division would round more than once
        parts.div_(size)
