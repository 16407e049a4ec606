"""Layers whose tensors are split over the ranks: attention over a split sequence."""

from .sequence import join_sequence, ring_attention, sequence_positions, split_sequence, ulysses_attention

__all__ = ["join_sequence", "ring_attention", "sequence_positions", "split_sequence", "ulysses_attention"]
