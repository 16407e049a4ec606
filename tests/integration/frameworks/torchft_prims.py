"""A process group of torchft over dist_prims."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torchft.process_group import ProcessGroupWrapper


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
