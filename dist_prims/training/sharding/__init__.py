"""Data parallelism without a copy of everything on every rank (Rajbhandari et al., ZeRO, 2020).

:class:`ZeroOptimizer` (stage 1) shards what the optimiser remembers, :class:`ShardedParameters` (stage 3) parameters
and gradients as well. Teaching twins of torch's ZeroRedundancyOptimizer and FullyShardedDataParallel: short enough to
read, and equal to the plain run.
"""

from .optimizer import ZeroOptimizer
from .parameters import ShardedParameters

__all__ = ["ShardedParameters", "ZeroOptimizer"]
