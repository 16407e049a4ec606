"""What a custom trainer imports: gradients averaged over the ranks, data parted among them."""

from .average import average_gradients
from .partition import DataPartitioner, Partition

__all__ = ["DataPartitioner", "Partition", "average_gradients"]
