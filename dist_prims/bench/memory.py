"""How much memory a call takes beside its tensors: the peak of what torch has allocated, by torch's own profiler."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..schedules import build
from .cases import CASES, Buffers

__all__ = ["extra_chunks"]


def extra_chunks(collective: str, name: str, nbytes: int) -> float:
    """The most memory of any rank during one call, in chunks of its schedule."""
    case, size = CASES[collective], dist.get_world_size()
    shape = case.shape(nbytes // 4, size)
    buffers = Buffers(dist.get_rank(), size, *(torch.zeros(length) for length in shape))
    case.call(buffers, algorithm=name)  # plans are made and kept once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        case.call(buffers, algorithm=name)
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()  # less than zero when it is freed
            peak = max(peak, held)
    most = torch.tensor(float(peak))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most) / (nbytes / build(collective, name, size).chunks)
