"""Per-sample gradients of a pool, as active learning asks for them: their norms, or themselves, over many ranks."""

from .gradients import PerSampleGradients
from .pool import PoolRows, over_pool

__all__ = ["PerSampleGradients", "PoolRows", "over_pool"]
