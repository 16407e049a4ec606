"""Data parallelism without a copy of everything on every rank (Rajbhandari et al., ZeRO, 2020).

:class:`ZeroOptimizer` (stage 1) shards the state of the optimizer, :class:`ShardedParameters` (stage 3) parameters and
gradients as well. They are short counterparts of torch's ZeroRedundancyOptimizer and FullyShardedDataParallel, with the
results of an unsharded run.
"""

from .optimizer import ZeroOptimizer
from .parameters import ShardedParameters

__all__ = ["ShardedParameters", "ZeroOptimizer"]
