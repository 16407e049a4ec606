"""Checkpoints of a whole job: crash-safe, and readable on any number of ranks."""

from .all_or_none import CheckpointError, DamagedCheckpointError
from .checkpoints import Checkpoints
from .shards import Padded

__all__ = ["CheckpointError", "Checkpoints", "DamagedCheckpointError", "Padded"]
