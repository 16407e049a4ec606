"""Collectives for any ``torch.distributed`` group, by a named algorithm or by the backend of the group.

    import dist_prims, torch
    dist_prims.init("dist_prims")
    gradient = torch.ones(1000)
    dist_prims.all_reduce(gradient)                                     # by the group's backend: the fastest
    dist_prims.all_reduce(gradient, algorithm="ring")                   # by this algorithm
    work = dist_prims.all_reduce(gradient, async_op=True); work.wait()  # asynchronous

All collectives take these arguments in addition to their own:

- ``group``: the group; by default the default group.
- ``algorithm``: a name from ``dist_prims.schedules.algorithms(collective)``, which includes algorithms that the program
  registers. Its parameters follow in parentheses: "tree(degree=4)", "hierarchical(hosts=2,2,inner=direct)". A text with
  segments or ranges of sizes, as in the environment (see ``algorithm_choice``), has the same meaning. "cheapest" is the
  algorithm with the lowest cost for the size; on the backend dist_prims it is the backend's own collective. The default
  is, in this order:

  1. the algorithm in ``DIST_PRIMS_<COLLECTIVE>`` for the size (see ``algorithm_choice``); a group of the backend
     dist_prims reads the variable when it is made
  2. the collective of the group's backend: of dist_prims, or of gloo for a sum or mean by all_reduce, a broadcast and a
     barrier
  3. "cheapest"
- ``async_op``: return at once, with a ``torch.distributed.Work`` to ``wait()`` for; otherwise return None.
- ``segment_bytes``: cut messages into segments of this size, so that one is reduced while the next is being
  transferred. The default is not to cut. The backend dist_prims chooses segments itself.

A named algorithm runs in C++ on the backend dist_prims (all_reduce, all_gather, reduce_scatter, broadcast, reduce,
gather, scatter, all_to_all), and in Python over point-to-point messages on other backends. Both give the same bits.
In a group that spans hosts, a hierarchical algorithm groups the ranks by these hosts, unless the name gives ``hosts``.

Ranks must agree in collective, operation, dtype, count, root, algorithm, its steps and order of calls. If they differ,
all ranks raise MismatchError before any data is touched. The exception is a call of gloo's own collectives: gloo does
not compare the calls, and may hang or end the process. An invalid argument is an error on its rank before anything is
sent.

Additions of half types are done in float32 and rounded once per step. Non-contiguous tensors are copied.
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

__all__ = [
    "MismatchError",
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
