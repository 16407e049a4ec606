"""Workers for vLLM on CPUs whose tensor-parallel group runs over a given backend: LLM(worker_cls=...).

They compare backends in one process. A program of a user takes the plugin, dist_prims.integrations.vllm.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from dist_prims.integrations.vllm import use_backend


class GlooWorker(CPUWorker):
    backend = "gloo"

    def init_device(self):
        use_backend(self.backend)
        super().init_device()


class PrimsWorker(GlooWorker):
    backend = "dist_prims"
