"""Ranks with NCCL, on one GPU or on several, and the reason where that is not possible."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

import dist_prims
from dist_prims.torch_compat import nccl_version

SHARED_GPU = (2, 30)  # the first NCCL that lets two ranks use one GPU


def why_not() -> str:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not dist.is_nccl_available():
        return "torch has no NCCL"
    if torch.cuda.device_count() == 1 and nccl_version() < SHARED_GPU:
        return f"one GPU, and NCCL {nccl_version()} refuses two ranks on it"
    return ""


REASON = why_not()


def device() -> torch.device:
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def on_two_ranks(body: Callable[[], None]) -> None:
    on_ranks(2, body)


def on_ranks(count: int, body: Callable[[], None], backend: str = "cpu:gloo,cuda:nccl") -> None:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    rank = functools.partial(with_nccl, body, backend)
    dist_prims.spawn(rank, count, init=False, start_method="spawn", timeout=100)


def with_nccl(body: Callable[[], None], backend: str) -> None:
    dist_prims.init(backend)
    torch.cuda.set_device(device())
    body()
