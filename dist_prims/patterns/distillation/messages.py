"""Messages between a student and its teacher: a header, then the tensors that it describes, if any.

Student to teacher: a request (tensors), the end, or an error. Teacher to student: an answer (tensors) or an error. The
header has a fixed size. Its tensors may differ from those of the previous message: the last batch may be smaller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import CommError
from ...torch_compat import exposed_timeout
from ...training.pipeline.packet import FAILED, HEAD, LAYOUT, WELL, Packet, PacketLayout, head_of, read_head, spec_of

__all__: list[str] = []

_TAG = 20_554  # beside the tags that a program may use in the same group
_TEXT_BYTES = HEAD - 8  # of a head
_DEFAULT_TIMEOUT = timedelta(minutes=5)  # of a backend that does not expose its own; as in dist_prims.init()


class DistillationError(CommError):
    """A teacher or a student failed in its part of a distillation; the group remains usable.

    >>> import dist_prims
    >>> def teacher_without_memory():
    ...     from dist_prims.patterns.distillation import Distillation
    ...     distillation = Distillation(classes=3)  # rank 1 teaches, rank 0 learns
    ...     def teacher(inputs):
    ...         raise RuntimeError("out of memory")
    ...     try:
    ...         if distillation.is_teacher:
    ...             distillation.teach(teacher)
    ...         with distillation.student([(torch.ones(4, 2), "labels")]) as answered:
    ...             list(answered)
    ...     except (DistillationError, RuntimeError) as error:
    ...         return f"{type(error).__name__}: {error}"
    >>> dist_prims.spawn(teacher_without_memory, 2, timeout=60)
    ['DistillationError: rank 1, a teacher, failed: RuntimeError: out of memory', 'RuntimeError: out of memory']
    """


class DistillationMessage(NamedTuple):
    """One message: the ``tensors`` of a request or an answer, a ``failure``, or neither for the end."""

    tensors: tuple[torch.Tensor, ...] | None = None
    failure: str | None = None


class Messages:
    """Messages to and from ranks of a group; every wait has the group's timeout, or a shorter one."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.timeout = exposed_timeout(group, device) or _DEFAULT_TIMEOUT
        self.broken = False  # the engine has failed: nothing more can be sent

    def send(self, peer: int, message: DistillationMessage, limit: timedelta | None = None) -> None:
        """Send a message. If a header cannot describe so many tensors, raise ValueError before anything is sent.

        ``limit``: the timeout of a message without tensors.
        """
        if message.tensors is None:
            head = head_of(WELL) if message.failure is None else head_of(FAILED, message.failure)
            self._move(dist.isend, head, peer, limit)
            return
        layout = PacketLayout(spec_of(each.detach()) for each in message.tensors)
        text = json.dumps(layout.encode(), separators=(",", ":"))
        if len(text) > _TEXT_BYTES:
            raise ValueError(f"{len(layout.specs)} tensors are too many for one message; join some of them")
        packet = Packet.empty(layout, self._device)
        packet.write(message.tensors)
        self._move(dist.isend, head_of(LAYOUT, text), peer)
        self._move(dist.isend, packet.data, peer)

    def receive(self, peer: int, limit: timedelta | None = None) -> DistillationMessage:
        """The next message of a rank; ``limit`` as in :meth:`send`."""
        head = torch.empty(HEAD, dtype=torch.uint8)
        status, text = read_head(self._move(dist.irecv, head, peer, limit))
        if status == FAILED:
            return DistillationMessage(failure=text)
        if status == WELL:
            return DistillationMessage()
        layout = PacketLayout.decode(json.loads(text))
        data = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._device)
        return DistillationMessage(tuple(layout.views(self._move(dist.irecv, data, peer, limit))))

    def _move(self, kind: Any, data: torch.Tensor, peer: int, limit: timedelta | None = None) -> torch.Tensor:
        data = data.to(self._device)
        try:
            if self._device.type == "cuda":  # NCCL: the stream waits, its watchdog has the timeout
                dist.batch_isend_irecv([dist.P2POp(kind, data, group=self._group, group_peer=peer)])[0].wait()
                return data
            start = self._group.send if kind is dist.isend else self._group.recv
            start([data], peer, _TAG).wait(min(self.timeout, limit or self.timeout))
            return data
        except Exception:
            self.broken = True
            raise


def as_tuple(outputs: Any, what: str) -> tuple[torch.Tensor, ...]:
    """The tensors of a request or an answer; TypeError for other objects, ValueError if one is not dense."""
    found = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs) if isinstance(outputs, Sequence) else ()
    if not found or not all(isinstance(each, torch.Tensor) for each in found):
        raise TypeError(f"{what} is {type(outputs).__name__}; give a tensor, or a tuple of tensors")
    for each in found:
        if each.layout != torch.strided:
            raise ValueError(f"{what} has a tensor of layout {each.layout}; give dense tensors, such as .to_dense()")
    return found
