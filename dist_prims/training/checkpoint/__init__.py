"""Checkpoints of a whole job: written so that one is always usable, read on any number of ranks."""

from .all_or_none import CheckpointError, Damaged
from .checkpoints import Checkpoints
from .shards import Padded

__all__ = ["CheckpointError", "Checkpoints", "Damaged", "Padded"]
