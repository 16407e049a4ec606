"""Attention over a sequence that is split among the ranks.

``ring_attention`` passes keys and values round a ring; ``ulysses_attention`` splits heads instead of tokens.
Both are exact, forward and backward, and take the parts of ``split_sequence``.
"""

from .ring import ring_attention
from .split import join_sequence, sequence_positions, split_sequence
from .ulysses import ulysses_attention

__all__ = ["join_sequence", "ring_attention", "sequence_positions", "split_sequence", "ulysses_attention"]
