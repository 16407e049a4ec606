"""RPC server: a parameter server that collects one gradient of each rank, steps once, and then answers all calls.

The calls are batched: with ``async_execution`` a call returns a future, so that no thread waits for the other ranks.
torch.distributed.rpc is unchanged, next to a group of dist_prims. The ranks are on one host and use loopback.

    torchrun --nproc-per-node 2 rpc_server.py --steps 8
"""

import argparse
import os
import tempfile
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dist_prims

WORDS, RATE = 12, 0.5


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, WORDS))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the successor of each."""
    words = torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))
    return words, (words + 1) % WORDS


class BatchServer:
    """Calls ``step`` of all ranks return the same parameters: those after one step with the mean of the gradients."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.lock, self.given, self.future = threading.Lock(), dict[int, Any](), torch.futures.Future[Any]()

    @staticmethod
    @rpc.functions.async_execution
    def step(server: Any, rank: int, gradients: list[torch.Tensor]) -> torch.futures.Future[Any]:
        self: BatchServer = server.local_value()
        with self.lock:
            self.given[rank], future = gradients, self.future
            if len(self.given) == dist.get_world_size():
                in_order = [self.given[each] for each in sorted(self.given)]
                for parameter, *each in zip(self.model.parameters(), *in_order, strict=True):
                    parameter.grad = torch.stack(each).mean(0)
                self.optimizer.step()
                self.given, self.future = {}, torch.futures.Future()
                future.set_result(parameters_to_vector(self.model.parameters()).detach())
        return future


servers: list[BatchServer] = []  # on rank 0: the server that all ranks call


def get_server() -> BatchServer:
    return servers[0]


def train(rank: int, steps: int) -> torch.Tensor:
    """Send the gradients of this rank to the server on rank 0, which answers with the parameters."""
    servers.append(BatchServer())
    dist.barrier()
    server, model = rpc.remote("rank0", get_server), net()
    for step in range(steps):
        words, labels = batch(step, rank)
        gradients = torch.autograd.grad(F.cross_entropy(model(words), labels), [*model.parameters()])
        weights = rpc.rpc_async("rank0", BatchServer.step, (server, rank, gradients)).wait()
        vector_to_parameters(weights, model.parameters())
    return parameters_to_vector(model.parameters()).detach()


def train_alone(steps: int) -> torch.Tensor:
    """The weights after training in one process on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        words, labels = zip(*(batch(step, rank) for rank in range(dist.get_world_size())), strict=True)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat(words)), torch.cat(labels)).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    warnings.simplefilter("ignore")  # torch's about its own groups
    os.environ.setdefault("TP_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])  # the interface that init() has chosen
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # the agents find each other through a file of rank 0
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folders[0]}/rendezvous", rpc_timeout=60)
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        weights = train(rank, arguments.steps)
        rpc.shutdown(timeout=60)
        dist.barrier()  # no rank reads the file after this
    error = float((weights - train_alone(arguments.steps)).abs().max())
    assert error <= 1e-5, f"the weights differ by {error:.0e} from those of one process"
    if rank == 0:
        print(f"Batched calls of a server: after {arguments.steps} steps the weights of one process within {error:.0e}")


if __name__ == "__main__":
    main()
