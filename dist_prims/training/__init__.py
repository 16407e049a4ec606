"""Parts of a custom trainer: averaging of gradients, partitioning of data over ranks, pipelines of model stages.

The rest is imported from its own module: :mod:`.compression`, :mod:`.checkpoint`, :mod:`.mixed_precision`,
:mod:`.sharding`; :mod:`dist_prims.parallel` and :mod:`dist_prims.models`.
"""

from .average import average_gradients
from .data import Batches, ShardedIterable, ShardedSampler, partition_dataset
from .data.partition import DataPartitioner, Partition
from .gradients import GradientAverager
from .pipeline import DevicePipeline, Pipeline
from .pipeline.split_model import split
from .replicated_state import ReplicatedState

__all__ = [
    "Batches",
    "DataPartitioner",
    "DevicePipeline",
    "GradientAverager",
    "Partition",
    "Pipeline",
    "ReplicatedState",
    "ShardedIterable",
    "ShardedSampler",
    "average_gradients",
    "partition_dataset",
    "split",
]
