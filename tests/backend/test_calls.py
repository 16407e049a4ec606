"""Around a collective: work that overlaps, ranks that disagree, bad input, memory, settings, other backends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dist_prims
from dist_prims.collectives import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.schedules import algorithms


def ones(count: int = 5) -> torch.Tensor:
    return torch.ones(count)


def test_many_collectives_in_flight_keep_apart() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        other = dist.new_group()
        tensors = [torch.full((1000 + i,), float(rank + i)) for i in range(40)]
        works = [
            dist_prims.all_reduce(
                each, group=(None, other)[i % 2], algorithm=algorithms("all_reduce")[i % 11], async_op=True
            )
            for i, each in enumerate(tensors)
        ]
        between = torch.tensor(rank)
        dist_prims.all_reduce(between)  # waits its turn behind those
        assert between.item() == sum(range(size))
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work.wait()
            assert work.is_completed()
            assert tensor.eq(sum(range(size)) + i * size).all()

    dist_prims.spawn(body, 4, backend="gloo", timeout=60)


def test_async_work_is_progressed_while_the_caller_computes() -> None:
    def body() -> None:
        tensor = ones()
        work = dist_prims.all_reduce(tensor, async_op=True)
        end = time.monotonic() + 30
        while not work.is_completed():  # no thread waits for it
            assert time.monotonic() < end
            time.sleep(0.001)
        assert tensor.tolist() == [2.0] * 5

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_waiting_for_async_work_can_time_out_and_goes_on(backend: str) -> None:
    def body() -> None:
        store = dist.distributed_c10d._get_default_store()
        for algorithm in (None, "ring"):
            if dist.get_rank() == 1:
                store.wait([f"waited {algorithm}"])
            tensor = ones()
            work = dist_prims.all_reduce(tensor, algorithm=algorithm, async_op=True)
            if dist.get_rank() == 0:
                with pytest.raises(TimeoutError, match=r"all_reduce.* on rank 0 did not complete"):
                    work.wait(timedelta(milliseconds=1))
                store.set(f"waited {algorithm}", "")
            assert work.wait(timedelta(seconds=30))
            assert tensor.tolist() == [2.0] * 5

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_the_thread_of_a_group_goes_with_it() -> None:
    def body() -> None:
        for _ in range(3):
            group = dist.new_group()
            dist_prims.all_reduce(ones(), group=group, algorithm="ring", async_op=True).wait()
            dist.destroy_process_group(group)
        del group
        end = time.monotonic() + 30
        while any(thread.name == "dist_prims queue" for thread in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.01)

    dist_prims.spawn(body, 2, backend="gloo", timeout=60)


def compared(collective: str, *arguments: Any, **options: Any) -> Any:
    """A call that ranks agree on first. Gloo's own, which it gets without an algorithm, abort where ranks disagree."""
    return getattr(dist_prims, collective)(*arguments, **{"algorithm": "cheapest", **options})


def disagree(*calls: Callable[[], Any]) -> str:
    """Rank r makes call r; the error of this rank."""
    with pytest.raises(MismatchError) as caught:
        calls[dist.get_rank()]()
    tensor = ones()
    dist_prims.all_reduce(tensor)  # the group goes on
    assert tensor.tolist() == [float(len(calls))] * 5
    return str(caught.value)


