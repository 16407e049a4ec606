"""Small real data sets that are part of the package, so that examples train without a download."""

from .digits import digits

__all__ = ["digits"]
