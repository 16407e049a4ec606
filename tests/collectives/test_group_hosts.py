"""A hierarchical algorithm that a call names groups the ranks by the hosts of the group.

It grouped them by number, and on 2 hosts of 3 ranks "within a host" crossed hosts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import span

import dist_prims
from dist_prims.collectives import group_hosts
from dist_prims.errors import MismatchError
from dist_prims.schedules import COLLECTIVES, algorithms, build
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.host_order import HostOrder

CHUNK = 16  # elements


def on_hosts(backend: str, layout: str, body: Callable[..., Any], *args: Any) -> None:
    """Run ``body`` on a rank for each letter, which names its host, in a group of the backend."""
    names = layout.split()

    def rank_main() -> None:
        os.environ["DIST_PRIMS_HOST_ID"] = names[dist.get_rank()]
        body(*args)

    if backend == "dist_prims":
        span(layout, body, *args)
    else:
        dist_prims.spawn(rank_main, len(names), backend=backend, timeout=60)


def is_sum_in_order_of(hosts: HostOrder | tuple[int, ...], call: Callable[[torch.Tensor], Any], **inner: str) -> bool:
    """Whether an all_reduce adds in the order of the hierarchical algorithm for these hosts, to the last bit."""
    size = dist.get_world_size()
    if isinstance(hosts, HostOrder):
        schedule = hosts.build("all_reduce", "hierarchical", **inner)
    else:
        schedule = build("all_reduce", "hierarchical", size, hosts=hosts, **inner)
    every: Any = np.random.default_rng(5).uniform(-1e8, 1e8, (size, schedule.chunks, CHUNK)).astype(np.float32)
    tensor = torch.from_numpy(every[dist.get_rank()].reshape(-1).copy())
    call(tensor)
    sums = [schedule.order(chunk).evaluate(every[:, chunk]) for chunk in range(schedule.chunks)]
    return np.concatenate(sums).tobytes() == tensor.numpy().tobytes()


def by_name(tensor: torch.Tensor, parameters: str = "") -> None:
    dist_prims.all_reduce(tensor, algorithm=f"hierarchical{parameters}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *(("gloo", "a b a b b a"), ("dist_prims", "a b b")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gloo", "a b b"), ("dist_prims", "a b a b b a"), ("dist_prims", "a a a b b b"))
        ),
    ],
)
def test_an_all_reduce_adds_within_the_hosts_first(backend: str, layout: str) -> None:
    order = HostOrder.of(layout.split())

    def rank_main() -> None:
        assert is_sum_in_order_of(order, by_name)
        assert is_sum_in_order_of(order, lambda tensor: by_name(tensor, "(inner=direct)"), inner="direct")
        size = dist.get_world_size()
        assert is_sum_in_order_of((1, size - 1), lambda tensor: by_name(tensor, f"(hosts=1,{size - 1})")), "given hosts"
        os.environ["DIST_PRIMS_ALL_REDUCE"] = "hierarchical(inner=direct)"
        group = dist.new_group()
        assert is_sum_in_order_of(order, lambda tensor: dist_prims.all_reduce(tensor, group=group), inner="direct")

    on_hosts(backend, layout, rank_main)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_all_collectives_are_right_where_ranks_of_a_host_are_not_consecutive(backend: str) -> None:
    def rank_main() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        blocks = torch.arange(size) + 10 * rank
        for root in range(size):
            sent = torch.full((5,), rank)
            dist_prims.broadcast(sent, root, algorithm="hierarchical")
            assert sent.eq(root).all()
            found = blocks.clone()
            dist_prims.reduce(found, root, algorithm="hierarchical")
            assert rank != root or found.equal(size * torch.arange(size) + 60)
            every, own = torch.empty(size, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
            listed = [*every.split(1)] if rank == root else None
            dist_prims.gather(torch.tensor([rank]), listed, root, algorithm="hierarchical")
            assert rank != root or every.tolist() == [*range(size)]
            dist_prims.scatter(own, [*blocks.split(1)] if rank == root else None, root, algorithm="hierarchical")
            assert own.item() == rank + 10 * root
        dist_prims.all_gather(every, torch.tensor([rank]), algorithm="hierarchical")
        assert every.tolist() == [*range(size)]
        dist_prims.reduce_scatter(own, blocks, algorithm="hierarchical")
        assert own.item() == size * rank + 60
        dist_prims.all_to_all(every, blocks, algorithm="hierarchical")
        assert every.tolist() == [10 * other + rank for other in range(size)]
        dist_prims.barrier(algorithm="hierarchical")

    on_hosts(backend, "a b b a", rank_main)


def test_hosts_are_exchanged_once_and_compared_before() -> None:
    """The first calls of a group may be asynchronous, and ranks may differ in them."""

    def rank_main() -> None:
        with pytest.raises(MismatchError, match=r"algorithm hierarchical.*algorithm ring"):
            dist_prims.all_reduce(torch.ones(4), algorithm="ring" if dist.get_rank() == 1 else "hierarchical")
        assert group_hosts.known_hosts(dist.group.WORLD) is None
        tensors = [torch.ones(4) for _ in range(3)]
        works = [dist_prims.all_reduce(tensor, algorithm="hierarchical", async_op=True) for tensor in tensors]
        assert all(work.wait() for work in works)
        assert all(tensor.eq(4).all() for tensor in tensors)
        assert group_hosts.known_hosts(dist.group.WORLD) == HostOrder((0, 2, 1, 3), (2, 2))
        sub = dist.new_group([1, 2, 3])
        if dist.get_rank() > 0:
            dist_prims.all_reduce(tensors[0], algorithm="hierarchical", group=sub)
            assert tensors[0].eq(12).all()
            assert group_hosts.known_hosts(sub) == HostOrder((0, 2, 1), (2, 1))

    on_hosts("gloo", "a b a b", rank_main)


def in_turn(call: Callable[[], Any]) -> list[Any]:
    """Make two asynchronous calls; on rank 0 the second one before the hosts are exchanged, on the others after it.

    The results are the errors, or None.
    """
    works: list[Any] = []
    errors: list[Any] = []

    def wait() -> None:
        try:
            works.pop(0).wait()
            errors.append(None)
        except ValueError as error:
            errors.append(error)

    works.append(call())
    if dist.get_rank() != 0:
        wait()
    works.append(call())
    while works:
        wait()
    return errors


def test_a_call_does_not_depend_on_whether_a_rank_knows_the_hosts_yet() -> None:
    """Segments were computed from the schedule for the hosts that a rank knew when it made the call. A call with an
    error had a number on ranks that did not know the hosts, and none on others."""

    def rank_main() -> None:
        os.environ["DIST_PRIMS_ALL_REDUCE"] = "hierarchical x4"
        tensor = torch.ones(1200)
        assert in_turn(lambda: dist_prims.all_reduce(tensor, async_op=True)) == [None, None]
        assert tensor.eq(9).all()
        del os.environ["DIST_PRIMS_ALL_REDUCE"]
        group, every, own = dist.new_group(), torch.empty(3), torch.ones(1)

        def gather() -> Any:
            return dist_prims.all_gather(every, own, group, algorithm="hierarchical", async_op=True)

        for error in in_turn(gather):
            assert "equally many ranks" in str(error)
        dist_prims.all_reduce(tensor, group=group, algorithm="ring")
        assert tensor.eq(27).all()

    on_hosts("gloo", "a b b", rank_main)


@pytest.mark.parametrize("names", ["aabb", "abab", "abba", "abcabc", "abccba"])
def test_schedules_for_any_order_of_ranks_are_proved(names: str) -> None:
    order = HostOrder.of(names)
    for collective in COLLECTIVES:
        if "hierarchical" in algorithms(collective):
            for root in range(len(names)) if collective in ROOTED else [None]:
                schedule = order.build(collective, "hierarchical", **({} if root is None else {"root": root}))
                assert schedule.root == root
                schedule.verify()
