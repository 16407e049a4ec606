"""Lower limits of an all_reduce, and faster entry points of the backend, as further contenders.

``nothing``: torch's fake backend, which shows the cost of a call before any backend does work.
``memcpy``: every rank copies as many bytes at the same time, the cost of moving them at all.
``direct`` and ``zero_copy``: the backend "dist_prims" called without torch.distributed, and with shared tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..backend import empty
from ..collectives import all_reduce
from ..torch_compat import register_fake_backend
from .cases import Buffers
from .measure import Contender

__all__: list[str] = []


def limits(buffers: Buffers, nothing: dist.ProcessGroup) -> Mapping[str, Contender]:
    """The further contenders of an all_reduce; the default group must be of the backend "dist_prims"."""
    spare = torch.empty_like(buffers.input)
    shared = Buffers(buffers.rank, buffers.size, empty(len(buffers.input), buffers.input.dtype), buffers.output)
    return {
        "nothing": Contender(lambda b: dist.all_reduce(b.input, group=nothing), buffers, checked=False),
        "memcpy": Contender(lambda b: spare.copy_(b.input), buffers, checked=False),
        "direct": Contender(lambda b: all_reduce(b.input), buffers),
        "zero_copy": Contender(lambda b: all_reduce(b.input), shared),
    }


def fake_group() -> dist.ProcessGroup:
    """A group of torch's fake backend, which sends nothing."""
    register_fake_backend()
    group: dist.ProcessGroup = dist.new_group(backend="fake")
    return group
