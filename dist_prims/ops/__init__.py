"""Collectives as operators for compiled graphs: functional, differentiable, with shapes known to the compiler.

``torch.distributed.all_reduce`` writes into its argument, returns a handle, and has no derivative. Each function here
returns a new tensor and is one registered operator of the namespace ``dist_prims``. A model that calls it compiles into
one graph (``fullgraph=True``), including the backward pass, can be exported, and runs over any group, on CPU and CUDA.

The derivative is that of the *sum of the losses of all ranks*. A loss that every rank computes from the result of an
``all_reduce`` therefore counts once for each rank. With ``op="avg"`` it counts once.

A derivative is itself a collective. On every rank the argument must require a gradient (for a broadcast also on ranks
other than the root), and every rank must do the backward pass through the result, if necessary by ``+ 0 * y.sum()``.
Where only some ranks do, they wait for the others until the timeout of the group.
"""

from .collectives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]
