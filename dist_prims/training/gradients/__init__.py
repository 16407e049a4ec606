"""Gradients averaged while the backward pass still runs; see :mod:`.averager`."""

from .averager import GradientAverager
from .bucket import Bucket, Compressor

__all__ = ["Bucket", "Compressor", "GradientAverager"]
