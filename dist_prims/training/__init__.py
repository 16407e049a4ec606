"""What a custom trainer imports: gradients averaged over the ranks, data parted among them, models cut into pipelines.

Compressors of gradients are in :mod:`.compression`, tar archives in :mod:`.data`, ResNets in :mod:`.resnet`. What not
every trainer needs is imported from its own module: :mod:`.attention`, :mod:`.checkpoint`, :mod:`.distillation`,
:mod:`.elastic`, :mod:`.ensemble`, :mod:`.mixed_precision`, :mod:`.parameter_server`, :mod:`.per_sample`,
:mod:`.vocabulary`, :mod:`.zero`.
"""

from .average import average_gradients
from .data import Batches, ShardedIterable, ShardedSampler, partition_dataset
from .gradients import GradientAverager
from .local_sgd import LocalSGD
from .partition import DataPartitioner, Partition
from .pipeline import DevicePipeline, Pipeline
from .pipeline.split import split

__all__ = [
    "Batches",
    "DataPartitioner",
    "DevicePipeline",
    "GradientAverager",
    "LocalSGD",
    "Partition",
    "Pipeline",
    "ShardedIterable",
    "ShardedSampler",
    "average_gradients",
    "partition_dataset",
    "split",
]
