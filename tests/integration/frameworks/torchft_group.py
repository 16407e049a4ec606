"""A process group of torchft over a backend; 3 replicas go on after one has died: torchft_group.py BACKEND."""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupGloo

from dist_prims.integrations.torchft import ProcessGroupPrims

TIMEOUT = timedelta(seconds=20)


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