DISAGREEMENTS: list[tuple[Callable[[], Any], Callable[[], Any], list[str]]] = [
    (lambda: compared("all_reduce", ones()), lambda: compared("broadcast", ones()), ["all_reduce", "broadcast"]),
    (lambda: compared("all_reduce", ones(5)), lambda: compared("all_reduce", ones(6)), ["5", "6"]),
    (lambda: compared("all_reduce", ones()), lambda: compared("all_reduce", ones().double()), ["float32", "float64"]),
    (
        lambda: compared("all_reduce", ones()),
        lambda: compared("all_reduce", ones(), dist.ReduceOp.MAX),
        ["SUM", "MAX"],
    ),
    (
        lambda: compared("all_reduce", ones(), algorithm="ring"),
        lambda: compared("all_reduce", ones(), algorithm="swing"),
        ["ring", "swing"],
    ),
    (
        lambda: compared("all_reduce", ones(), algorithm="tree(chunks=3)"),
        lambda: compared("all_reduce", ones(), algorithm="tree(chunks=3) x2"),
        ["tree", "chunks=3"],
    ),
    (lambda: compared("broadcast", ones(), src=0), lambda: compared("broadcast", ones(), src=1), ["0", "1"]),
    (
        lambda: compared("all_gather", [torch.empty(1), torch.empty(2)], torch.ones(1)),
        lambda: compared("all_gather", [torch.empty(2), torch.empty(1)], torch.ones(1)),
        ["rank 0", "rank 1"],
    ),
]


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_ranks_that_disagree_all_get_an_error_that_names_both_sides(backend: str) -> None:
    def body() -> None:
        for one, two, both in DISAGREEMENTS:
            message = disagree(one, two)
            for word in ["rank 0", "rank 1", *both]:
                assert word in message.lower() or word in message

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_ranks_that_disagree_in_segments() -> None:
    one = lambda: compared("all_reduce", ones(), algorithm="ring", segment_bytes=8)  # noqa: E731
    other = lambda: compared("all_reduce", ones(), algorithm="ring")  # noqa: E731
    # The other backend cuts as it likes.
    for message in dist_prims.spawn(disagree, 2, (one, other), backend="gloo", timeout=60):
        assert "segment" in message


def test_one_of_many_disagrees() -> None:
    calls = [lambda: compared("all_reduce", ones())] * 3 + [lambda: compared("all_reduce", ones(9))]
    calls.append(lambda: compared("all_reduce", ones()))
    for message in dist_prims.spawn(disagree, 5, tuple(calls), backend="gloo", timeout=60):
        assert "rank 3" in message
        assert "9" in message


BAD_INPUT: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: dist_prims.all_gather([ones()], ones()), "output lists 1 tensors for a group of 2 ranks"),
    "root": (lambda: dist_prims.broadcast(ones(), src=7), "root 7 is not in the group, whose ranks are [0, 1]"),
    "float8": (
        lambda: dist_prims.all_reduce(ones().to(torch.float8_e5m2)),
        "SUM cannot reduce torch.float8_e5m2: float8 can be transferred but not reduced",
    ),
    "bits": (lambda: dist_prims.all_reduce(ones(), dist.ReduceOp.BXOR), "BXOR cannot reduce torch.float32"),
    "mean": (lambda: dist_prims.all_reduce(torch.ones(2).bool(), dist.ReduceOp.AVG), "AVG cannot reduce torch.bool"),
    "name of an op": (lambda: dist_prims.all_reduce(ones(), "mean"), """op='mean': there are "sum", "avg", """),
    "order": (lambda: dist_prims.all_reduce(ones() * 1j, dist.ReduceOp.MAX), "complex numbers have no order"),
    "device": (lambda: dist_prims.all_reduce(ones().to("meta")), "the tensor is on meta, but the group serves cpu"),
    "sparse": (lambda: dist_prims.broadcast(ones().to_sparse()), "call .to_dense() first"),
    "algorithm": (lambda: dist_prims.all_reduce(ones(), algorithm="rign"), "ring"),
    "parameters": (lambda: dist_prims.all_reduce(ones(), algorithm="ring(2)"), "(2) are no parameters"),
    "forwarding": (
        lambda: dist_prims.all_to_all([ones(), ones()], [ones(), ones()], algorithm="bruck(radix=3)"),
        "algorithm 'bruck' forwards blocks",
    ),
    "uneven": (lambda: dist_prims.all_gather(ones(3), ones(1)), "which 2 ranks cannot share evenly; pass a list"),
    "length": (lambda: dist_prims.all_reduce(ones(), output=ones(4)), "output has 4 elements where 5 are needed"),
    "dtypes": (lambda: dist_prims.all_reduce(ones(), output=ones().int()), "tensors differ"),
    "splits": (lambda: dist_prims.all_to_all(ones(4), ones(4), [1, 2], [2, 2]), "must be 2 numbers that add up to 4"),
    "segments": (lambda: dist_prims.all_reduce(ones(), segment_bytes=-1), "segment_bytes=-1 is negative"),
    "gather list": (  # an empty list is wrong on rank 1 too
        lambda: dist_prims.gather(ones(), [] if dist.get_rank() else None),
        "gather_list must be given on rank 0 and only there",
    ),
    "no tensor": (lambda: dist_prims.all_reduce([1.0]), "a tensor is needed, not list"),  # type: ignore[arg-type]
}


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    def body() -> None:
        for name, (call, words) in BAD_INPUT.items():
            with pytest.raises(ValueError, match=r"\w") as caught:
                call()
            message = str(caught.value)
            assert words in message, (name, message)
            assert f"rank {dist.get_rank()}" in message or "algorithm" in message, (name, message)
            dist_prims.barrier()

    dist_prims.spawn(body, 2, backend="gloo", timeout=60)


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_reduction_by_name_and_async_op_by_position(backend: str) -> None:
    """As torch's own functions have async_op after the group."""

    def body() -> None:
        rank, parts = dist.get_rank(), torch.empty(2)
        for op, wanted in {"sum": 3, "avg": 1.5, "max": 2, "product": 2}.items():
            for algorithm in (None, "ring"):
                tensor = ones() * (rank + 1)
                dist_prims.all_reduce(tensor, op, algorithm=algorithm)
                assert tensor.eq(wanted).all(), (op, algorithm)
        dist_prims.all_gather(parts, torch.tensor([float(rank)]), None, True).wait()
        dist_prims.reduce(tensor, 1, "sum", None, True).wait()
        assert parts.tolist() == [0, 1]
        assert tensor.eq(4 if rank else 2).all()

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"all_reduce: this process is in no group; call dist_prims.init\(\) first"):
        dist_prims.all_reduce(ones())


