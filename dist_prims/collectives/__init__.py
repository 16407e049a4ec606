"""Collectives that run a schedule over any ``torch.distributed`` group: gloo, NCCL, ``fake``, or your own.

    import dist_prims, torch
    dist_prims.init()
    gradient = torch.ones(1000)
    dist_prims.all_reduce(gradient)                                     # the cheapest algorithm for the size
    dist_prims.all_reduce(gradient, algorithm="ring")                   # this one
    work = dist_prims.all_reduce(gradient, async_op=True); work.wait()  # while something else is computed

All of them take, beside their own arguments:

- ``group``: the group to run in; the default group unless given.
- ``algorithm``: a name from ``dist_prims.schedules.algorithms(collective)``, your own included, with its parameters as
  further keywords; unless given, what ``DIST_PRIMS_<COLLECTIVE>`` says for the size (see :mod:`.choose`), or the
  cheapest by cost.
- ``async_op``: return at once with a Work to ``wait()`` for.
- ``segment_bytes``: cut messages into segments of this size, so that one is reduced while the next travels.

Ranks must agree in collective, operation, dtype, count, root, algorithm and order of calls; where they do not, all of
them raise MismatchError before any data is touched. What is wrong on one rank alone is a ValueError before anything is
sent. Half types add in float32 and round once a step. Non-contiguous tensors work, by way of a contiguous copy.
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
from .lane import Work

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
