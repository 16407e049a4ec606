"""Data partitioned over ranks and workers: batches, samplers and streams that do not lose or repeat items."""

from .batches import Batches, partition_dataset
from .global_batches import GlobalBatches
from .iterable import ShardedIterable
from .permutation import Permutation
from .sampler import ShardedSampler

__all__ = ["Batches", "GlobalBatches", "Permutation", "ShardedIterable", "ShardedSampler", "partition_dataset"]
