"""vLLM on CPUs over this backend: ``VLLM_PLUGINS=dist_prims vllm serve MODEL --tensor-parallel-size 2``.

vLLM calls :func:`register` in each of its processes, by the entry point ``vllm.general_plugins``. Without the plugin
its workers create a group of gloo, and use vLLM's own shared memory instead for the collectives within a host.
"""

from __future__ import annotations

import os

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.platforms import current_platform

from ..backend_name import NAME

__all__: list[str] = []


class GroupCommunicator(CpuCommunicator):
    """Calls the collectives of torch.distributed, and none of vLLM's own."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False


def register() -> None:
    """Use this backend if ``VLLM_PLUGINS`` names it. If that variable is not set, vLLM calls every installed plugin."""
    if NAME in os.environ.get("VLLM_PLUGINS", "").split(",") and current_platform.is_cpu():
        use_backend(NAME)


def use_backend(backend: str) -> None:
    """Let the workers that this process starts, or is, create a group of a backend and use it for every collective."""
    platform = type(current_platform)
    platform.dist_backend = backend
    platform.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.{GroupCommunicator.__name__}")
