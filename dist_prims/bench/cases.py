"""The benchmark cases: for each collective its buffers, the call, and the known result.

The values are small integers, which every dtype adds exactly. They differ from iteration to iteration: a contender that
works on a buffer that has not been written since the last iteration would show the speed of a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import collectives as ours

__all__: list[str] = []

_ROOT = 0
_PERIOD = 13  # of the values; a prime, so that a block in the wrong place is detected

Call = Callable[..., Any]


@dataclass
class Buffers:
    """The buffers of one rank in a group of ``size``. Their values depend on the round: the number of the iteration."""

    rank: int
    size: int
    input: torch.Tensor
    output: torch.Tensor

    def value(self, rank: int, round: int, count: int, start: int = 0) -> torch.Tensor:
        """The values of a rank at places ``start`` to ``start + count``."""
        places = torch.arange(start, start + count, dtype=torch.int32)
        return ((places + round) % _PERIOD + rank).to(self.input.dtype)

    def total(self, round: int, count: int, start: int = 0) -> torch.Tensor:
        """The sum of the values of all ranks."""
        ranks = self.size * (self.size - 1) // 2
        return (self.value(0, round, count, start) * self.size + ranks).to(self.input.dtype)

    def block(self, rank: int) -> torch.Tensor:
        """The part of the output that comes from a rank."""
        length = len(self.output) // self.size
        return self.output[rank * length : (rank + 1) * length]


@dataclass(frozen=True)
class Case:
    """One collective: the sizes of its buffers, how it is called, and the check of the result."""

    shape: Callable[[int, int], tuple[int, int]]  # (elements, ranks) to elements of input and output
    call: Call  # of dist_prims, with the arguments of its collectives
    own: Call  # of torch.distributed, on the backend of the group that its argument ``group`` names
    wrong: Callable[[Buffers, int], int]  # (buffers, round) to the number of wrong elements on this rank
    # ranks to the factor from data per second to bytes per second on a link, see nccl-tests
    bus: Callable[[int], float]
    op: str = "none"


def case_of(name: str) -> Case:
    return CASES.get(name) or MESSAGES[name]


def contenders(
    collective: str, names: list[str], groups: Mapping[str, dist.ProcessGroup | None], **options: Any
) -> dict[str, Callable[[Buffers], Any]]:
    """The calls to compare, by name: of each group's backend, and of each algorithm in ``names`` over the default
    group, with these ``options`` of dist_prims."""
    case = case_of(collective)
    calls: dict[str, Callable[[Buffers], Any]] = {
        name: functools.partial(case.own, group=group) for name, group in groups.items()
    }
    return calls | {name: functools.partial(case.call, algorithm=name, **options) for name in names}


def _differ(result: torch.Tensor, expected: torch.Tensor) -> int:
    return int((result != expected).sum())


def _whole(n: int, size: int) -> tuple[int, int]:
    return n, 0


def _gathered(n: int, size: int) -> tuple[int, int]:
    return _share(n, size), _share(n, size) * size


def _scattered(n: int, size: int) -> tuple[int, int]:
    return _share(n, size) * size, _share(n, size)


def _blocks_for_all(n: int, size: int) -> tuple[int, int]:
    return _share(n, size) * size, _share(n, size) * size


def _share(n: int, size: int) -> int:
    """The elements of one rank, at least one: a call without elements is not worth a comparison."""
    return max(n // size, 1)


def _wrong_sum(b: Buffers, round: int) -> int:
    return _differ(b.input, b.total(round, len(b.input)))


def _wrong_gather(b: Buffers, round: int) -> int:
    return sum(_differ(b.block(rank), b.value(rank, round, len(b.input))) for rank in range(b.size))


def _wrong_scatter(b: Buffers, round: int) -> int:
    return _differ(b.output, b.total(round, len(b.output), b.rank * len(b.output)))


def _wrong_all_to_all(b: Buffers, round: int) -> int:
    length = len(b.output) // b.size
    return sum(_differ(b.block(rank), b.value(rank, round, length, b.rank * length)) for rank in range(b.size))


def _at_root(wrong: Callable[[Buffers, int], int]) -> Callable[[Buffers, int], int]:
    """The check of a collective whose result only the root has."""
    return lambda b, round: wrong(b, round) if b.rank == _ROOT else 0


def _wrong_broadcast(b: Buffers, round: int) -> int:
    return _differ(b.input, b.value(_ROOT, round, len(b.input)))


def _wrong_scatter_of_root(b: Buffers, round: int) -> int:
    return _differ(b.output, b.value(_ROOT, round, len(b.output), b.rank * len(b.output)))


def _wrong_round_trip(b: Buffers, round: int) -> int:
    return _differ(b.output, b.value(_ROOT, round, len(b.output))) if b.rank in (_ROOT, b.size - 1) else 0


def _round_trip(b: Buffers, group: Any) -> None:
    """The first rank sends to the last one, which sends back what it has received."""
    last = b.size - 1
    if b.rank == _ROOT:
        dist.send(b.input, last, group=group)
        dist.recv(b.output, last, group=group)
    elif b.rank == last:
        dist.recv(b.output, _ROOT, group=group)
        dist.send(b.output, _ROOT, group=group)


def _blocks(b: Buffers) -> list[torch.Tensor]:
    return [b.block(rank) for rank in range(b.size)]


def _blocks_of_root(b: Buffers) -> list[torch.Tensor] | None:
    return _blocks(b) if b.rank == _ROOT else None


def _given_by_root(b: Buffers) -> list[torch.Tensor] | None:
    return list(b.input.view(b.size, -1)) if b.rank == _ROOT else None


def _part(size: int) -> float:
    return (size - 1) / size


CASES: dict[str, Case] = {
    "all_reduce": Case(
        _whole,
        lambda b, **how: ours.all_reduce(b.input, **how),
        lambda b, group: dist.all_reduce(b.input, group=group),
        _wrong_sum,
        lambda size: 2 * _part(size),
        "sum",
    ),
    "reduce_scatter": Case(
        _scattered,
        lambda b, **how: ours.reduce_scatter(b.output, b.input, **how),
        lambda b, group: dist.reduce_scatter(b.output, list(b.input.view(b.size, -1)), group=group),
        _wrong_scatter,
        _part,
        "sum",
    ),
    "all_gather": Case(
        _gathered,
        lambda b, **how: ours.all_gather(b.output, b.input, **how),
        lambda b, group: dist.all_gather(_blocks(b), b.input, group=group),
        _wrong_gather,
        _part,
    ),
    "broadcast": Case(
        _whole,
        lambda b, **how: ours.broadcast(b.input, _ROOT, **how),
        lambda b, group: dist.broadcast(b.input, _ROOT, group=group),
        _wrong_broadcast,
        lambda size: 1.0,
    ),
    "reduce": Case(
        _whole,
        lambda b, **how: ours.reduce(b.input, _ROOT, **how),
        lambda b, group: dist.reduce(b.input, _ROOT, group=group),
        _at_root(_wrong_sum),
        lambda size: 1.0,
        "sum",
    ),
    "gather": Case(
        _gathered,
        lambda b, **how: ours.gather(b.input, _blocks_of_root(b), _ROOT, **how),
        lambda b, group: dist.gather(b.input, _blocks_of_root(b), _ROOT, group=group),
        _at_root(_wrong_gather),
        _part,
    ),
    "scatter": Case(
        _scattered,
        lambda b, **how: ours.scatter(b.output, _given_by_root(b), _ROOT, **how),
        lambda b, group: dist.scatter(b.output, _given_by_root(b), _ROOT, group=group),
        _wrong_scatter_of_root,
        _part,
    ),
    "all_to_all": Case(
        _blocks_for_all,
        lambda b, **how: ours.all_to_all(b.output, b.input, **how),
        lambda b, group: dist.all_to_all_single(b.output, b.input, group=group),
        _wrong_all_to_all,
        _part,
    ),
    "barrier": Case(
        lambda n, size: (0, 0),
        lambda b, **how: ours.barrier(**how),
        lambda b, group: dist.barrier(group=group),
        lambda b, round: 0,
        lambda size: 0.0,
    ),
}

# Two messages one after the other. dist_prims has no algorithms for them.
MESSAGES: dict[str, Case] = {
    "round_trip": Case(
        lambda n, size: (n, n), lambda b, **how: _round_trip(b, None), _round_trip, _wrong_round_trip, lambda size: 2.0
    )
}
