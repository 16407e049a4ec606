"""Pipeline parallelism: a model cut into stages, and a plan of which rank computes which stage of which micro-batch.

    import dist_prims, torch
    from dist_prims.training.pipeline import Pipeline, split

    dist_prims.init("dist_prims")
    stages = split(model, torch.distributed.get_world_size(), sample=inputs[:4])
    pipeline = Pipeline(stages, "1f1b", loss=torch.nn.functional.cross_entropy, num_microbatches=8)
    optimizer = torch.optim.SGD(pipeline.parameters())  # of the stages of this rank
    loss = pipeline.step(inputs, targets)               # gradients are in .grad; the loss is the same on every rank

The plans are data (:mod:`dist_prims.schedules.pipelines`): proved before they are run, priced and drawn.
``docs/architecture.md`` has the files of the executor in the order in which a batch passes through them.
"""

from .chain import Chain, Pop, Stash
from .devices import DevicePipeline
from .processes import Pipeline
from .profile import LayerCost as LayerCost
from .profile import profile
from .profile import stage_costs as stage_costs
from .running_statistics import RunningStatistics
from .split_model import balance, split
from .transfer import StageFailedError

__all__ = [
    "Chain",
    "DevicePipeline",
    "Pipeline",
    "Pop",
    "RunningStatistics",
    "StageFailedError",
    "Stash",
    "balance",
    "profile",
    "split",
]
