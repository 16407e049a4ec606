"""ZeRO-3 (Rajbhandari et al., ZeRO, 2020): no rank has a copy of all parameters, gradients and optimizer states."""

from .parameters import ShardedParameters

__all__ = ["ShardedParameters"]
