"""Gradients averaged while the backward pass still runs; see ``averager``."""

from ..compression.compressor import Bucket, Compressor
from .averager import GradientAverager

__all__ = ["Bucket", "Compressor", "GradientAverager"]
