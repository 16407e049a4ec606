"""How much memory a call takes beside its tensors: the peak of what torch has allocated, by torch's own profiler.

The resident size of the process would say less: what a call has freed stays with the process, so only the first call
would seem to take any. What the engine allocates without torch is not in it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..schedules import build
from .cases import CASES, Buffers

__all__ = ["chunk_bytes", "extra_bytes"]


def chunk_bytes(collective: str, name: str, nbytes: int) -> float:
    """What one chunk of an algorithm is of ``nbytes``; 1 where there is no data."""
    return max(nbytes, 1) / build(collective, name, dist.get_world_size()).chunks


def extra_bytes(collective: str, name: str, nbytes: int, dtype: torch.dtype = torch.float32) -> int:
    """The most memory of any rank during one call."""
    case, size = CASES[collective], dist.get_world_size()
    shape = case.shape(nbytes // dtype.itemsize, size)
    buffers = Buffers(dist.get_rank(), size, *(torch.zeros(length, dtype=dtype) for length in shape))
    case.call(buffers, algorithm=name)  # plans are made and kept once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        case.call(buffers, algorithm=name)
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # less than zero when it is freed
            peak = max(peak, held)
    most = torch.tensor(peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
