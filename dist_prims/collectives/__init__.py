"""Collectives for any ``torch.distributed`` group, by the algorithm that the caller names or the group's own.

    import dist_prims, torch
    dist_prims.init("dist_prims")
    gradient = torch.ones(1000)
    dist_prims.all_reduce(gradient)                                     # the group's own collective: the quickest
    dist_prims.all_reduce(gradient, algorithm="ring")                   # this schedule
    work = dist_prims.all_reduce(gradient, async_op=True); work.wait()  # while something else is computed

All of them take, beside their own arguments:

- ``group``: the group to run in; the default group unless given.
- ``algorithm``: a name from ``dist_prims.schedules.algorithms(collective)``, your own included, with its parameters as
  further keywords; or "cheapest", the one of the lowest price for the size, which on the backend dist_prims is its own
  collective. Unless given, it is what ``DIST_PRIMS_<COLLECTIVE>`` says for the size (see :mod:`.choose`), or the
  collective of the group's backend: of dist_prims, and of gloo if that has it (not for uneven blocks and some types and
  operations). Otherwise it is "cheapest".
- ``async_op``: return at once with a Work to ``wait()`` for.
- ``segment_bytes``: cut messages into segments of this size, so that one is reduced while the next travels. The backend
  dist_prims cuts by itself.

A named algorithm runs in C++ on the backend dist_prims (all_reduce, all_gather, reduce_scatter, broadcast, reduce), and
from Python over point-to-point messages elsewhere; the bits are the same.

Ranks must agree in collective, operation, dtype, count, root, algorithm and order of calls; where they do not, all of
them raise MismatchError before any data is touched. The exception is a call that gloo makes itself: it trusts that
ranks agree, and may hang or end the process. What is wrong on one rank alone is an error before anything is sent.
Half types add in float32 and round once a step. Non-contiguous tensors work, by way of a contiguous copy.
"""

from ..errors import MismatchError
from .api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
)
from .queue import Work

__all__ = [
    "MismatchError",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]
