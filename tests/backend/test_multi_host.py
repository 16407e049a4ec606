"""Groups that span hosts. Here ranks of one machine say that they run on several (``DIST_PRIMS_HOST_ID``): then they
share no memory and talk over TCP or UCX. test_hosts.py has real links between them."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, span
from torch.nn.parallel import DistributedDataParallel
from values import COMPLEX, FLOAT8, FLOATS, INTEGERS, bits, equal, everything, held, noise, summed
from wrapping import go_round, refuse

import dist_prims
from dist_prims.backend.link_costs import ASSUMED
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.errors import MismatchError
from dist_prims.schedules import Schedule, algorithm, build
from dist_prims.schedules.contract import COLLECTIVES
from dist_prims.schedules.host_order import HostOrder

pytestmark = pytest.mark.usefixtures("host_engine")

LAYOUTS = [
    "a b",
    "a b a b",
    "a b b c",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("a a b b", "a a b b b c c")),
]


def test_mpi_of_a_lone_process_is_no_engine_between_hosts() -> None:
    """mpi4py may be there although no mpirun is. Its world of one was once taken for an engine: no group was made."""

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
    size = len(layout.split())
    span(layout, everything, size)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["a b", "a b b c"])
def test_every_type_and_operation(layout: str) -> None:
    size = len(layout.split())

    def body() -> None:
        rank = dist.get_rank()
        for count in (1, 300, 5000):  # with the agreement; by a plan
            for dtype in (*INTEGERS, *FLOATS, *COMPLEX):
                tensor = (torch.arange(count) % 5 + rank).to(dtype)
                expected = (torch.arange(count) % 5 * size + size * (size - 1) // 2).to(dtype)
                dist.all_reduce(tensor)
                equal(tensor, expected, (dtype, count))
            tensor = torch.full((count,), 2.0 * rank)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            equal(tensor, torch.full((count,), size - 1.0), "AVG")
            tensor = torch.full((count,), rank + 1.0)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
            equal(tensor, torch.full((count,), size * (size + 1) / 4), "PREMUL_SUM")
            tensor = torch.arange(count) % 7 == rank
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            equal(tensor, torch.arange(count) % 7 < size, "bool")
            for dtype in FLOAT8:
                tensor = torch.full((count,), float(rank)).to(dtype)
                dist.broadcast(tensor, size - 1)
                assert (tensor.float() == size - 1).all(), dtype
            matrix = torch.full((count, 2), float(rank)).t()
            dist.all_reduce(matrix, dist.ReduceOp.MAX)
            assert (matrix == size - 1).all()

    span(layout, body)


def test_the_bits_are_those_of_the_schedule() -> None:
    """Run by the executor in Python over gloo, on ranks in the order of their hosts."""

    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        rank = dist.get_rank()
        more: Any
        for name, more in (("ring", {}), ("tree", {}), ("hierarchical", {"hosts": (2, 3)})):
            group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce=name), backend="dist_prims")
            for dtype, count in ((torch.float32, 1031), (torch.bfloat16, 40_000)):
                native, reference = noise(rank, dtype, count), noise(rank, dtype, count)
                dist.all_reduce(native, group=group)
                dist_prims.all_reduce(reference, group=gloo, algorithm=name, **more)
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


@pytest.mark.slow
def test_segments_change_nothing() -> None:
    """Sums of whole numbers, cut into more segments than some have elements."""

    def body() -> None:
        from dist_prims.schedules.native import to_native

        rank, size = dist.get_rank(), dist.get_world_size()
        for name in ("hierarchical", "halving_doubling", "double_tree"):
            shape = {"hosts": (2, 2)} if name == "hierarchical" else {}
            schedule = build("all_reduce", name, size, **shape)
            for segments in (1, 2, 7, 64):
                form = to_native(schedule, rank, 0, 1 << 62, name, segments)
                backend_of().pin("all_reduce", name, lambda root, form=form: [form])
                for count in (257, 1000, 100_003):
                    tensor = held(rank, count)
                    dist.all_reduce(tensor)
                    equal(tensor, summed(size, count), (name, segments, count))

    span("a a b b", body)


@pytest.mark.parametrize("layout", ["a b b c", pytest.param("a a b b", marks=pytest.mark.slow)])
def test_inputs_stay_as_they_are_and_outputs_may_lie_anywhere(layout: str) -> None:
    """A schedule reads inputs where they are and writes to the outputs, so memory that is both must not be mixed up."""

    def scattered(into: Any, count: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = held(rank, size * count)
        before, output = whole.clone(), into(whole, count)
        dist.reduce_scatter(output, list(whole.view(size, count)))
        equal(output, summed(size, size * count)[rank * count : (rank + 1) * count], "reduce_scatter")
        if into is apart:
            equal(whole, before, "the input")

    def gathered(whole: torch.Tensor, given: torch.Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        given.copy_(held(rank, len(given)))
        dist.all_gather(list(whole.unbind()), given)
        equal(whole, torch.stack([held(other, len(given)) for other in range(size)]), "all_gather")

    def apart(whole: torch.Tensor, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64)

    def strided(whole: torch.Tensor, count: int) -> torch.Tensor:
        return torch.empty(count, 2, dtype=torch.int64)[:, 0]

    def own_block(whole: torch.Tensor, count: int) -> torch.Tensor:
        return whole[dist.get_rank() * count :][:count]

    def other_block(whole: torch.Tensor, count: int) -> torch.Tensor:
        return whole[(dist.get_rank() + 1) % dist.get_world_size() * count :][:count]

    def across_blocks(whole: torch.Tensor, count: int) -> torch.Tensor:
        return whole[count // 2 :][:count]

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        for count in (2, 1000, 100_000):
            for into in (apart, strided, own_block, other_block, across_blocks):
                scattered(into, count)
            whole, alone = torch.empty(size, count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
            for given in (alone, whole[rank], whole[(rank + 1) % size], whole.view(-1)[1 : count + 1]):
                gathered(whole, given)
            gathered(torch.empty(count, size, dtype=torch.int64).t(), alone)
            total = held(rank, count)
            dist.reduce(total, 1)
            equal(total, summed(size, count) if rank == 1 else held(rank, count), "reduce")

    span(layout, body)


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
        uneven = [torch.ones(4 + (rank == peer == 2)) for peer in range(4)]
        with pytest.raises(MismatchError, match="Rank 2 sends 20 bytes to rank 2, which expects 16"):
            dist.all_to_all([torch.ones(4) for _ in range(4)], uneven)
        own, blocks = torch.ones(4 + (rank == 2)), [torch.ones(4) for _ in range(4)] if rank == 1 else None
        with pytest.raises(MismatchError, match="Rank 2 sends 20 bytes to rank 1, which expects 16"):
            dist.gather(own, blocks, dst=1)
        with pytest.raises(MismatchError, match=r"rank 2 calls.*5 elements"):
            dist.scatter(own, blocks, src=1)
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


def test_messages_between_hosts() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        inbox = [torch.zeros(10) for _ in range(2 * size)]
        receives = [
            dist.irecv(inbox[2 * peer + tag], peer, tag=tag) for peer in range(size) for tag in (1, 0) if peer != rank
        ]
        dist.all_reduce(torch.ones(5))
        sends = [
            dist.isend(torch.full((10,), 10.0 * rank + tag), peer, tag=tag)
            for peer in range(size)
            for tag in (0, 1)
            if peer != rank
        ]
        for work in receives + sends:
            work.wait()
        for peer in range(size):
            for tag in (0, 1):
                assert peer == rank or (inbox[2 * peer + tag] == 10 * peer + tag).all()
        if rank == 0:
            found = torch.zeros(1)
            assert sorted(dist.recv(found) for _ in range(size - 1)) == list(range(1, size))
        else:
            dist.send(torch.ones(1), 0)

    span("a a b", body)


def test_message_numbers_wrap() -> None:
    """They once wrapped at an odd count: a segment of data then took the tag of a receive that was posted for the next
    agreement, and the process was aborted."""

    def body() -> None:
        largest = 2**31 - 1 - 1025  # the group has the last tags for itself
        go_round(largest)
        refuse(largest)

    span("a a b", body)


def test_ddp_trains_as_alone() -> None:
    def body() -> float:
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 40)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(5):
            torch.manual_seed(100 * step)
            batch = torch.randn(8, 300).chunk(4)[dist.get_rank()]
            loss = ddp(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(model.weight.detach().double().sum())

    sums = span("a a b b", body)
    assert len(set(sums)) == 1
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        torch.manual_seed(100 * step)
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    assert sums[0] == pytest.approx(float(model.weight.detach().double().sum()), abs=1e-4)


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
            assert len({each[:4] for each in found}) == 1
            low, high, name = found[0][:3]
            assert low <= nbytes < high
            assert len(name) < 48
