"""Collectives of Ray between actors, over its backend for torch.distributed: ray_actors.py. Prints the results.

Ray's backend "gloo" makes a group of torch's gloo, which DIST_PRIMS_AS=gloo replaces in every process of Ray.
"""

import json

import numpy
import ray
import torch
import torch.distributed as dist
from ray.util import collective

SIZE = 2


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, rank):
        self.rank = rank
        collective.init_collective_group(SIZE, rank, backend="gloo", group_name="default")

    def run(self):
        total = torch.full((1000,), self.rank + 1.0)
        collective.allreduce(total)
        largest = numpy.array([self.rank, 7 - self.rank])  # Ray takes arrays of NumPy as well
        collective.allreduce(largest, op=collective.types.ReduceOp.MAX)
        gathered = [torch.zeros(1) for _ in range(SIZE)]
        collective.allgather(gathered, torch.full((1,), float(self.rank)))
        part = torch.zeros(3)
        collective.reducescatter(part, [torch.full((3,), float(self.rank + piece)) for piece in range(SIZE)])
        first = torch.full((2,), float(self.rank))
        collective.broadcast(first, src_rank=1)
        message = torch.full((2,), float(self.rank))
        if self.rank == 0:
            collective.send(message, 1)
        else:
            collective.recv(message, 0)
        collective.barrier()
        return {
            "all_reduce": total[-1].item(),
            "largest": largest.tolist(),
            "all_gather": [each.item() for each in gathered],
            "reduce_scatter": part.tolist(),
            "broadcast": first.tolist(),
            "message": message.tolist(),
        }

    def backend(self):
        return type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__


ray.init(num_cpus=SIZE, include_dashboard=False, log_to_driver=False)
actors = [Actor.remote(rank) for rank in range(SIZE)]
results = dict(enumerate(ray.get([actor.run.remote() for actor in actors], timeout=60)))
print(json.dumps({"backend": ray.get(actors[0].backend.remote(), timeout=60), **results}))
ray.shutdown()
