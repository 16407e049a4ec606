"""Tensors of known values, every dtype, comparison to the bit, and collectives whose results are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from functools import reduce as fold
from typing import Any

import torch
import torch.distributed as dist

import dist_prims
from dist_prims.torch_compat import all_gather_single, reduce_scatter_single

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


def noise(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Of very different sizes, so that every other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * torch.logspace(-3, 2, count)).to(dtype)


def content(rank: int, count: int, salt: int = 0, is_small: bool = False) -> torch.Tensor:
    """The data of a rank in a call: integers; small ones are rounded by no dtype, and neither are their sums."""
    values = held(rank, count) + salt
    return values % 11 if is_small else values


@dataclass
class Call:
    """A collective of torch, its arguments on this rank, and what it must leave in its outputs and inputs.

    Args:
        name: a key of ``COLLECTIVES``.
        count: elements of a block. The blocks of some collectives are a few elements longer, each by its own number.
        salt: makes the data of one call differ from those of the next.
        place: puts the arguments where they shall lie in memory.
    """

    name: str
    count: int
    dtype: torch.dtype = torch.int64
    op: Any = Op.SUM
    root: int = 0
    salt: int = 0
    group: Any = None
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.is_root = self.rank == self.root
        self._start, self._outputs, self._expected = COLLECTIVES[self.name](self)

    def __str__(self) -> str:
        op = f" {getattr(self.op, 'name', self.op)}" if self.name in REDUCING else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}{op} of {self.count} {dtype}, root {self.root}, rank {self.rank} of {self.size}"

    def run(self) -> None:
        self.start()
        self.check()

    def start(self, is_async: bool = False) -> Any:
        """Makes the call, and returns torch's work if it is asynchronous."""
        return self._start(async_op=is_async)

    def check(self) -> None:
        for found, expected in zip(self._outputs, self._expected, strict=True):
            if self.op == Op.AVG and self.name in REDUCING:  # rounded
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=0, msg=str(self))
            else:
                equal(found, expected, self)

    def data(self, rank: int | None = None, count: int | None = None, salt: int = 0) -> torch.Tensor:
        """What a rank sends, by default this one."""
        return self._integers(self.rank if rank is None else rank, count, salt).to(self.dtype)

    def _integers(self, rank: int, count: int | None, salt: int) -> torch.Tensor:
        count = self.count if count is None else count
        return content(rank, count, self.salt + salt, is_small=self.dtype != torch.int64)

    def blank(self, count: int | None = None) -> torch.Tensor:
        return self.place(torch.zeros(self.count if count is None else count, dtype=self.dtype))

    def reduced(self, count: int | None = None, salt: int = 0) -> torch.Tensor:
        """The reduction of what all ranks send."""
        total = fold(FOLDS[self.op], (self._integers(rank, count, salt) for rank in range(self.size)))
        return (total / self.size if self.op == Op.AVG else total).to(self.dtype)


