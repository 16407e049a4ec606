"""Checkpoints of a whole job: written so that one is always usable, read on any number of ranks."""

from .checkpoints import Checkpoints
from .shards import Padded
from .together import CheckpointError, Damaged

__all__ = ["CheckpointError", "Checkpoints", "Damaged", "Padded"]
