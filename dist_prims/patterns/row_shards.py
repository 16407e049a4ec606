"""Rows that belong to one list and lie on many ranks: the outputs of an ensemble's members, the scores of a pool.

Each rank has a share of neighbours, so that the list in order is the shares in order. A rank may have none, and then
does not know what a row looks like; and one may have failed, while the others wait. So before rows travel, every rank
tells in a line of fixed size what it has, and all learn the same: how to receive, or why nothing comes.
"""

from __future__ import annotations

import functools
import json
import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..agreement import gather_rows
from ..errors import MismatchError

__all__ = ["Kind", "agree", "gather", "share"]

_WIDTH = 256


@dataclass(frozen=True)
class Kind:
    """What one row is."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(rows: torch.Tensor) -> Kind:
        return Kind(rows.dtype, tuple(rows.shape[1:]))

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, *self.shape, dtype=self.dtype, device=device)


def share(count: int, size: int, rank: int) -> range:
    """The rows of one rank. Where there are fewer rows than ranks, the last ranks have one and rank 0 has none.

    >>> [list(share(5, 3, rank)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(rank * count // size, (rank + 1) * count // size)


def agree(
    what: str, rows: torch.Tensor | None, failure: Exception | None, group: dist.ProcessGroup, device: torch.device
) -> Kind:
    """What a row is, of all ranks. ``rows`` is None on a rank that has none; ``what`` says what is done, on each alike.

    >>> agree("mean", torch.ones(3, 2), None, dist.group.WORLD, torch.device("cpu"))
    Kind(dtype=torch.float32, shape=(2,))

    The ``failure`` of a rank is raised there, and as a MismatchError on the others, which name that rank.
    """
    kind = None if rows is None else f"{str(rows.dtype)[6:]} {list(rows.shape[1:])}"
    problem = None if failure is None else f"{type(failure).__name__}: {failure}"
    mine = _line(what, kind, problem).to(device)
    told, work = gather_rows(mine, group)
    work.wait()
    if rows is not None and failure is None and torch.equal(told, mine.expand_as(told)):
        return Kind.of(rows)  # as a rule: all have told the same
    everyones = [json.loads(bytes(line).decode()) for line in told.tolist()]
    if failure is not None:
        raise failure
    for rank, (_, _, failed) in enumerate(everyones):
        if failed is not None:
            raise MismatchError(f"rank {group.rank()}: {what}: nothing was sent, rank {rank} failed: {failed}")
    first = next((line for line in everyones if line[1]), everyones[0])
    for rank, (its, row, _) in enumerate(everyones):
        if its != first[0] or (row or first[1]) != first[1]:
            raise MismatchError(
                f"rank {group.rank()}: ranks disagree, nothing was sent. Rank {everyones.index(first)} has "
                f"{first[0]} of rows {first[1]}; rank {rank} has {its} of rows {row}. Every rank must make the same "
                "calls in the same order, with inputs of the same shape"
            )
    if first[1] is None:
        raise ValueError(f"rank {group.rank()}: {what}: no rank has a row; there must be one to know what it is")
    name, _, shape = first[1].partition(" ")
    return Kind(getattr(torch, name), tuple(json.loads(shape)))


@functools.lru_cache(256)
def _line(*words: str | None) -> torch.Tensor:
    """The words as JSON, of one size; what is too long is cut, and what identifies it ends in a checksum."""
    room, fitting = _WIDTH, list(words)
    while len(line := json.dumps(fitting).encode()) > _WIDTH:
        room = room * 3 // 4
        fitting = [word if word is None or len(word) <= room else _cut(word, room) for word in words]
    return torch.frombuffer(bytearray(line.ljust(_WIDTH)), dtype=torch.uint8)


def _cut(word: str, room: int) -> str:
    return f"{word[: max(room - 9, 0)]}~{zlib.crc32(word.encode()):08x}"


def gather(
    rows: torch.Tensor | None,
    kind: Kind,
    count: int,
    group: dist.ProcessGroup,
    device: torch.device,
    root: int | None = None,
) -> torch.Tensor | None:
    """All ``count`` rows in order, on every rank, or on ``root`` alone and None elsewhere.

    >>> gather(torch.ones(2), Kind(torch.float32, ()), 2, dist.group.WORLD, torch.device("cpu"))
    tensor([1., 1.])

    Shares differ by one row at most, so the shorter are filled up. They travel as bytes: every dtype does.
    """
    size = group.size()
    if root is not None and not 0 <= root < size:
        raise ValueError(f"rank {group.rank()}: rows to rank {root}; the group has ranks 0 to {size - 1}")
    lengths = [len(share(count, size, rank)) for rank in range(size)]
    longest = max(lengths)
    packet = kind.empty(0, device) if rows is None else rows.detach().resolve_conj().resolve_neg()  # of bytes
    if len(packet) < longest or not packet.is_contiguous():
        packet, part = kind.empty(longest, device), packet
        packet[: len(part)] = part
        packet[len(part) :] = 0
    mine = packet.reshape(-1).view(torch.uint8)
    if root is None:
        everyones, work = gather_rows(mine, group)
        work.wait()
    else:
        everyones = mine.new_empty(size if group.rank() == root else 0, mine.numel())
        dist.gather(mine, list(everyones) or None, group=group, group_dst=root)
        if group.rank() != root:
            return None
    whole = everyones.view(-1).view(kind.dtype).view(size, longest, *kind.shape)
    if min(lengths) == longest:
        return whole.flatten(0, 1)
    return torch.cat([part[:length] for part, length in zip(whole, lengths, strict=True)])
