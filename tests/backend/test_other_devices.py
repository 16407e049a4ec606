"""Tensors of devices that have no communication library: they travel through the CPU (``toy_device.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_device
from ranks import span
from survivors import join_at_rank_0, run_ranks
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.nn.parallel import DistributedDataParallel

import dist_prims

pytestmark = pytest.mark.skipif(bool(toy_device.REASON), reason=toy_device.REASON or "this torch has devices in Python")
BOTH = "cpu:dist_prims,toy:dist_prims"
TOY = "toy:0"


def on_toy(
    body: Callable[[], Any],
    size: int = 2,
    backend: str = BOTH,
    streams: Path | None = None,
    start_method: str | None = None,
) -> list[Any]:
    def rank() -> Any:  # each rank has the device, and not the process of the tests
        dist.destroy_process_group()
        toy_device.install(streams)
        dist_prims.init(backend, timeout=30)
        return body()

    return dist_prims.spawn(rank, size, timeout=90, start_method=start_method)


def results_of_calls(device: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """The results of each call with tensors on a device."""
    rank, size = group.rank(), group.size()
    results: dict[str, Any] = {}

    def new(*shape: int) -> Tensor:
        return torch.full(shape, -1.0).to(device)

    def data(count: int = 3, of: int = rank) -> Tensor:
        return (torch.arange(float(count)) + 10 * of).to(device)

    def call(function: Callable[..., Any], outputs: list[Tensor], *arguments: Any, **options: Any) -> None:
        for is_async in (False, True):  # the second call reads what the first one has written, where it is in place
            work = function(*arguments, group=group, async_op=is_async, **options)
            assert not is_async or work.wait()
            results[f"{len(results)}: {function.__name__}"] = [output.tolist() for output in outputs]

    # 1. Collectives, also of tensors that are not contiguous, or empty.
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        call(dist.all_reduce, [tensor := data()], tensor, op=op)
    for tensor in (new(0), data(6).view(2, 3).t()):
        call(dist.all_reduce, [tensor], tensor)
    call(dist.broadcast, [tensor := data()], tensor, group_src=size - 1)
    call(dist.reduce, [tensor := data()] if rank == 0 else [], tensor if rank == 0 else data(), group_dst=0)
    lists, whole, part = [new(3) for _ in range(size)], new(size, 3), new(2)
    call(dist.all_gather, lists, lists, data())
    call(dist.all_gather_into_tensor, [whole], whole, data())
    call(dist.all_gather_into_tensor, [matrix := new(3, 2 * size).t()], matrix, data(6).view(3, 2).t())
    call(dist.gather, lists, data(), lists if rank == 0 else None, group_dst=0)
    scattered = [data(2, to) for to in range(size)]
    call(dist.scatter, [part], part, scattered if rank == 0 else None, group_src=0)
    call(dist.reduce_scatter, [part], part, scattered)
    call(dist.reduce_scatter_tensor, [part], part, data(2 * size))
    call(dist.all_to_all, lists, lists, [data(3, rank + to) for to in range(size)])
    splits = [1 + (rank + peer) % 2 for peer in range(size)]
    call(dist.all_to_all_single, [tensor := new(sum(splits))], tensor, data(sum(splits)), splits, splits)
    # 2. Coalesced and functional calls.
    pair, wide, narrow = [data(), data(2)], [new(3 * size), new(2 * size)], [new(3), new(2)]
    group.allreduce_coalesced(pair).wait()
    group.allgather_into_tensor_coalesced(wide, pair).wait()
    group.reduce_scatter_tensor_coalesced(narrow, wide).wait()
    results["coalesced"] = [tensor.tolist() for tensor in pair + wide + narrow]
    results["functional"] = all_gather_tensor(data(), 0, group).tolist()
    # 3. Messages around a ring.
    target, source = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(data(), group=group, group_dst=target)]
    dist.recv(received := new(3), group=group)
    batch = [dist.P2POp(dist.isend, data(2), group=group, group_peer=target)]
    batch.append(dist.P2POp(dist.irecv, part, group=group, group_peer=source))
    for work in works + dist.batch_isend_irecv(batch):
        work.wait()
    results["messages"] = [received.tolist(), part.tolist()]
    # 4. The calls of dist_prims, by the backend's choice and by a schedule; scan runs in Python.
    for algorithm in (None, "ring"):
        dist_prims.all_gather(whole, tensor := data(), group=group, algorithm=algorithm)
        dist_prims.all_reduce(tensor, group=group, algorithm=algorithm)
        results[f"by {algorithm}"] = [tensor.tolist(), whole.tolist()]
    dist_prims.scan(tensor := data(), group=group)
    results["scan"] = tensor.tolist()
    return results


def check_calls(group: dist.ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    expected = results_of_calls("cpu", group)
    assert results_of_calls(TOY, group) == expected
    assert expected["messages"][0] == [10.0 * ((rank - 1) % size) + place for place in range(3)]
    assert not any(non_blocking for _, non_blocking, _ in toy_device.copies)


def test_calls_have_the_results_of_the_cpu() -> None:
    def body() -> None:
        check_calls(dist.group.WORLD)
        dist.barrier(device_ids=[0])
        dist.all_gather_object(objects := [None] * 3, dist.get_rank())
        assert objects == [0, 1, 2]

    on_toy(body, 3)


@pytest.mark.slow
def test_calls_between_hosts() -> None:
    def body() -> None:
        toy_device.install()
        check_calls(dist.new_group(backend=BOTH))

    span("a a b", body)


@pytest.mark.slow
def test_results_are_copied_in_the_order_of_the_stream_of_the_caller(tmp_path: Path) -> None:
    """Another thread copies them, whose own current stream does not wait for the stream of the caller."""

    def body() -> None:
        streams = toy_device.streams
        tensor, received = torch.zeros(2, device=TOY), torch.zeros(2, device=TOY)
        if dist.get_rank() == 1:
            dist.recv(torch.zeros(1))  # rank 0 has made its calls
            dist.send(tensor, 0)
            dist.all_reduce(tensor)
            return
        streams.set_stream(7)
        toy_device.copies.clear()
        works, streams_of_callbacks = [dist.irecv(received, 1), dist.all_reduce(tensor, async_op=True)], []
        for work in works:
            work.get_future().then(lambda future: streams_of_callbacks.append(streams.get_stream()))
        dist.send(torch.zeros(1), 1)
        streams.set_stream(0)
        deadline = time.monotonic() + 30
        while len(streams_of_callbacks) < 2:  # without a wait, in which this thread would complete the works
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert streams_of_callbacks == [7, 7]
        assert toy_device.copies == [("toy to cpu", False, 7)] + [("cpu to toy", False, 7)] * 2

    on_toy(body, streams=toy_device.compile_streams(tmp_path))


def test_the_result_is_on_the_device_when_work_and_future_end() -> None:
    def body() -> None:
        tensor = torch.ones(1000, device=TOY)
        doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [4.0] * 1000
        with torch.inference_mode():
            dist.all_reduce(tensor := torch.ones(2, device=TOY), async_op=True).wait()
        assert tensor.tolist() == [2.0, 2.0]

    on_toy(body)


def test_errors_are_those_of_the_cpu_and_mixed_devices_are_refused() -> None:
    def body() -> None:
        world, mixed = dist.group.WORLD, [torch.ones(1), torch.ones(1, device=TOY)]
        with pytest.raises(dist_prims.MismatchError, match=r"(?s)3.*4|4.*3"):
            dist.all_reduce(torch.ones(3 + dist.get_rank(), device=TOY))
        with pytest.raises(
            ValueError, match="the tensors of one call are on cpu and on toy:0; move them to one device"
        ):
            world.allreduce_coalesced(mixed)
        for outputs, tensor in ((mixed, mixed[0]), (mixed[:1] * 2, mixed[1])):
            with pytest.raises(ValueError, match="tensors differ: Float on"):
                world.allgather([outputs], [tensor])
        with pytest.raises(RuntimeError, match="does not implement startCoalescing"):  # it ended the process
            world._start_coalescing(torch.device("cpu"))
        dist.all_reduce(tensor := torch.ones(2, device=TOY))  # the group goes on
        assert tensor.tolist() == [2.0, 2.0]

    on_toy(body)


def test_a_group_that_does_not_name_the_device_refuses_it() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="No backend type associated with device type toy"):
            dist.all_reduce(torch.ones(1, device=TOY))
        remedy = 'make a group for it, by backend="cpu:dist_prims,(cuda:dist_prims,)?toy:dist_prims"'  # of a CUDA build
        with pytest.raises(ValueError, match=remedy):
            dist_prims.all_reduce(torch.ones(1, device=TOY))

    on_toy(body, 1, "dist_prims")


def test_training_with_ddp() -> None:
    def body() -> list[Any]:
        gradients = []
        for device in ("cpu", TOY):
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(3, 4).to(device))
            for _ in range(2):
                model(torch.full((5, 3), float(dist.get_rank())).to(device)).square().mean().backward()
            gradients.append([parameter.grad.tolist() for parameter in model.parameters()])
        return gradients

    # Fresh processes: autograd counts the devices when a process first calls backward, which an earlier test in this
    # process may have done without the toy device, and a forked rank inherits that count.
    (of_cpu, of_toy), other_rank = on_toy(body, start_method="spawn")
    assert of_cpu == of_toy == other_rank[0] == other_rank[1]


@pytest.mark.slow
def test_repaired_groups_serve_the_device(tmp_path: Path) -> None:
    """A shrunk default group, and with it every new group, served the CPU only."""
    place = f"file://{tmp_path}/place"

    def body(rank: int) -> Any:
        toy_device.install()
        if rank == 2:
            dist_prims.join(place, timeout=60)
        else:
            join_at_rank_0(rank, 2, tmp_path, BOTH)
            dist_prims.shrink()
            while dist.get_world_size() < 3:
                dist_prims.grow(place)
        sums = []
        for group in (dist.group.WORLD, dist.new_group(), dist.group.WORLD.split_group([0, 1, 2])):
            group.allreduce([tensor := torch.ones(1, device=TOY)]).wait()
            sums.append(tensor.item())
        return sums, dist.get_backend(dist.group.WORLD)

    assert run_ranks(body, 3, tmp_path, join=False) == [([3, 3, 3], BOTH)] * 3
