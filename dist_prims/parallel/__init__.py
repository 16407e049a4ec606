"""Layers whose tensors are split over the ranks: attention over a split sequence, losses over a split vocabulary."""

from .sequence import join_sequence, ring_attention, sequence_positions, split_sequence, ulysses_attention
from .vocabulary import linear_cross_entropy, split_cross_entropy, split_log_softmax

__all__ = [
    "join_sequence",
    "linear_cross_entropy",
    "ring_attention",
    "sequence_positions",
    "split_cross_entropy",
    "split_log_softmax",
    "split_sequence",
    "ulysses_attention",
]
