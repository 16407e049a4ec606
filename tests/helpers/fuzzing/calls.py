"""Steps in which no call fails: collectives, messages, sums in shared tensors. All results are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import dist_prims

from .rank import Failure, Group, Rank
from .script import step

__all__ = ["Collective", "content", "draw_collective"]

Op = dist.ReduceOp
Check = Callable[[], None]
Start = Callable[[bool], Any]

COUNTS = [0, 1, 2, 7, 100, 1000, 8_192, 8_193, 33_000, 150_000]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = [Op.BAND, Op.BOR, Op.BXOR]


def content(rank: int, count: int, salt: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The data that a rank brings into a call: small integers, which no dtype rounds."""
    return ((torch.arange(count) * 3 + rank * 5 + salt) % 11).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(found, expected):
        where = int((found != expected).flatten().nonzero()[0])
        raise Failure(
            f"{what}: element {where} of {found.numel()} is {found.flatten()[where]} and not "
            f"{expected.flatten()[where]}"
        )


@dataclass
class Collective:
    """A collective: the arguments, which are equal on all ranks, and the data of this rank."""

    rank: Rank
    group: Group
    name: str
    count: int
    dtype: torch.dtype
    op: Any
    root: int
    salt: int

    @property
    def text(self) -> str:
        op = f" {self.op.name if hasattr(self.op, 'name') else self.op}" if self.name in REDUCING else ""
        return f"{self.name}{op} of {self.count} {str(self.dtype).removeprefix('torch.')} from {self.root}"

    def prepare(self) -> tuple[Start, Check]:
        start, check = COLLECTIVES[self.name](self)
        return start, check

    def run(self) -> None:
        self.rank.launch(self.text, self.group, *self.prepare())

    def mine(self, count: int | None = None, salt: int = 0) -> torch.Tensor:
        return self.of(self.group.me, count, salt)

    def of(self, member: int, count: int | None = None, salt: int = 0) -> torch.Tensor:
        return content(member, self.count if count is None else count, self.salt + salt, self.dtype)

    def blank(self, count: int | None = None) -> torch.Tensor:
        return self.rank.place(torch.zeros(self.count if count is None else count, dtype=self.dtype))

    def reduced(self, count: int | None = None, salt: int = 0) -> torch.Tensor:
        count = self.count if count is None else count
        each = torch.stack([content(member, count, self.salt + salt) for member in range(self.group.size)])
        if self.op == Op.AVG:
            return (each.sum(0).double() / self.group.size).to(self.dtype)
        if self.op in (Op.MAX, Op.MIN):
            return (each.amax(0) if self.op == Op.MAX else each.amin(0)).to(self.dtype)
        total = each[0]
        for other in each[1:]:
            total = {
                Op.SUM: total + other,
                Op.PRODUCT: total * other,
                Op.BAND: total & other,
                Op.BOR: total | other,
                Op.BXOR: total ^ other,
            }[self.op]
        return total.to(self.dtype)

    def equal(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        if self.op == Op.AVG and self.name in REDUCING:
            expected = torch.where(torch.isclose(found, expected, rtol=1e-2), found, expected)
        same(found, expected, f"{self.text} on rank {self.group.me} of {self.group.size}")


def draw_collective(rank: Rank, group: Group, shared: Random, largest: int = COUNTS[-1]) -> Collective:
    name = shared.choice(list(COLLECTIVES))
    dtypes = INTEGERS + FLOATS + [torch.complex64] + [torch.bool] * (name not in REDUCING)
    dtype = shared.choice(dtypes)
    ops = [Op.SUM]
    if not dtype.is_complex:
        ops += [Op.MAX, Op.MIN] + ([Op.AVG] if dtype.is_floating_point else BITS)
    if dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        ops.append(Op.PRODUCT)
    count = shared.choice([count for count in COUNTS if count <= largest])
    return Collective(
        rank, group, name, count, dtype, shared.choice(ops), shared.randrange(group.size), shared.randrange(11)
    )


def all_reduce(call: Collective) -> tuple[Start, Check]:
    tensor = call.rank.place(call.mine())
    handle = call.group.handle
    return (
        lambda later: dist.all_reduce(tensor, call.op, handle, async_op=later),
        lambda: call.equal(tensor, call.reduced()),
    )


def broadcast(call: Collective) -> tuple[Start, Check]:
    tensor = call.rank.place(call.mine())
    return (
        lambda later: dist.broadcast(tensor, group=call.group.handle, group_src=call.root, async_op=later),
        lambda: call.equal(tensor, call.of(call.root)),
    )


def reduce(call: Collective) -> tuple[Start, Check]:
    tensor = call.rank.place(call.mine())
    expected = call.reduced() if call.group.me == call.root else call.mine()
    return (
        lambda later: dist.reduce(tensor, op=call.op, group=call.group.handle, group_dst=call.root, async_op=later),
        lambda: call.equal(tensor, expected),
    )


def all_gather(call: Collective) -> tuple[Start, Check]:
    """Ranks give lengths of their own."""
    counts = [call.count + (call.salt * member) % 3 for member in range(call.group.size)]
    outputs = [call.blank(count) for count in counts]
    given = call.rank.place(call.mine(counts[call.group.me]))

    def check() -> None:
        for member, output in enumerate(outputs):
            call.equal(output, call.of(member, counts[member]))

    return lambda later: dist.all_gather(outputs, given, call.group.handle, async_op=later), check


def all_gather_into_tensor(call: Collective) -> tuple[Start, Check]:
    output = torch.zeros(call.count * call.group.size, dtype=call.dtype)
    given = call.mine()
    expected = torch.cat([call.of(member) for member in range(call.group.size)])
    return (
        lambda later: dist.all_gather_into_tensor(output, given, call.group.handle, async_op=later),
        lambda: call.equal(output, expected),
    )


def gather(call: Collective) -> tuple[Start, Check]:
    is_root = call.group.me == call.root
    outputs = [call.blank() for _ in range(call.group.size)] if is_root else None
    given = call.rank.place(call.mine())

    def check() -> None:
        for member, output in enumerate(outputs or []):
            call.equal(output, call.of(member))

    return (
        lambda later: dist.gather(given, outputs, group=call.group.handle, group_dst=call.root, async_op=later),
        check,
    )


def scatter(call: Collective) -> tuple[Start, Check]:
    output = call.blank()
    members = range(call.group.size)
    given = [call.rank.place(call.of(member, salt=7)) for member in members] if call.group.me == call.root else None
    return (
        lambda later: dist.scatter(output, given, group=call.group.handle, group_src=call.root, async_op=later),
        lambda: call.equal(output, call.mine(salt=7)),
    )


def reduce_scatter(call: Collective) -> tuple[Start, Check]:
    output = call.blank()
    given = [call.rank.place(call.mine(salt=member)) for member in range(call.group.size)]
    return (
        lambda later: dist.reduce_scatter(output, given, call.op, call.group.handle, async_op=later),
        lambda: call.equal(output, call.reduced(salt=call.group.me)),
    )


def reduce_scatter_tensor(call: Collective) -> tuple[Start, Check]:
    whole = call.count * call.group.size
    output, given = torch.zeros(call.count, dtype=call.dtype), call.mine(whole)
    begin = call.count * call.group.me
    return (
        lambda later: dist.reduce_scatter_tensor(output, given, call.op, call.group.handle, async_op=later),
        lambda: call.equal(output, call.reduced(whole)[begin : begin + call.count]),
    )


def all_to_all(call: Collective) -> tuple[Start, Check]:
    """Each pair of ranks has a length of its own."""
    me, members = call.group.me, range(call.group.size)
    given = [call.rank.place(call.mine(call.count + member, salt=member)) for member in members]
    outputs = [call.blank(call.count + me) for _ in members]

    def check() -> None:
        for member, output in enumerate(outputs):
            call.equal(output, call.of(member, call.count + me, salt=me))

    return lambda later: dist.all_to_all(outputs, given, call.group.handle, async_op=later), check


def all_to_all_single(call: Collective) -> tuple[Start, Check]:
    me, members = call.group.me, range(call.group.size)
    lengths = [[(call.count + 2 * one + other) % 1009 for other in members] for one in members]  # to, by from
    given = torch.cat([call.mine(lengths[me][member], salt=member) for member in members])
    incoming = [lengths[member][me] for member in members]
    output = torch.zeros(sum(incoming), dtype=call.dtype)
    expected = torch.cat([call.of(member, incoming[member], salt=me) for member in members])
    return (
        lambda later: dist.all_to_all_single(
            output, given, incoming, lengths[me], group=call.group.handle, async_op=later
        ),
        lambda: call.equal(output, expected),
    )


def barrier(call: Collective) -> tuple[Start, Check]:
    return lambda later: dist.barrier(call.group.handle, async_op=later), lambda: None


def direct(call: Collective) -> tuple[Start, Check]:
    """The call that bypasses torch.distributed. It has no asynchronous form."""
    tensor = call.rank.place(call.mine())

    def start(later: bool) -> None:
        dist_prims.all_reduce_(tensor, call.op, call.group.handle)

    return start, lambda: call.equal(tensor, call.reduced())


COLLECTIVES: dict[str, Callable[[Collective], tuple[Start, Check]]] = {
    each.__name__: each
    for each in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        barrier,
        direct,
    )
}
REDUCING = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "direct"}


