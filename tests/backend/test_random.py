"""Random sequences of collectives over the backend, against what one process computes by itself.

All ranks draw the same calls from one seed: the operation, type, length, group, root, and whether to wait at once.
Each rank knows what every rank gives, so it folds the expected result itself, in the order that is documented.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from values import equal

import dist_prims
from dist_prims.collectives.reduction import fold

Op = dist.ReduceOp
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
LENGTHS = [0, 1, 2, 13, 100, 1031, 8191, 70_001]
Check = Callable[[], None]


def data(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in INTEGERS:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    if dtype in COMPLEX:
        return torch.complex(*torch.randn(2, count, generator=generator)).to(dtype)
    return torch.randn(count, generator=generator).to(dtype)


def reduced(op: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    out = inputs[0].clone()
    fold(op, out, inputs, [1] * len(inputs), len(inputs))
    return out


class Calls:
    """One group's calls: each makes the call number ``seed`` and returns how to check its result."""

    def __init__(self, group: Any, draw: random.Random) -> None:
        self.group, self.draw = group, draw
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def make(self, name: str, seed: int) -> tuple[Any, Check]:
        dtype = self.draw.choice(INTEGERS + FLOATS + COMPLEX)
        count, root = self.draw.choice(LENGTHS), self.draw.randrange(self.size)
        sums = [Op.SUM] + ([Op.PRODUCT, Op.MIN, Op.MAX] if dtype not in COMPLEX else [])  # what torch lets through
        sums += [Op.AVG] if dtype not in INTEGERS else [Op.BAND, Op.BOR, Op.BXOR]
        op, late = self.draw.choice(sums), self.draw.random() < 0.5
        give = [data(seed, rank, count, dtype) for rank in range(self.size)]
        mine, where = give[self.rank].clone(), (name, seed, dtype, count, op, root)
        work, check = getattr(self, name)(give, mine, op, root, where)
        return (work(group=self.group, async_op=late), check)

    def all_reduce(self, give: Any, mine: torch.Tensor, op: Any, _: int, where: Any) -> Any:
        return lambda **how: dist.all_reduce(mine, op, **how), lambda: equal(mine, reduced(op, give), where)

    def reduce(self, give: Any, mine: torch.Tensor, op: Any, root: int, where: Any) -> Any:
        expected = reduced(op, give) if self.rank == root else mine.clone()
        call = lambda **how: dist.reduce(mine, None, op, group_dst=root, **how)  # noqa: E731
        return call, lambda: equal(mine, expected, where)

    def broadcast(self, give: Any, mine: torch.Tensor, _: Any, root: int, where: Any) -> Any:
        call = lambda **how: dist.broadcast(mine, None, group_src=root, **how)  # noqa: E731
        return call, lambda: equal(mine, give[root], where)

    def all_gather(self, give: Any, mine: torch.Tensor, _: Any, __: int, where: Any) -> Any:
        found = mine.new_zeros(self.size * len(mine))
        call = lambda **how: dist.all_gather_into_tensor(found, mine, **how)  # noqa: E731
        return call, lambda: equal(found, torch.cat(give), where)

    def reduce_scatter(self, give: Any, mine: torch.Tensor, op: Any, _: int, where: Any) -> Any:
        count = len(mine) // self.size
        give, found = [each[: count * self.size] for each in give], mine.new_zeros(count)
        expected = reduced(op, give).view(self.size, count)[self.rank] if count else found.clone()
        call = lambda **how: dist.reduce_scatter_tensor(found, mine[: count * self.size], op, **how)  # noqa: E731
        return call, lambda: equal(found, expected, where)

    def all_to_all(self, give: Any, mine: torch.Tensor, _: Any, __: int, where: Any) -> Any:
        """Rank r sends its first (r + 2 p) % 5 elements to rank p, as far as there are so many."""
        lengths = [[min((r + 2 * p) % 5, len(mine)) for p in range(self.size)] for r in range(self.size)]
        incoming = [lengths[peer][self.rank] for peer in range(self.size)]
        sent = torch.cat([mine[:length] for length in lengths[self.rank]])
        found = mine.new_zeros(sum(incoming))
        expected = torch.cat([give[peer][:length] for peer, length in enumerate(incoming)])
        call = lambda **how: dist.all_to_all_single(found, sent, incoming, lengths[self.rank], **how)  # noqa: E731
        return call, lambda: equal(found, expected, where)

    def gather(self, give: Any, mine: torch.Tensor, _: Any, root: int, where: Any) -> Any:
        places = [torch.zeros_like(mine) for _ in give] if self.rank == root else None
        call = lambda **how: dist.gather(mine, places, None, group_dst=root, **how)  # noqa: E731

        def check() -> None:
            for found, wanted in zip(places or [], give, strict=False):
                equal(found, wanted, where)

        return call, check

    def scatter(self, give: Any, mine: torch.Tensor, _: Any, root: int, where: Any) -> Any:
        found, parts = torch.zeros_like(mine), [each.clone() for each in give] if self.rank == root else None
        call = lambda **how: dist.scatter(found, parts, None, group_src=root, **how)  # noqa: E731
        return call, lambda: equal(found, give[self.rank], where)

    def exchange(self, give: Any, mine: torch.Tensor, _: Any, root: int, where: Any) -> Any:
        """Messages to the right and from the left, while collectives go on."""
        found, right, left = torch.zeros_like(mine), (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def call(group: Any, async_op: bool) -> Any:
            works = [
                dist.isend(mine, group=group, group_dst=right, tag=root),
                dist.irecv(found, group=group, group_src=left, tag=root),
            ]
            return works if async_op else [work.wait() for work in works] and None

        return call, lambda: equal(found, give[left], where)


NAMES = [name for name in vars(Calls) if not name.startswith("_") and name != "make"]


def body(seed: int, calls: int) -> None:
    draw, size = random.Random(seed), dist.get_world_size()
    members = [list(range(size)), list(range(0, size, 2)), list(range(1, size))]
    made = [dist.new_group(ranks) for ranks in members]
    pending: list[tuple[Any, Check]] = []
    for number in range(calls):
        which, name, flush = draw.randrange(len(members)), draw.choice(NAMES), draw.random() < 0.3
        inner = random.Random(draw.random())
        if dist.get_rank() in members[which] and (name != "exchange" or len(members[which]) > 1):
            pending.append(Calls(made[which], inner).make(name, 1000 * seed + number))
        if flush:
            random.Random(number).shuffle(pending)
            settle(pending)
    settle(pending)


def settle(pending: list[tuple[Any, Check]]) -> None:
    for work, check in pending:
        for each in work if isinstance(work, list) else [work]:
            if each is not None:
                each.wait()
        check()
    pending.clear()


@pytest.mark.parametrize("size", [2, 4])
def test_random_calls(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_PRIMS_SLOT_BYTES", str(1 << 15))  # so that much is several segments
    dist_prims.spawn(body, size, (size, 150), backend="dist_prims", timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_2500_random_calls(size: int) -> None:
    dist_prims.spawn(body, size, (100 + size, 2500), backend="dist_prims", timeout=800)
