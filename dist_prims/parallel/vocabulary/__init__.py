"""Losses over a vocabulary split over ranks: each rank has the logits of its own columns, and no rank has all.

A language model's last layer is its widest: 8,192 tokens by 128 K words are 4 GB of logits in float32. If rank r
computes the columns of its own words only, a softmax needs only three or four numbers a row from each other rank.
"""

from .linear import linear_cross_entropy
from .losses import split_cross_entropy, split_log_softmax

__all__ = ["linear_cross_entropy", "split_cross_entropy", "split_log_softmax"]
