"""Calls that name no algorithm, which the group's own backend makes: on one rank in one way, on the next in another."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.collectives.queue import CollectiveQueue
from dist_prims.errors import MismatchError
from dist_prims.rendezvous.deadline import until
from dist_prims.schedules import Step, algorithm

BACKENDS = ["gloo", "dist_prims"]
Op = dist.ReduceOp


def on_two(body: Callable[[int], Any], backend: str) -> None:
    dist_prims.spawn(lambda: body(dist.get_rank()), 2, backend=backend, timeout=60)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_are_freed_without_garbage_collection(backend: str, is_async: bool) -> None:
    """A mean over gloo left its tensors and the group in a cycle of references."""

    def body(rank: int) -> None:
        gc.disable()
        for op in (Op.SUM, Op.AVG, Op.MAX):
            tensor, output = torch.ones(4), torch.empty(2)
            works = [
                dist_prims.all_reduce(tensor, op, async_op=is_async),
                dist_prims.reduce(tensor, 0, op, async_op=is_async),
                dist_prims.reduce_scatter(output, tensor, op, async_op=is_async),
            ]
            for work in works:
                if is_async:
                    work.wait()
            ends = [weakref.ref(tensor), weakref.ref(output)]
            del tensor, output, work, works
            until(lambda ends=ends: not any(end() for end in ends), time.monotonic() + 30, "the end of the tensors")  # type: ignore[misc]

    on_two(body, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_have_any_shape(backend: str) -> None:
    """Gloo ended the process at an output without dimensions, and refused blocks of other shapes than the whole."""

    def body(rank: int) -> None:
        output = torch.zeros(())
        dist_prims.reduce_scatter(output, torch.tensor([1.0, 2.0]) * (rank + 1))
        assert output.item() == (3.0, 6.0)[rank]
        for whole, block in ((2, ()), ((2, 1), 1), ((1, 4), 2), ((3, 2, 2), (2, 3)), (0, 0)):
            gathered = torch.zeros(whole)
            dist_prims.all_gather(gathered, torch.full([block] if isinstance(block, int) else block, rank + 1.0))
            assert gathered.flatten().tolist() == sorted(gathered.flatten().tolist())
            assert gathered.sum() == gathered.numel() * 1.5
        dist_prims.reduce_scatter(torch.empty(0), torch.empty(0))

    on_two(body, backend)


def results(rank: int, is_async: bool, odd: bool) -> list[torch.Tensor]:
    """Every collective. An odd tensor has gaps, so it takes another way than a plain one."""

    def tensor(values: list[float]) -> torch.Tensor:
        plain = torch.tensor(values, dtype=torch.float32) * (rank + 1)
        return plain.repeat_interleave(2)[::2] if odd else plain

    def empty(count: int) -> torch.Tensor:
        return torch.zeros(2 * count)[::2] if odd else torch.zeros(count)

    x, mean, least, root = tensor([1, 2, 3, 4]), tensor([2, 4]), tensor([5, 6]), tensor([7, 8])
    gathered, mine, sent = empty(8), empty(2), empty(4)
    works = [
        dist_prims.all_reduce(x, async_op=is_async),
        dist_prims.all_reduce(mean, Op.AVG, async_op=is_async),
        dist_prims.all_reduce(least, Op.MIN, async_op=is_async),
        dist_prims.broadcast(root, 1, async_op=is_async),
        dist_prims.all_gather(gathered, tensor([1, 2, 3, 4]), async_op=is_async),
        dist_prims.reduce_scatter(mine, tensor([1, 2, 3, 4]), async_op=is_async),
        dist_prims.all_to_all(sent, tensor([1, 2, 3, 4]), async_op=is_async),
        dist_prims.barrier(async_op=is_async),
    ]
    for work in works:
        assert (work is not None) == is_async
        if work is not None:
            assert work.wait()
            assert work.is_completed()
    return [x, mean, least, root, gathered, mine, sent]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_take_different_ways_meet(backend: str) -> None:
    def body(rank: int) -> None:
        expected = [[3, 6, 9, 12], [3, 6], [5, 6], [14, 16], [1, 2, 3, 4, 2, 4, 6, 8], [[3, 6], [9, 12]][rank]]
        expected.append([1, 2, 2, 4] if rank == 0 else [3, 4, 6, 8])
        for ways in range(16):
            is_async, odd = bool(ways >> rank & 1), bool(ways >> (2 + rank) & 1)
            found = [each.tolist() for each in results(rank, is_async, odd)]
            assert found == expected, (ways, found)

    on_two(body, backend)


def test_complex_numbers_meet_too() -> None:
    """One way made two real numbers of each before the ranks compared their calls."""

    def body(rank: int) -> None:
        for turn in range(4):
            z = torch.tensor([1 + 1j, 2 - 1j])
            z = z.conj() if turn == rank else z
            op = Op.PRODUCT if turn > 1 else Op.SUM
            work = dist_prims.all_reduce(z, op, async_op=turn % 2 == rank)
            assert work is None or work.wait()
            if turn > 1:
                assert torch.allclose(z, torch.tensor([2j, 3 - 4j]))

    on_two(body, "dist_prims")


def test_ranks_agree_before_one_of_them_asks_for_a_proof() -> None:
    """A rank waited for the proof of a schedule that rank 0 did not follow, until the timeout."""

    def star(size: int) -> Any:
        yield Step(src=range(1, size), dst=0, chunk=0, reduce=True)
        yield Step(src=0, dst=range(1, size), chunk=0)

    def body(rank: int) -> None:
        algorithm("all_reduce", name="star", chunks=1)(star)
        with pytest.raises(MismatchError):
            dist_prims.all_reduce(torch.ones(3), algorithm=("ring", "star")[rank])
        tensor = torch.ones(3)
        dist_prims.all_reduce(tensor, algorithm="star")
        assert tensor.tolist() == [2.0] * 3

    on_two(body, "dist_prims")


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_that_differ_in_shapes_only(backend: str) -> None:
    def body(rank: int) -> None:
        model = torch.nn.Linear(2 + rank, 3)
        model(torch.ones(1, 2 + rank)).sum().backward()
        before = model.weight.grad.clone()
        with pytest.raises(MismatchError, match=r"models of two ranks differ|disagree"):
            dist_prims.average_gradients(model)
        assert torch.equal(model.weight.grad, before)

    on_two(body, backend)


def test_a_call_that_gives_up_its_turn_holds_up_no_other() -> None:
    """An exception of a signal handler in the wait for earlier calls left all later ones waiting."""
    lane, go = CollectiveQueue(), threading.Event()
    done: list[Any] = []
    wait_for = lane._turn.wait_for

    def interrupted(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait_for(*arguments)

    first = lane.start(lambda _: go.wait(30) and None, "first")  # type: ignore[arg-type]
    lane._turn.wait_for = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        lane.run(done.append, "second")
    go.set()
    assert first.wait()
    third = threading.Thread(target=lambda: lane.run(done.append, "third"), daemon=True)
    third.start()
    third.join(30)
    assert done == [3]
