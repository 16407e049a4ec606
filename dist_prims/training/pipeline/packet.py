"""Wire format of a message of tensors: a head of fixed size, then their bytes, aligned.

A stage sends one message a micro-batch, for any number of tensors, and the receiver copies nothing: its tensors are
views of the message. The head says whether the message has data or an error text. So a failure travels like the data,
and no rank waits for data that will not come. Both sides know the layout of the bytes beforehand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...torch_compat import storage_users

__all__: list[str] = []

HEAD = 512
WELL, FAILED, LAYOUT, CALL = range(4)  # status in the head: data; an error text; the length of a layout; a call
_ALIGNED = 64
_WORD = 8  # bytes of the status, before the text


class TensorSpec(NamedTuple):
    """One tensor of a message. ``needs_grad``: a gradient for it is to come back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    needs_grad: bool

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' with gradient' if self.needs_grad else ''}"
        )


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor. If the tensor has no gaps, its strides are kept, so channels-last stays channels-last.

    >>> str(spec_of(torch.ones(2, 3)))
    'float32[2, 3]'
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"a stage gives a tensor of layout {tensor.layout}; stages pass dense tensors: .to_dense()")
    stride = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    return TensorSpec(tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.requires_grad)


class PacketLayout:
    """Where the tensors of a message lie in it."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PacketLayout) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.specs))})"

    @cached_property
    def gradients(self) -> PacketLayout:
        """The layout of the gradients that come back."""
        return PacketLayout(spec._replace(needs_grad=False) for spec in self.specs if spec.needs_grad)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """First byte and end of every tensor."""
        spans, end = [], HEAD
        for spec in self.specs:
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + math.prod(spec.shape) * spec.dtype.itemsize
            spans.append((begin, end))
        return spans

    @property
    def nbytes(self) -> int:
        return self._spans[-1][1] if self._spans else HEAD

    def views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that lie in a message."""
        parts = [data[begin:end] for begin, end in self._spans]
        return [
            part.view(spec.dtype).as_strided(spec.shape, spec.stride)
            for part, spec in zip(parts, self.specs, strict=True)
        ]

    def encode(self) -> bytes:
        """The layout as JSON, for a receiver that does not know it yet."""
        return json.dumps([(str(spec.dtype).removeprefix("torch."), *spec[1:]) for spec in self.specs]).encode()

    @classmethod
    def decode(cls, data: bytes) -> PacketLayout:
        """The layout from the bytes that :meth:`encode` returned."""
        rows = json.loads(data)
        return cls(
            TensorSpec(getattr(torch, dtype), tuple(shape), tuple(stride), grad) for dtype, shape, stride, grad in rows
        )


class Packet(NamedTuple):
    """The memory of a message, and views of its parts."""

    data: torch.Tensor
    status: torch.Tensor
    tensors: list[torch.Tensor]

    @classmethod
    def empty(cls, layout: PacketLayout, device: torch.device) -> Packet:
        """A packet with any content."""
        data = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        return cls(data, data[:_WORD].view(torch.int64), layout.views(data))

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors, and the status of a message with data."""
        self.status.zero_()
        for view, tensor in zip(self.tensors, tensors, strict=True):
            view.copy_(tensor.detach())


def head_of(status: int, text: str = "") -> torch.Tensor:
    """The head of a message, with a text.

    >>> read_head(head_of(FAILED, "no input"))
    (1, 'no input')
    """
    data = status.to_bytes(_WORD, "little") + text.encode()[: HEAD - _WORD]
    return torch.frombuffer(bytearray(data.ljust(HEAD, b"\0")), dtype=torch.uint8)


def read_head(data: torch.Tensor) -> tuple[int, str]:
    """Status and text; a message with data has no meaningful text."""
    head = bytes(data[:HEAD].cpu().numpy())
    status = int.from_bytes(head[:_WORD], "little")
    return status, head[_WORD:].rstrip(b"\0").decode(errors="replace") if status else ""


class Pool:
    """A pool of packets, reused when nothing refers to their memory: no tensor, no graph, no transfer.

    A tensor in a message may live long, in a graph or with a user, so no caller can report when a packet is free. The
    pool reads the reference count of the storage instead, so the ``data`` of a packet from here is a tensor of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[TensorSpec, ...], list[tuple[Packet, Any, int]]] = {}

    def take(self, layout: PacketLayout) -> Packet:
        """An unused packet, with any content."""
        kept = self._kept.setdefault(layout.specs, [])
        for packet, storage, idle in kept:
            if storage_users(storage) == idle:
                return Packet(packet.data.detach(), packet.status, packet.tensors)
        with torch.inference_mode(False):  # the packet outlives the caller's mode
            packet = Packet.empty(layout, self._device)
        storage = packet.data.untyped_storage()
        kept.append((packet, storage, storage_users(storage)))
        return self.take(layout)

    def clear(self) -> None:
        self._kept.clear()
