"""Collectives that a compiled graph may hold: functional, differentiable, with shapes that the compiler knows.

``torch.distributed.all_reduce`` writes into its argument and returns a handle; it has no derivative. Each function here
returns a fresh tensor and is one registered operator of the namespace ``dist_prims``, so a model that calls it compiles
into one graph (``fullgraph=True``), backward included, exports, and runs over any group, on CPU and CUDA.

The derivative is that of the *sum of all ranks' losses*. So a loss that every rank computes alike from the result of an
``all_reduce`` counts once for each rank: with ``op="mean"`` it counts once.

A derivative is a collective, too: on every rank the argument must require a gradient (of a broadcast the placeholders
as well), and every rank must take the backward through the result, if only by ``+ 0 * y.sum()``. Where only some do,
they wait for the others until the group's timeout.
"""

from .collectives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]
