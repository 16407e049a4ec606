"""Rows of one list, sharded over ranks: the outputs of an ensemble's members, the scores of a pool.

Each rank has a range of consecutive rows; the shards in rank order are the list. A rank without rows does not know
their dtype and shape, and a rank may have failed. Before rows are sent, every rank therefore sends a description of
fixed size, from which all ranks know the receive buffer or the error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..agreement import check_failures, check_lists, failure_text, gather_fields, gather_rows

__all__: list[str] = []

_WIDTH = 256
_REMEDY = "Every rank must make the same calls in the same order, with inputs of the same shape"


@dataclass(frozen=True)
class Kind:
    """Dtype and shape of one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(rows: torch.Tensor) -> Kind:
        return Kind(rows.dtype, tuple(rows.shape[1:]))

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, *self.shape, dtype=self.dtype, device=device)


def share(count: int, size: int, rank: int) -> range:
    """The rows of one rank. If there are fewer rows than ranks, rank 0 has none and the last rank has one.

    >>> [list(share(5, 3, rank)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(rank * count // size, (rank + 1) * count // size)


def agree(
    operation: str,
    rows: torch.Tensor | None,
    failure: Exception | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Kind:
    """The kind of the rows of all ranks; every rank raises if two ranks differ or one gives a ``failure``.

    ``rows`` is None on a rank that has none.

    >>> agree("mean", torch.ones(3, 2), None, dist.group.WORLD, torch.device("cpu"))
    Kind(dtype=torch.float32, shape=(2,))
    """
    kind = None if rows is None else f"{str(rows.dtype)[6:]} {list(rows.shape[1:])}"
    found = gather_fields((failure_text(failure), operation, kind), _WIDTH, group, device)
    check_failures(operation, failure, [text for text, _, _ in found], group)
    check_lists("", [[operation] for _, operation, _ in found], _REMEDY, group)
    kinds = [kind for _, _, kind in found]
    check_lists(operation, [kind and [f"rows {kind}"] for kind in kinds], _REMEDY, group)
    if rows is not None:
        return Kind.of(rows)
    if not any(kinds):
        raise ValueError(f"rank {group.rank()}: {operation}: no rank has a row, so its dtype and shape are not known")
    name, _, shape = next(filter(None, kinds)).partition(" ")
    return Kind(getattr(torch, name), tuple(json.loads(shape)))


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

    Shares differ by at most one row; shorter ones are padded. Rows are sent as bytes, so any dtype is supported.
    """
    size = group.size()
    if root is not None and not 0 <= root < size:
        raise ValueError(f"rank {group.rank()}: root={root}; the group has ranks 0 to {size - 1}")
    lengths = [len(share(count, size, rank)) for rank in range(size)]
    longest = max(lengths)
    packet = kind.empty(0, device) if rows is None else rows.detach().resolve_conj().resolve_neg()  # of bytes
    if len(packet) < longest or not packet.is_contiguous():
        packet, part = kind.empty(longest, device), packet
        packet[: len(part)] = part
        packet[len(part) :] = 0
    mine = packet.reshape(-1).view(torch.uint8)
    if root is None:
        gathered, work = gather_rows(mine, group)
        work.wait()
    else:
        gathered = mine.new_empty(size if group.rank() == root else 0, mine.numel())
        dist.gather(mine, list(gathered) or None, group=group, group_dst=root)
        if group.rank() != root:
            return None
    whole = gathered.view(-1).view(kind.dtype).view(size, longest, *kind.shape)
    if min(lengths) == longest:
        return whole.flatten(0, 1)
    return torch.cat([part[:length] for part, length in zip(whole, lengths, strict=True)])
