"""Channels: bytes between two ranks of any ``torch.distributed`` group.

What differs between engines lives here and nowhere else. Tensors travel as bytes, so every dtype that torch has can
be moved by every engine. Engines with tags (gloo, MPI) keep two collectives of one group apart by them; NCCL has
none and wants all sends and receives of a step in one batch, or two ranks that send to each other first wait forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Channel", "Pending", "Transfer", "as_bytes"]


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes; contiguous tensors only."""
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class Transfer:
    """A tensor to be sent to, or received from, a peer (a rank of the group)."""

    peer: int
    data: torch.Tensor


class Pending:
    """A transfer under way, with its memory, which must live until then. It may be waited for again and again: gloo
    counts arrivals, so that a second wait for one of its works waits for a second arrival, forever."""

    def __init__(self, work: Any, data: torch.Tensor) -> None:
        self._under_way: tuple[Any, torch.Tensor] | None = (work, data)

    def wait(self, timeout: timedelta) -> None:
        if self._under_way is not None:
            self._under_way[0].wait(timeout)
            self._under_way = None


class Channel:
    """All channels of this rank in one group, under one tag."""

    def __init__(self, group: dist.ProcessGroup, tag: int, timeout: timedelta) -> None:
        self._group = group
        self._tag = tag
        self._timeout = timeout

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> tuple[list[Pending], list[Pending]]:
        """Begin transfers of one step: what is pending of the sends, and of the receives, in their order."""
        each = [*receives, *sends]
        if each and each[0].data.device.type == "cuda":
            works = self._batch(sends, receives)
        else:
            works = [self._group.recv([as_bytes(one.data)], one.peer, self._tag) for one in receives]
            works += [self._group.send([as_bytes(one.data)], one.peer, self._tag) for one in sends]
        pending = [Pending(work, one.data) for work, one in zip(works, each, strict=True)]
        return pending[len(receives) :], pending[: len(receives)]

    def _batch(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        ops = [
            dist.P2POp(kind, as_bytes(each.data), group=self._group, group_peer=each.peer)
            for kind, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for each in transfers
        ]
        works = dist.batch_isend_irecv(ops)
        return works if len(works) == len(ops) else works[:1] * len(ops)  # NCCL: one work for all of a batch

    def wait(self, pending: Sequence[Pending]) -> None:
        for each in pending:
            each.wait(self._timeout)
