"""Inputs that overlap outputs: the result is that of separate tensors, on every placement (``overlapping.py``).

On one host the slot exchange wrote such outputs while it read the inputs, and the results were wrong without an error.
Between hosts they were right. Over gloo the results of a schedule were wrong too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from overlapping import check
from ranks import span

import dist_prims

DIRECT: dict[str, Any] = {"algorithm": "direct"}
PINNED: dict[str, Any] = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), "direct")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_one_host(size: int) -> None:
    def body() -> None:
        small_slots = dist.new_group(pg_options=dist_prims.BackendOptions(slot_bytes=1 << 14))
        check((0, 1, 5, 3000), small_slots)
        check((0, 1, 5, 3000), small_slots, **DIRECT)
        check((0, 1, 5), dist.new_group(pg_options=dist_prims.BackendOptions(**PINNED)))

    dist_prims.spawn(body, size, backend="dist_prims", timeout=100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ["a b", "a a b"])
def test_between_hosts(hosts: str) -> None:
    def body() -> None:
        check((0, 1, 5, 30_000))
        check((1, 5), **DIRECT)

    span(hosts, body, timeout=100)


@pytest.mark.slow
def test_over_gloo() -> None:
    """By gloo's own collectives, where a call names no algorithm, and by a schedule."""

    def body() -> None:
        check((0, 1, 5, 100_000))
        check((0, 1, 5, 1031), **DIRECT)
        check((5, 1031), **DIRECT, segment_bytes=64)

    dist_prims.spawn(body, 3, backend="gloo", timeout=100)
