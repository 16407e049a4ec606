"""Comparison of the calls of all ranks before data is touched: if two ranks differ, all ranks raise MismatchError.

Backends do not compare calls: gloo adds float32 to int32, or aborts the process when a message is longer than the
posted receive. Each collective therefore begins with a *header* of fixed size that describes the call of the rank. The
header contains the arguments instead of a hash, so that the error can show both calls. A header as bytes is *packed*.

Headers spread by dissemination. In round k = 0, 1, ... rank r sends its known headers to ranks r + 4^k, r + 2 * 4^k and
r + 3 * 4^k, so that after ceil(log4 n) rounds every rank knows about all ranks. Two headers are sufficient to prove a
difference, and one if there is none. A message therefore contains the header of the lowest rank and the first header
that differs from it.
"""

from __future__ import annotations

import re
import struct
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..agreement import fit
from ..errors import MismatchError
from ..schedules.trust import without_fingerprint
from .channel import Channel, Pending, Transfer

__all__: list[str] = []

_LAYOUT = struct.Struct("<q16s16s16sqqq40s64s8s")  # the fields of CallHeader
_SLOT = struct.Struct(f"<q{_LAYOUT.size}s")
NO_RANK = -1
_RADIX = 4  # of the dissemination: on busy cores a round costs more than a message


@dataclass(frozen=True)
class CallHeader:
    """The call that a rank is about to make.

    ``sequence`` is the number of the call in its group, and ``count`` the number of elements. ``root`` is -1 without a
    root. ``layout`` is a checksum of the counts where every rank must give the same list of counts, else 0. Texts are
    empty where the call has none. :meth:`pack` shortens texts that are too long.
    """

    sequence: int
    collective: str
    op: str
    dtype: str
    count: int
    root: int
    layout: int
    algorithm: str
    parameters: str
    segment: str

    def pack(self) -> bytes:
        widths = (int(width) for width in re.findall(r"(\d+)s", _LAYOUT.format))
        values = (fit(value, next(widths)) if isinstance(value, str) else value for value in astuple(self))
        return _LAYOUT.pack(*values)

    @staticmethod
    def unpack(data: bytes) -> CallHeader:
        values = _LAYOUT.unpack(data)
        fields: list[Any] = [v.rstrip(b"\0").decode(errors="replace") if isinstance(v, bytes) else v for v in values]
        return CallHeader(*fields)

    def __str__(self) -> str:
        words = [self.op, self.dtype, f"{self.count} elements", f"algorithm {self.algorithm}"]
        words += [f"root {self.root}"] * (self.root >= 0) + [self.parameters] * bool(self.parameters)
        words += [f"segments of {self.segment} bytes"] * (self.segment not in ("", "0"))
        words += [f"layout {self.layout:08x}"] * bool(self.layout)
        return f"{self.collective}({', '.join(word for word in words if word)}) as call number {self.sequence}"


Known = tuple[tuple[int, bytes], ...]  # at most two (rank, packed header), the packed headers different


def _merge(mine: Known, other: Known) -> Known:
    """Return the header of the lowest rank, and the first header by rank that differs from it."""
    lowest, *others = sorted({*mine, *other})
    return (lowest, *[slot for slot in others if slot[1] != lowest[1]][:1])


def _encode(known: Known) -> torch.Tensor:
    """Return a message: two slots of a rank and its packed header; the second slot may be empty."""
    padded = [*known, (NO_RANK, b"")][:2]
    return torch.frombuffer(bytearray(b"".join(_SLOT.pack(*slot) for slot in padded)), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Known:
    slots = list(_SLOT.iter_unpack(bytes(data.cpu().numpy())))
    return tuple((rank, packed) for rank, packed in slots if rank != NO_RANK)


def agree_on_call(channel: Channel, group: dist.ProcessGroup, header: CallHeader, device: torch.device) -> None:
    """Return when all ranks make the same call; raise MismatchError on every rank if two calls differ.

    Args:
        channel: carries the headers.
        group: the ranks.
        header: the call of this rank.
        device: of the messages: a device for which the group has a backend.
    """
    rank, size = group.rank(), group.size()
    known: Known = ((rank, header.pack()),)
    pending: list[Pending] = []
    # 1. Rounds: before the one at this distance, the rank knows of itself and the distance - 1 ranks before it.
    distance = 1
    while distance < size:
        hops = [hop * distance for hop in range(1, _RADIX) if hop * distance < size]
        sent = _encode(known).to(device)
        # Not empty: torch's backend "fake" transfers nothing, so each of its ranks must find its own header here.
        received = [sent.clone() for _ in hops]
        outgoing, incoming = channel.start(
            [Transfer((rank + hop) % size, sent) for hop in hops],
            [Transfer((rank - hop) % size, data) for hop, data in zip(hops, received, strict=True)],
        )
        pending += outgoing
        channel.wait(incoming)
        for data in received:
            known = _merge(known, _decode(data))
        distance *= _RADIX
    channel.wait(pending)
    # 2. All ranks know the same headers now.
    if len(known) > 1:
        (lowest, packed), (other, packed_other) = known
        first, second = CallHeader.unpack(packed), CallHeader.unpack(packed_other)
        raise MismatchError(
            f"rank {rank}: ranks disagree, no data was touched. Rank {lowest} calls {first}; rank {other} "
            f"calls {second}. {_remedy(first, second)}"
        )


def _remedy(first: CallHeader, second: CallHeader) -> str:
    name, other = first.algorithm, second.algorithm
    if name != other and without_fingerprint(name) == without_fingerprint(other):
        return (
            "The ranks have registered different steps under this name, as the fingerprints after the # show; register "
            "the same function on every rank"
        )
    return "Every rank of a group must make the same calls in the same order with the same arguments"
