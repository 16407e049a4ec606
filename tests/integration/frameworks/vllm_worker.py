"""Workers for vLLM on CPUs whose tensor-parallel group runs over dist_prims or gloo: LLM(worker_cls=...).

vLLM's own worker creates a group of gloo, and bypasses it for collectives with a communicator in shared memory.
"""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker


class GroupCommunicator(CpuCommunicator):
    """Calls the collectives of torch.distributed."""

    def _all_group_ranks_share_shm_group_name(self):
        return False


class PrimsWorker(CPUWorker):
    backend = "dist_prims"

    def init_device(self):
        platform = type(current_platform)
        platform.dist_backend = self.backend
        platform.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.GroupCommunicator")
        super().init_device()


class GlooWorker(PrimsWorker):
    backend = "gloo"
