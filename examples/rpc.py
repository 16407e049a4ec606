"""RPC next to the backend: RRefs, distributed autograd, batched calls, and DDP.

torch.distributed.rpc, unchanged, next to a group of dist_prims. Rank 0 holds a layer that all ranks call, and a
parameter server that answers when all workers have called it. The ranks are on one host and use loopback.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from .._console import Console
from ._rpc import RATE, STEPS, agents, alone, batch, net

__all__: list[str] = []

_objects: dict[str, Any] = {}  # on rank 0: the objects that the other ranks call


def run(console: Console) -> None:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    if not rpc.is_available() or len(set(names)) > 1:
        return console.say("  skipped: requires torch with RPC, and all ranks on one host")
    rows = []
    with agents(console.rank):
        for name, train in (("remote layer, DDP head", _hybrid), ("batched calls of a server", _batched)):
            error = (parameters_to_vector(train(console.rank)) - parameters_to_vector(alone())).abs().max().item()
            console.check(error <= 1e-5, f"{name}: after {STEPS} steps the weights of one process, within 1e-5")
            rows.append((name, STEPS, f"{error:.0e}"))
        _objects.clear()
    return console.table(("over RPC", "steps", "error against one process"), rows)


def _hybrid(rank: int) -> list[torch.Tensor]:
    """Train a layer on rank 0 by distributed autograd and optimizer, and a head on every rank by DDP."""
    from torch.distributed import autograd
    from torch.distributed.optim import DistributedOptimizer

    logging.getLogger(DistributedOptimizer.__module__).setLevel(logging.ERROR)  # it warns about optimizers like _SGD
    embedding, head = net()
    _objects["layer"] = embedding
    dist.barrier()
    layer = rpc.remote("rank0", _object, ("layer",))
    shared = DistributedDataParallel(head)
    remote = rpc.rpc_sync("rank0", _parameters, (layer,))
    share = RATE / dist.get_world_size()  # every rank steps the layer with its own gradient, one after the other
    of_layer: Any = DistributedOptimizer(_SGD, remote, lr=share)  # type: ignore[no-untyped-call]
    own = [rpc.RRef(each) for each in head.parameters()]
    of_head: Any = DistributedOptimizer(_SGD, own, lr=RATE)  # type: ignore[no-untyped-call]
    for step in range(STEPS):
        with autograd.context() as context:
            words, labels = batch(step, rank)
            autograd.backward(context, [F.cross_entropy(shared(layer.rpc_sync().forward(words)), labels)])
            dist.barrier()  # all ranks have read the layer
            of_layer.step(context)
            of_head.step(context)
            dist.barrier()
    return [*(each.to_here() for each in remote), *head.parameters()]


class _SGD(torch.optim.SGD):
    """SGD as a subclass: torch would compile its own SGD as TorchScript, which takes seconds."""


class BatchServer:
    """A server that collects one gradient from each worker, steps once, and then answers all calls, which need no
    threads while they wait."""

    def __init__(self, workers: int) -> None:
        self.model, self.workers = net(), workers
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.lock, self.given, self.future = threading.Lock(), dict[int, Any](), torch.futures.Future[Any]()

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def step(server: Any, rank: int, gradients: list[torch.Tensor]) -> torch.futures.Future[Any]:
        self = server.local_value()
        with self.lock:
            self.given[rank], future = gradients, self.future
            if len(self.given) == self.workers:
                in_order = [self.given[each] for each in sorted(self.given)]
                for parameter, *each in zip(self.model.parameters(), *in_order, strict=True):
                    parameter.grad = torch.stack(each).mean(0)
                self.optimizer.step()
                self.given, self.future = {}, torch.futures.Future()
                future.set_result([each.detach().clone() for each in self.model.parameters()])
        return future  # type: ignore[no-any-return]


def _batched(rank: int) -> list[torch.Tensor]:
    _objects["server"] = BatchServer(dist.get_world_size())
    dist.barrier()
    server, model = rpc.remote("rank0", _object, ("server",)), net()
    for step in range(STEPS):
        words, labels = batch(step, rank)
        gradients = torch.autograd.grad(F.cross_entropy(model(words), labels), [*model.parameters()])
        values = rpc.rpc_async("rank0", BatchServer.step, (server, rank, gradients)).wait()
        torch.nn.utils.vector_to_parameters(parameters_to_vector(values), model.parameters())
    return [*model.parameters()]


def _object(name: str) -> Any:
    return _objects[name]


def _parameters(layer: Any) -> list[Any]:
    return [rpc.RRef(each) for each in layer.local_value().parameters()]
