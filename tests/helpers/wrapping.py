"""What the tests of tags run on every rank of a group that spans hosts, over TCP, UCX and MPI.

So many messages of every kind that the numbers of segments go several times through their tags, while receives for the
next agreement and messages of users are pending.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from values import Call, equal, every_collective

from dist_prims.schedules import build
from dist_prims.schedules.program import RankSchedule

TAGS, SEGMENTS, ROUNDS = 1020, 130, 16


def backend() -> Any:
    world: Any = dist.group.WORLD
    return world._get_backend(torch.device("cpu"))


def go_round(largest: int) -> None:
    """``largest``: the largest tag of a message of a user."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert ROUNDS * SEGMENTS > 2 * TAGS
    schedule = build("all_reduce", "ring", size)
    pinned = RankSchedule.of(schedule, rank, "ring", SEGMENTS, 2048, 1 << 62)
    backend().pin("all_reduce", "ring", lambda root: [pinned])
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(ROUNDS):
        tag = largest - turn if turn % 2 else turn
        inbox = torch.zeros(100)
        pending: Any = dist.irecv(inbox, before, tag=tag)
        for count in (1, 300, 5000):  # with the agreement; two segments at most; as many as were asked for
            Call("all_reduce", count, salt=turn).run()
        every_collective(40)
        dist.send(torch.full((100,), float(turn + rank)), after, tag=tag)
        pending.wait()
        equal(inbox, torch.full((100,), float(turn + before)), turn)


def refuse(largest: int) -> str:
    """The error for a tag that the group has for itself."""
    for tag in (-1, largest + 1):
        try:
            dist.isend(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=tag)
        except ValueError as error:
            text = str(error)
            assert f"messages have tags from 0 to {largest}" in text, text
        else:
            raise AssertionError(f"tag {tag} is taken")
    return text
