"""Random sequences of collectives and messages over the backend, some of which are under way at the same time.

All ranks draw the same calls from one seed. Results are those that ``values.Call`` computes on one rank.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzzing.steps import draw_call
from values import Call, content, equal

import dist_prims


def pass_on(group: Any, tag: int, count: int) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """Messages to the right and from the left: the works, the tensor that is received, and what it must be."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    left, tensor = (rank - 1) % size, torch.zeros(count, dtype=torch.int64)
    send = dist.isend(content(rank, count, tag), group=group, group_dst=(rank + 1) % size, tag=tag)
    return [send, dist.irecv(tensor, group=group, group_src=left, tag=tag)], tensor, content(left, count, tag)


def body(seed: int, calls: int) -> None:
    draw, own = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    all_but_last = list(range(dist.get_world_size() - 1))
    groups: list[Any] = [None, dist.new_group(), dist.new_group(all_but_last)]
    sizes = [len(all_but_last) + 1] * 2 + [len(all_but_last)]
    pending: list[tuple[Any, Any]] = []
    for number in range(calls):
        group, size = draw.choice(list(zip(groups, sizes, strict=True)))
        arguments, is_async, sends, settles = draw_call(draw, size), *(draw.random() < part for part in (0.5, 0.2, 0.2))
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        call = Call(**arguments, group=group)
        pending.append((call.start(is_async), call.check))
        if sends and size > 1:
            works, found, expected = pass_on(group, number % 7, arguments["count"])
            for work in works:
                work.wait()
            equal(found, expected, number)
        if settles:
            own.shuffle(pending)
            settle(pending)
    settle(pending)


def settle(pending: list[tuple[Any, Any]]) -> None:
    for work, check in pending:
        if work is not None:
            work.wait()
        check()
    pending.clear()


@pytest.mark.parametrize(
    ("size", "calls"), [(2, 150), (4, 150), *(pytest.param(size, 1000, marks=pytest.mark.slow) for size in (3, 7))]
)
@pytest.mark.timeout(900)
def test_random_calls(size: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_PRIMS_SLOT_BYTES", str(1 << 15))  # so that much is several segments
    dist_prims.spawn(body, size, (size, calls), backend="dist_prims", timeout=800)