@step("collective", weight=8)
def some_collectives(rank: Rank, shared: Random) -> None:
    for _ in range(shared.randrange(1, 6)):
        group = shared.choice(rank.groups)
        if group.handle is not None:
            draw_collective(rank, group, shared).run()
        else:  # the draws of the members
            draw_collective(rank, group, shared)


@step("messages", weight=4)
def messages(rank: Rank, shared: Random) -> None:
    """Messages with tags around a ring. Each rank posts them in an order of its own."""
    group, salt = shared.choice(rank.groups), shared.randrange(11)
    plan = [
        (shared.randrange(group.size), tag, shared.choice(COUNTS), shared.choice(INTEGERS + FLOATS))
        for tag in range(shared.randrange(1, 7))
    ]
    if group.handle is None or group.size == 1:
        return
    posts = []
    for shift, tag, count, dtype in plan:
        to, source = (group.me + shift) % group.size, (group.me - shift) % group.size
        if shift == 0:
            continue
        outgoing = rank.place(content(group.me, count, salt + tag, dtype))
        incoming = rank.place(torch.zeros(count, dtype=dtype))
        expected = content(source, count, salt + tag, dtype)
        posts.append((_sender(group, outgoing, to, tag), f"send to {to}", lambda: None))
        posts.append((_receiver(group, incoming, source, tag), f"recv from {source}", _checker(incoming, expected)))
    rank.private.shuffle(posts)
    for start, what, check in posts:
        rank.post(what, group, start, check)


