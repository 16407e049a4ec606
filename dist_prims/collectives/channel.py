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

__all__ = ["Channel", "Transfer", "as_bytes"]


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes; contiguous tensors only."""
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class Transfer:
    """A tensor to be sent to, or received from, a peer (a rank of the group)."""

    peer: int
    data: torch.Tensor


class Channel:
    """All channels of this rank in one group, under one tag."""

    def __init__(self, group: dist.ProcessGroup, tag: int, timeout: timedelta) -> None:
        self._group = group
        self._tag = tag
        self._timeout = timeout

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> tuple[list[Any], list[Any]]:
        """Begin transfers of one step: (works of the sends, works of the receives), in their order."""
        device = (sends[0] if sends else receives[0]).data.device if sends or receives else None
        if device is not None and device.type == "cuda":
            return self._batch(sends, receives)
        incoming = [self._group.recv([as_bytes(each.data)], each.peer, self._tag) for each in receives]
        outgoing = [self._group.send([as_bytes(each.data)], each.peer, self._tag) for each in sends]
        return outgoing, incoming

    def _batch(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> tuple[list[Any], list[Any]]:
        ops = [
            dist.P2POp(kind, as_bytes(each.data), group=self._group, group_peer=each.peer)
            for kind, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for each in transfers
        ]
        works = dist.batch_isend_irecv(ops)
        # NCCL answers a batch with one work for all of it; waiting for it twice is harmless.
        return works[-1:] * len(sends), works[:1] * len(receives)

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(self._timeout)
