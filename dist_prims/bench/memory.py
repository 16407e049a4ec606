"""The memory that a call needs besides its tensors: the peak of torch's allocations, from torch's profiler.

The resident size of the process would be misleading: memory that a call frees stays with the process, so only the first
call would seem to need any. Allocations of the backend outside torch are not counted.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..schedules import build
from .cases import CASES, Buffers

__all__: list[str] = []


def chunk_bytes(collective: str, name: str, nbytes: int) -> float:
    """The size of one chunk of an algorithm for data of ``nbytes``. 0 counts as 1, so it can be a divisor."""
    return max(nbytes, 1) / build(collective, name, dist.get_world_size()).chunks


def extra_bytes(collective: str, name: str, nbytes: int, dtype: torch.dtype = torch.float32) -> int:
    """The largest additional memory of any rank during one call."""
    case, size = CASES[collective], dist.get_world_size()
    shape = case.shape(nbytes // dtype.itemsize, size)
    buffers = Buffers(dist.get_rank(), size, *(torch.zeros(length, dtype=dtype) for length in shape))
    case.call(buffers, algorithm=name)  # the first call builds and caches the schedule
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        case.call(buffers, algorithm=name)
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # negative for a free
            peak = max(peak, held)
    most = torch.tensor(peak)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
