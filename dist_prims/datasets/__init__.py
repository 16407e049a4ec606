"""Small real data that travels with the package, so that an example trains without a download."""

from .digits import digits

__all__ = ["digits"]