def _sender(group: Group, tensor: torch.Tensor, to: int, tag: int) -> Callable[[], Any]:
    return lambda: dist.isend(tensor, group=group.handle, tag=tag, group_dst=to)


def _receiver(group: Group, tensor: torch.Tensor, source: int, tag: int) -> Callable[[], Any]:
    return lambda: dist.irecv(tensor, group=group.handle, tag=tag, group_src=source)


def _checker(found: torch.Tensor, expected: torch.Tensor) -> Check:
    return lambda: same(found, expected, "message")


@step("any-source", weight=2)
def from_any_source(rank: Rank, shared: Random) -> None:
    """One rank receives from all others without naming them."""
    group, count, tag = shared.choice(rank.groups), shared.choice(COUNTS), 100 + shared.randrange(3)
    sink = shared.randrange(group.size)
    if group.handle is None:
        return
    if group.me != sink:
        dist.send(rank.place(content(group.me, count, tag)), group=group.handle, tag=tag, group_dst=sink)
        return
    seen = set()
    for _ in range(group.size - 1):
        tensor = rank.place(torch.zeros(count, dtype=torch.int64))
        source = group.members.index(dist.recv(tensor, group=group.handle, tag=tag))
        seen.add(source)
        same(tensor, content(source, count, tag), f"message from any rank, here {source}")
    if len(seen) != group.size - 1:
        raise Failure(f"{group.size - 1} ranks sent one message each, and these were named: {seen}")


