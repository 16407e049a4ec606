"""What bounds the contenders, and shorter ways to the same result.

``nothing``: a backend of torch's that does nothing, so what a call costs before any backend has done anything.
``memcpy``: every rank copies as many bytes at once, which is what moving them at all costs.
``direct`` and ``zero_copy``: the backend "dist_prims" without torch.distributed in the way, and with tensors that the
ranks lend each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..backend import all_reduce_, empty
from .cases import Buffers
from .measure import Contender

__all__ = ["limits"]


def limits(buffers: Buffers, nothing: dist.ProcessGroup, ours: dist.ProcessGroup | None) -> Mapping[str, Contender]:
    """Contenders of an all_reduce beside those that every collective has. ``ours``: a group of "dist_prims"."""
    spare = torch.empty_like(buffers.input)
    found = {
        "nothing": Contender(lambda b: dist.all_reduce(b.input, group=nothing), buffers, checked=False),
        "memcpy": Contender(lambda b: spare.copy_(b.input), buffers, checked=False),
    }
    if ours is None:
        return found
    lent = Buffers(buffers.rank, buffers.size, empty(len(buffers.input), buffers.input.dtype), buffers.output)
    return found | {
        "direct": Contender(lambda b: all_reduce_(b.input, group=ours), buffers),
        "zero_copy": Contender(lambda b: all_reduce_(b.input, group=ours), lent),
    }


def doing_nothing() -> dist.ProcessGroup:
    """A group of torch's backend for tests that never sends anything."""
    from torch.testing._internal.distributed import fake_pg  # registers it

    assert fake_pg
    group: dist.ProcessGroup = dist.new_group(backend="fake")
    return group
