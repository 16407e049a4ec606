"""Tensors of known values for collectives, every dtype, and comparison to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

Op = dist.ReduceOp


def held(rank: int, count: int) -> torch.Tensor:
    return 1000 * rank + 3 * torch.arange(count)


def summed(ranks: int, count: int) -> torch.Tensor:
    """What ranks 0..ranks-1 hold, summed."""
    return 1000 * (ranks * (ranks - 1) // 2) + 3 * ranks * torch.arange(count)


def equal(found: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    assert torch.equal(found, expected), f"{what}: {found} instead of {expected}"


INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

COMPLEX = [torch.complex64, torch.complex128]

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]

BITS = [Op.BAND, Op.BOR, Op.BXOR]

REDUCTIONS = [
    *itertools.product(INTEGERS, [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITS]),
    *itertools.product(FLOATS, [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]),
    *itertools.product(COMPLEX, [Op.SUM, Op.AVG, Op.PRODUCT]),
    *itertools.product([torch.bool], [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITS]),
]


def noise(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Of very different sizes, so that every other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * torch.logspace(-3, 2, count)).to(dtype)


COUNTS = [0, 1, 13, 1031, 40_000, 300_007]  # one shot, two shots, several segments


def everything(size: int) -> None:
    rank = dist.get_rank()
    for count in COUNTS:
        tensor = held(rank, count)
        dist.all_reduce(tensor)
        equal(tensor, summed(size, count), ("all_reduce", count))
        of_all_ranks = [torch.full((count,), -1) for _ in range(size)]
        dist.all_gather(of_all_ranks, held(rank, count))
        for peer, found in enumerate(of_all_ranks):
            equal(found, held(peer, count), ("all_gather", count, peer))
        output = torch.full((count,), -1)
        dist.reduce_scatter(output, [held(rank, count) + peer for peer in range(size)])
        equal(output, summed(size, count) + rank * size, ("reduce_scatter", count))
        sent = [held(10 * rank + peer, count + peer) for peer in range(size)]
        received = [torch.full((count + rank,), -1) for _ in range(size)]
        dist.all_to_all(received, sent)
        for peer, found in enumerate(received):
            equal(found, held(10 * peer + rank, count + rank), ("all_to_all", count, peer))
        for root in range(size) if count < 40_000 else (size - 1,):
            tensor = held(rank, count)
            dist.broadcast(tensor, root)
            equal(tensor, held(root, count), ("broadcast", count, root))
            tensor = held(rank, count)
            dist.reduce(tensor, root)
            equal(tensor, summed(size, count) if rank == root else held(rank, count), ("reduce", count, root))
            parts = [torch.full((count,), -1) for _ in range(size)] if rank == root else None
            dist.gather(held(rank, count), parts, root)
            for peer, found in enumerate(parts or []):
                equal(found, held(peer, count), ("gather", count, peer))
            mine = torch.full((count,), -1)
            dist.scatter(mine, [held(peer + root, count) for peer in range(size)] if rank == root else None, root)
            equal(mine, held(rank + root, count), ("scatter", count, root))
    dist.barrier()


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()
