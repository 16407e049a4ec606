"""Per-sample gradients of a pool, as in active learning: norms or gradients, computed on all ranks."""

from .gradients import PerSampleGradients
from .pool import PoolRows, over_pool

__all__ = ["PerSampleGradients", "PoolRows", "over_pool"]
