"""A process group of torchft over a backend; 3 replicas go on after one has died: torchft_group.py BACKEND."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper

TIMEOUT = timedelta(seconds=20)


class ProcessGroupPrims(ProcessGroupWrapper):
    def getBackendName(self):
        return "torchft-dist_prims"

    def _create_pg(self, store, rank, world_size):
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout, options.group_id = self._timeout, f"quorum {self._quorum_id}"
        backend = dist.Backend._plugins["DIST_PRIMS"].creator_fn(options, None)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group


def total(group, value):
    tensor = torch.full((1000,), float(value))
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    group.allreduce([tensor], options).wait()
    return tensor[-1].item()


replica = int(os.environ["RANK"])
store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/torchft"
group = {"gloo": ProcessGroupGloo, "dist_prims": ProcessGroupPrims}[sys.argv[1]](timeout=TIMEOUT)
results = {"name": group.getBackendName()}
group.configure(f"{store}/1", f"replica{replica}", rank=replica, world_size=3, quorum_id=1)
results["3 replicas"] = total(group, replica + 1)
if replica == 2:
    os._exit(0)
try:
    total(group, replica + 1)
except RuntimeError as error:
    results["error"] = type(error).__name__
# The replicas that are left form the next quorum, in another order.
group.configure(f"{store}/2", f"replica{replica}", rank=1 - replica, world_size=2, quorum_id=2)
results["2 replicas"] = total(group, replica + 1)
if replica == 0:
    print(json.dumps(results))
group.shutdown()
