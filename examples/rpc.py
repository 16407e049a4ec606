"""RPC next to the backend: an RRef, distributed autograd and optimizer, and DDP over dist_prims.

torch.distributed.rpc, unchanged, next to a group of dist_prims. Rank 0 holds an embedding that all ranks call; each
rank has a head, which DDP averages in the same backward. The ranks are on one host and use loopback.

    torchrun --nproc-per-node 2 rpc.py --steps 8
"""

import argparse
import logging
import os
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import dist_prims

WORDS, RATE = 12, 0.5
layers: list[torch.nn.Module] = []  # on rank 0: the layer that all ranks call


class SGD(torch.optim.SGD):
    """SGD as a subclass: torch would compile its own SGD as TorchScript, which takes seconds."""


def get_layer() -> torch.nn.Module:
    return layers[0]


def parameters(layer: Any) -> list[Any]:
    return [rpc.RRef(each) for each in layer.local_value().parameters()]


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, WORDS))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the successor of each."""
    words = torch.randint(WORDS, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))
    return words, (words + 1) % WORDS


def train(rank: int, steps: int) -> torch.Tensor:
    """Train the layer of rank 0 by distributed autograd and optimizer, and the head of every rank by DDP."""
    embedding, head = net()
    layers.append(embedding)
    dist.barrier()
    layer = rpc.remote("rank0", get_layer)
    shared = DistributedDataParallel(head)
    remote = rpc.rpc_sync("rank0", parameters, (layer,))
    share = RATE / dist.get_world_size()  # every rank steps the layer with its own gradient, one after the other
    logging.disable(logging.WARNING)  # DistributedOptimizer warns about an optimizer that is not TorchScript
    of_layer = DistributedOptimizer(SGD, remote, lr=share)
    of_head = DistributedOptimizer(SGD, [rpc.RRef(each) for each in head.parameters()], lr=RATE)
    for step in range(steps):
        with autograd.context() as context:
            words, labels = batch(step, rank)
            autograd.backward(context, [F.cross_entropy(shared(layer.rpc_sync().forward(words)), labels)])
            dist.barrier()  # all ranks have read the layer
            of_layer.step(context)
            of_head.step(context)
            dist.barrier()
    return parameters_to_vector([*(each.to_here() for each in remote), *head.parameters()]).detach()


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
        print(
            f"Remote embedding, DDP head: after {arguments.steps} steps the weights of one process within {error:.0e}"
        )


if __name__ == "__main__":
    main()