FOLDS: dict[Any, Callable[[Any, Any], torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
# The call, which takes async_op; its outputs, and inputs that must stay as they are; what these must be.
Prepared = tuple[Callable[..., Any], list[torch.Tensor], list[torch.Tensor]]


def all_reduce(call: Call) -> Prepared:
    tensor = call.place(call.data())
    start = partial(dist.all_reduce, tensor, call.op, call.group)
    return start, [tensor], [call.reduced()]


def direct_all_reduce(call: Call) -> Prepared:
    """The call that bypasses torch.distributed. It has no asynchronous form."""
    tensor = call.place(call.data())

    def start(async_op: bool) -> None:
        dist_prims.all_reduce(tensor, call.op, call.group)

    return start, [tensor], [call.reduced()]


def broadcast(call: Call) -> Prepared:
    tensor = call.place(call.data())
    start = partial(dist.broadcast, tensor, group=call.group, group_src=call.root)
    return start, [tensor], [call.data(call.root)]


def reduce(call: Call) -> Prepared:
    """The tensors of the other ranks stay as they are."""
    tensor = call.place(call.data())
    start = partial(dist.reduce, tensor, op=call.op, group=call.group, group_dst=call.root)
    return start, [tensor], [call.reduced() if call.is_root else call.data()]


def all_gather(call: Call) -> Prepared:
    counts = [call.count + call.salt * rank % 3 for rank in range(call.size)]
    outputs, own = [call.blank(count) for count in counts], call.place(call.data(count=counts[call.rank]))
    start = partial(dist.all_gather, outputs, own, call.group)
    expected = [call.data(rank, count) for rank, count in enumerate(counts)]
    return start, [*outputs, own], [*expected, own.clone()]


def all_gather_into_tensor(call: Call) -> Prepared:
    output, own = call.blank(call.count * call.size).contiguous(), call.place(call.data()).contiguous()
    start = partial(all_gather_single, output, own, call.group)
    return start, [output], [torch.cat([call.data(rank) for rank in range(call.size)])]


def gather(call: Call) -> Prepared:
    outputs = [call.blank() for _ in range(call.size)] if call.is_root else None
    own = call.place(call.data())
    start = partial(dist.gather, own, outputs, group=call.group, group_dst=call.root)
    expected = [call.data(rank) for rank in range(call.size)] if call.is_root else []
    return start, [*(outputs or []), own], [*expected, own.clone()]


def scatter(call: Call) -> Prepared:
    output = call.blank()
    blocks = [call.place(call.data(rank, salt=7)) for rank in range(call.size)] if call.is_root else None
    start = partial(dist.scatter, output, blocks, group=call.group, group_src=call.root)
    return start, [output, *(blocks or [])], [call.data(salt=7), *(block.clone() for block in blocks or [])]


def reduce_scatter(call: Call) -> Prepared:
    output, blocks = call.blank(), [call.place(call.data(salt=rank)) for rank in range(call.size)]
    start = partial(dist.reduce_scatter, output, blocks, call.op, call.group)
    return start, [output, *blocks], [call.reduced(salt=call.rank), *(block.clone() for block in blocks)]


def reduce_scatter_tensor(call: Call) -> Prepared:
    output, whole = call.blank().contiguous(), call.data(count=call.count * call.size)
    start = partial(reduce_scatter_single, output, whole, call.op, call.group)
    return start, [output], [call.reduced(len(whole))[call.rank * call.count :][: call.count]]


def all_to_all(call: Call) -> Prepared:
    """The blocks for a rank are longer by its number."""
    blocks = [call.place(call.data(count=call.count + rank, salt=rank)) for rank in range(call.size)]
    count = call.count + call.rank
    outputs = [call.blank(count) for _ in range(call.size)]
    start = partial(dist.all_to_all, outputs, blocks, call.group)
    expected = [call.data(rank, count, salt=call.rank) for rank in range(call.size)]
    return start, [*outputs, *blocks], [*expected, *(block.clone() for block in blocks)]


def all_to_all_single(call: Call) -> Prepared:
    """Each pair of ranks has a length of its own."""
    ranks = range(call.size)
    lengths = [[(call.count + 2 * sender + receiver) % 1009 for receiver in ranks] for sender in ranks]
    sent, received = lengths[call.rank], [lengths[sender][call.rank] for sender in ranks]
    blocks = torch.cat([call.data(count=sent[rank], salt=rank) for rank in ranks])
    output = torch.zeros(sum(received), dtype=call.dtype)
    start = partial(dist.all_to_all_single, output, blocks, received, sent, call.group)
    return start, [output], [torch.cat([call.data(rank, received[rank], salt=call.rank) for rank in ranks])]


def barrier(call: Call) -> Prepared:
    return partial(dist.barrier, call.group), [], []


ROOTED: list[Callable[[Call], Prepared]] = [broadcast, reduce, gather, scatter]
COLLECTIVES: dict[str, Callable[[Call], Prepared]] = {
    collective.__name__: collective
    for collective in (
        *(all_reduce, direct_all_reduce, all_gather, all_gather_into_tensor, reduce_scatter, reduce_scatter_tensor),
        *(all_to_all, all_to_all_single, barrier, *ROOTED),
    )
}
REDUCING = {"all_reduce", "direct_all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
COUNTS = (0, 1, 13, 1031, 40_000, 300_007)  # one shot, two shots, several segments


def every_collective(*counts: int, **options: Any) -> None:
    """Makes each collective with each count, those with a root from each root; ``options`` are those of a ``Call``."""
    size = dist.get_world_size(options.get("group"))
    for count in counts or COUNTS:
        for name, collective in COLLECTIVES.items():
            all_roots = range(size) if collective in ROOTED and count < 40_000 else (size - 1,)
            for root in all_roots:
                Call(name, count, root=root, salt=count % 11, **options).run()


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()
