"""Groups that span hosts. Here ranks of one machine say that they run on several (``DIST_PRIMS_HOST_ID``): then they
share no memory and talk over TCP or UCX. test_hosts.py has real links between them."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, span
from values import bits, every_collective, noise
from wrapping import go_round, refuse

import dist_prims
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.errors import MismatchError
from dist_prims.schedules import Schedule, algorithm
from dist_prims.schedules.contract import COLLECTIVES
from dist_prims.schedules.host_order import HostOrder

pytestmark = pytest.mark.usefixtures("host_transport")

LAYOUTS = [
    "a b",
    "a b a b",
    "a b b c",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("a a b b", "a a b b b c c")),
]


def test_mpi_of_a_lone_process_is_no_transport_between_hosts() -> None:
    """mpi4py may be there although no mpirun is. Its world of one was once taken for a transport: no group was made."""

    def rank(me: str) -> float:
        os.environ["DIST_PRIMS_HOST_ID"] = me[dist.get_rank()]
        dist.destroy_process_group()
        importlib.import_module("mpi4py.MPI")
        dist_prims.init("dist_prims", timeout=30)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    pytest.importorskip("mpi4py")
    assert dist_prims.spawn(rank, 2, ("ab",), timeout=60) == [2.0, 2.0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective(layout: str) -> None:
    span(layout, every_collective)


def test_the_bits_are_those_of_the_schedule() -> None:
    """Run by the executor in Python over gloo, on ranks in the order of their hosts."""

    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        rank = dist.get_rank()
        for name, parameters in (("ring", ""), ("tree", ""), ("hierarchical", "(hosts=2,3)")):
            group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce=name), backend="dist_prims")
            for dtype, count in ((torch.float32, 1031), (torch.bfloat16, 40_000)):
                native, reference = noise(rank, dtype, count), noise(rank, dtype, count)
                dist.all_reduce(native, group=group)
                dist_prims.all_reduce(reference, group=gloo, algorithm=name + parameters)
                assert bits(native) == bits(reference), (name, dtype, count)

    span("a a b b b", body)


def test_all_ranks_end_with_the_same_bits() -> None:
    def body() -> list[list[int]]:
        found = []
        for count in (5, 1000, 70_001):
            tensor = noise(dist.get_rank(), torch.float32, count)
            dist.all_reduce(tensor)
            found.append(bits(tensor))
        return found

    first, *others = span("a b a c b", body)
    assert all(each == first for each in others)


def test_ranks_that_disagree_get_an_error_on_every_host_and_go_on() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for one, other in ((5, 6), (5, 50_000), (50_000, 50_001)):
            with pytest.raises(MismatchError, match=rf"{one} elements.*rank 2 calls.*{other} elements"):
                dist.all_reduce(torch.ones(other if rank == 2 else one))
        with pytest.raises(MismatchError, match=r"int32.*float32"):
            dist.broadcast(torch.ones(9, dtype=torch.float32 if rank == 3 else torch.int32), 0)
        with pytest.raises(MismatchError, match=r"barrier|all_reduce"):
            dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(3))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [4.0] * 3

    span("a b b c", body)


def test_ranks_that_would_exchange_by_different_schedules_get_an_error() -> None:
    """Rank 2 knows an algorithm that the others do not. The lengths of all ranks match, so the names are compared."""

    def body() -> None:
        rank = dist.get_rank()
        if rank == 2:
            algorithm("all_to_all", name="mine", trust=True)(lambda size: iter(()))
        sent = [torch.full((400,), float(rank)) for _ in range(4)]
        received = [torch.zeros(400) for _ in range(4)]
        with pytest.raises(MismatchError, match=r"all_to_all\(.*, by \w.*rank 2 calls all_to_all\(.*, by mine#\w+\)"):
            dist.all_to_all(received, sent)
        assert not torch.stack(received).any()
        uneven = [torch.full((400 + (rank != peer),), float(rank)) for peer in range(4)]
        received = [torch.zeros_like(each) for each in uneven]
        dist.all_to_all(received, uneven)  # no rank needs a schedule of its own
        assert [each[0].item() for each in received] == [0, 1, 2, 3]

    span("a b b c", body)


def test_many_at_once_and_groups_within_groups() -> None:
    def body() -> None:
        rank = dist.get_rank()
        groups = [dist.new_group(ranks, backend="dist_prims") for ranks in ([0, 3], [1, 2, 3], [0, 1])]
        tensors = [torch.full((500 * number,), float(rank)) for number in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for group, ranks in zip(groups, ([0, 3], [1, 2, 3], [0, 1]), strict=True):
            if rank in ranks:
                tensor = torch.full((3000,), float(rank))
                dist.all_reduce(tensor, group=group)
                assert (tensor == sum(ranks)).all()
        for work in reversed(works):
            work.wait()
        assert all((tensor == 6).all() for tensor in tensors)
        assert backend_of().spans_hosts

    span("a a b b", body)


def test_message_numbers_wrap() -> None:
    """They once wrapped at an odd count: a segment of data then took the tag of a receive that was posted for the next
    agreement, and the process was aborted."""

    def body() -> None:
        largest = 2**31 - 1 - 1025  # the group has the last tags for itself
        go_round(largest)
        refuse(largest)

    span("a a b", body)


def test_the_order_of_hosts() -> None:
    assert HostOrder.of(["b", "a", "b"]) == HostOrder(rank_at=(0, 2, 1), hosts=(2, 1))


@pytest.mark.slow
def test_a_schedule_for_every_collective_and_size() -> None:
    """And the same on every rank, for they are named in the agreement."""
    names = ["a", "b", "a", "b", "b"]
    for collective in set(COLLECTIVES) - {"barrier", "scan", "exclusive_scan"}:
        for nbytes in (0, 1, 4096, 1 << 20, 1 << 30):
            found = [
                MultiHostSchedules(names, rank, ASSUMED, Schedule.verify).choose(collective, nbytes, 1)
                for rank in range(5)
            ]
            assert len({replace(each, program=found[0].program) for each in found}) == 1
            assert found[0].low <= nbytes < found[0].high
            assert len(found[0].name) < 48
