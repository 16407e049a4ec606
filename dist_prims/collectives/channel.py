"""Point-to-point transfers between the ranks of any ``torch.distributed`` group.

This module contains all differences between backends. Tensors are sent as bytes, so that every backend can transfer
every dtype of torch. Backends with tags (gloo, MPI) separate two collectives of one group by tag. NCCL has no tags. It
needs all sends and receives of a step in one batch: two ranks that both send first would deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..tracing import format as fmt
from ..tracing import recorder

__all__: list[str] = []


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat, contiguous tensor as bytes."""
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class Transfer:
    """A tensor to send to, or to receive from, a peer. ``peer`` is a rank of the group."""

    peer: int
    data: torch.Tensor


class Pending:
    """A transfer in progress. The object keeps the memory of the transfer alive.

    ``wait()`` may be called repeatedly. A Work of gloo does not allow this: gloo counts arrivals, and a second wait for
    one work would wait for a second arrival, which never comes.
    """

    def __init__(self, work: Any, data: torch.Tensor) -> None:
        self._in_progress: tuple[Any, torch.Tensor] | None = (work, data)

    def wait(self, timeout: timedelta) -> None:
        if self._in_progress is not None:
            self._in_progress[0].wait(timeout)
            self._in_progress = None


class Channel:
    """The transfers between this rank and the others of a group under one tag."""

    def __init__(self, group: dist.ProcessGroup, tag: int, timeout: timedelta) -> None:
        self._group = group
        self._tag = tag
        self._timeout = timeout

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> tuple[list[Pending], list[Pending]]:
        """Start the transfers of one step.

        Return the pending sends and the pending receives, each in the given order.
        """
        transfers = [*receives, *sends]
        if transfers and transfers[0].data.device.type == "cuda":
            works = self._start_batch(sends, receives)
        else:
            works = [self._group.recv([as_bytes(receive.data)], receive.peer, self._tag) for receive in receives]
            works += [self._group.send([as_bytes(send.data)], send.peer, self._tag) for send in sends]
        if recorder.active is not None:
            kinds = [fmt.RECEIVE] * len(receives) + [fmt.SEND] * len(sends)
            works = [
                recorder.TracedWork(work, kind, transfer.peer, transfer.data.nbytes)
                for work, kind, transfer in zip(works, kinds, transfers, strict=True)
            ]
        pending = [Pending(work, transfer.data) for work, transfer in zip(works, transfers, strict=True)]
        return pending[len(receives) :], pending[: len(receives)]

    def _start_batch(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[Any]:
        ops = [
            dist.P2POp(kind, as_bytes(transfer.data), group=self._group, group_peer=transfer.peer)
            for kind, transfers in ((dist.irecv, receives), (dist.isend, sends))
            for transfer in transfers
        ]
        works = dist.batch_isend_irecv(ops)
        return works if len(works) == len(ops) else works[:1] * len(ops)  # NCCL returns one work for a batch

    def wait(self, pending: Sequence[Pending]) -> None:
        for transfer in pending:
            transfer.wait(self._timeout)