def test_a_call_of_a_rank_outside_the_group_is_refused() -> None:
    def body() -> None:
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="rank 1 is not a member of the given group"):
                dist_prims.all_reduce(ones(), group=group)

    dist_prims.spawn(body, 2, timeout=60)


def test_the_environment_chooses_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(count: int) -> str:
        with pytest.raises(MismatchError) as caught:
            dist_prims.all_reduce(ones(count), algorithm="naive_ring" if dist.get_rank() else None)
        return str(caught.value)

    def body() -> list[str]:
        return [chosen(count) for count in (1, 1023, 1024, 5000)]

    monkeypatch.setenv("DIST_PRIMS_ALL_REDUCE", "swing:0-4K;tree:4K-16K; ring:16K-max")
    names = ["swing", "swing", "tree", "ring"]
    for messages in dist_prims.spawn(body, 2, backend="gloo", timeout=60):
        for message, name in zip(messages, names, strict=True):
            assert name in message
    monkeypatch.setenv("DIST_PRIMS_ALL_REDUCE", "rign")
    with pytest.raises(RankFailedError, match="rign"):
        dist_prims.spawn(lambda: dist_prims.all_reduce(ones()), 1, timeout=60)


def test_the_environment_gives_segments_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo a segment has a number of bytes: of a chunk, divided by the number of segments."""

    def body() -> None:
        tensor, rank = ones(3000), dist.get_rank()
        dist_prims.all_reduce(tensor)
        assert tensor.eq(2).all()
        with pytest.raises(MismatchError, match="algorithm tree, chunks=3, segments of 1000 bytes"):
            dist_prims.all_reduce(tensor, algorithm="tree" if rank else None)

    monkeypatch.setenv("DIST_PRIMS_ALL_REDUCE", "tree(chunks=3) x4")
    dist_prims.spawn(body, 2, backend="gloo", timeout=60)


def test_the_fake_backend() -> None:
    def body() -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        for name in algorithms("all_reduce"):
            dist_prims.all_reduce(ones(), algorithm=name)
        dist.destroy_process_group()

    dist_prims.spawn(body, 1, init=False, timeout=60)


def test_a_dtensor_is_refused() -> None:
    """all_reduce and all_to_all bypass the dispatcher, and read memory that a DTensor does not have: SIGSEGV."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: the tensor has no memory.*\.to_local\(\)"):
            dist_prims.all_reduce(sharded)
        with pytest.raises(ValueError, match=r"all_to_all: the tensor has no memory.*\.to_local\(\)"):
            dist_prims.all_to_all(sharded, sharded)
        with pytest.raises(ValueError, match="broadcast: the tensor has no memory"):
            dist_prims.broadcast(sharded)
        own = sharded.to_local()
        dist_prims.all_reduce(own)
        assert own.tolist() == [2.0, 2.0]

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)
