"""Losses over a vocabulary that is split over ranks: each holds the logits of its own columns, and nobody holds all.

A language model's last layer is its widest: 8,192 tokens by 128 K words are 4 GB of logits in float32. If rank r
computes the columns of its own words only, a softmax needs of the others no more than three or four numbers a row.
"""

from .linear import linear_cross_entropy
from .losses import split_cross_entropy, split_log_softmax

__all__ = ["linear_cross_entropy", "split_cross_entropy", "split_log_softmax"]
