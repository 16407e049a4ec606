"""Pipeline parallelism: a model cut into stages, and a plan of which rank computes which stage of which micro-batch.

    import dist_prims, torch
    from dist_prims.training.pipeline import Pipeline, split

    dist_prims.init("dist_prims")
    stages = split(model, torch.distributed.get_world_size(), sample=inputs[:4])
    pipeline = Pipeline(stages, "1f1b", loss=torch.nn.functional.cross_entropy, num_microbatches=8)
    loss = pipeline.step(inputs, targets)           # gradients are in .grad; the loss is the same on every rank

The plans are data (:mod:`dist_prims.schedules.pipelines`): proved before they are run, priced and drawn. The executor:

    action_executor.py      the work of each action, the share of its micro-batch in the loss, times
      loss_weights.py       loss and metrics: the weight of a micro-batch in the batch
      outside_gradients.py  gradients of the inputs and targets
      stage.py              one stage: forward, backward, and the tensors it keeps between them
      split_backward.py     the gradients of the weights apart from the gradient of the input
      running_statistics.py batch norm: updated once a batch
      averaging.py          data parallel on top: the gradients of a stage averaged once a step
    processes.py            stages in processes: Pipeline           transfer.py, packet.py    their messages
      given_stages.py       the stages of a rank, and what ranks compare
      shared_tensors.py     tensors of which several ranks have copies
    devices.py              stages on devices of one process: DevicePipeline
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
