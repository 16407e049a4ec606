"""Helpers of the recipe ``rpc``: start and stop of the agents, the single-process reference, a model and data."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn import functional as F

from ..launch.network import loopback_interface

__all__: list[str] = []

STEPS, RATE = 8, 0.5
_SECONDS, _WORDS = 60.0, 12
_INTERFACE = "TP_SOCKET_IFNAME"  # read by TensorPipe


@contextlib.contextmanager
def agents(rank: int) -> Iterator[None]:
    """RPC agents of all ranks: they find each other through a file, shut down together, and remove the file."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        if _INTERFACE not in os.environ:
            os.environ[_INTERFACE] = loopback_interface() or "lo"
            stack.callback(os.environ.pop, _INTERFACE)
        warnings.simplefilter("ignore")  # torch's warnings about its own groups
        box = [stack.enter_context(tempfile.TemporaryDirectory()) if rank == 0 else ""]
        dist.broadcast_object_list(box, src=0)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{box[0]}/meeting", rpc_timeout=_SECONDS)
        size = dist.get_world_size()
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
        graceful = False
        try:
            yield
            graceful = True
        finally:
            rpc.shutdown(graceful, timeout=_SECONDS)
        dist.barrier()  # no rank reads the file after this


def alone() -> list[torch.Tensor]:
    """The weights after training in one process on the batches of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        words, labels = zip(*(batch(step, rank) for rank in range(dist.get_world_size())), strict=True)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat(words)), torch.cat(labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [*model.parameters()]


def net() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(_WORDS, 16), torch.nn.Linear(16, _WORDS))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the successor of each."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(_WORDS, (16,), generator=draw)
    return words, (words + 1) % _WORDS