@step("batch")
def batch(rank: Rank, shared: Random) -> None:
    """batch_isend_irecv: sends and receives in one call."""
    group, count = shared.choice(rank.groups), shared.choice(COUNTS)
    if group.handle is None or group.size == 1:
        return
    to, source = (group.me + 1) % group.size, (group.me - 1) % group.size
    incoming = torch.zeros(count, dtype=torch.int64)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, content(group.me, count, 3), group=group.handle, group_peer=to),
            dist.P2POp(dist.irecv, incoming, group=group.handle, group_peer=source),
        ]
    )
    for work in works:
        work.wait()
    same(incoming, content(source, count, 3), "batch")


@step("shared", weight=3)
def shared_tensors(rank: Rank, shared: Random) -> None:
    """all_reduce over shared tensors, which each rank makes and drops on its own."""
    group, count = shared.choice(rank.groups), shared.choice([1000, 33_000, 150_000])
    rounds, dtype, lends = shared.randrange(1, 5), shared.choice(FLOATS), shared.random() < 0.8
    if group.handle is None:
        return
    tensor = dist_prims.empty(count, dtype)
    for salt in range(rounds):
        if rank.private.random() < 0.4:
            tensor = dist_prims.empty(count, dtype)
        elif rank.private.random() < 0.2 and not lends:
            tensor = torch.empty(count, dtype=dtype)
        call = Collective(rank, group, "all_reduce", count, dtype, Op.SUM, 0, salt)
        tensor.copy_(call.mine())
        dist.all_reduce(tensor, group=group.handle)
        call.equal(tensor, call.reduced())


@step("incremental", weight=2)
def incremental_sums(rank: Rank, shared: Random) -> None:
    """A sum in a shared tensor that begins before all pieces are there."""
    group, pieces, piece = shared.choice(rank.groups), shared.randrange(1, 9), shared.choice([1000, 16_384, 30_001])
    rounds, budget, dtype = shared.randrange(1, 5), shared.choice([0, 1 << 16, 1 << 30]), shared.choice(FLOATS)
    twice = shared.random() < 0.3
    if group.handle is None:
        return
    tensor = dist_prims.empty(pieces * piece, dtype)
    for first in (0, rounds) if twice else (0,):
        sum_of = group.backend.incremental_reduce(tensor, budget, None)
        if sum_of is None:  # too small for this, or the group has a schedule of its own
            return
        _sum_by_pieces(rank, group, tensor, sum_of, piece, range(first, first + rounds))


def _sum_by_pieces(
    rank: Rank, group: Group, tensor: torch.Tensor, sum_of: Any, piece: int, salts: Iterable[int]
) -> None:
    """One sum for each salt. Each rank brings the pieces in an order of its own."""
    pieces, dtype = tensor.numel() // piece, tensor.dtype
    for salt in salts:
        call = Collective(rank, group, "all_reduce", pieces * piece, dtype, Op.SUM, 0, salt)
        mine = call.mine()
        order = list(range(pieces))
        rank.private.shuffle(order)
        for number in order:
            rank.pause(0.0005)
            at = slice(number * piece, (number + 1) * piece)
            part = mine[at] * 2
            if not sum_of.put(number, tensor[at], part, 0.5):
                raise Failure("put: refused although the piece lies like the tensor")
            if rank.private.random() < 0.1 and not sum_of.is_shown():
                sum_of.forget()
                for again in order[: order.index(number) + 1]:
                    at = slice(again * piece, (again + 1) * piece)
                    sum_of.put(again, tensor[at], mine[at].clone(), 1.0)
        work = sum_of.all_reduce(rank.private.random() < 0.5)
        work.wait()
        call.equal(tensor, call.reduced())
