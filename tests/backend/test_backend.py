"""The backend "dist_prims": what its collectives give, bit for bit, and what faults get."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, children, press_ctrl_c_soon
from values import COMPLEX, FLOAT8, FLOATS, INTEGERS, REDUCTIONS, bits, equal, everything, held, noise, summed

import dist_prims
from dist_prims.errors import CommTimeoutError, MismatchError, PeerDiedError, PeerLeftError

SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)]
Op = dist.ReduceOp


def spawn(body: Callable[..., Any], size: int, *args: Any, timeout: float = 60) -> list[Any]:
    return dist_prims.spawn(body, size, args, backend="dist_prims", timeout=timeout)


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_PRIMS_SLOT_BYTES", str(1 << 17))  # so that large is soon several segments


@pytest.mark.parametrize("size", SIZES)
def test_every_collective(size: int) -> None:
    def body() -> None:
        assert not backend_of().spans_hosts
        everything(size)

    spawn(body, size)


def test_tensors_in_one() -> None:
    size = 3

    def body() -> None:
        rank = dist.get_rank()
        for count in (0, 5, 70_000):
            output = torch.full((size * count, 2), -1)
            dist.all_gather_into_tensor(output, held(rank, 2 * count).view(-1, 2))
            equal(output.flatten(), torch.cat([held(peer, 2 * count) for peer in range(size)]), "all_gather")
            output = torch.full((count,), -1)
            dist.reduce_scatter_tensor(output, held(rank, size * count))
            equal(output, summed(size, size * count)[rank * count : (rank + 1) * count], "reduce_scatter")
            output = torch.full((size * count,), -1)
            dist.all_to_all_single(output, torch.arange(size * count) + 10**6 * rank)
            blocks = [torch.arange(rank * count, (rank + 1) * count) + 10**6 * peer for peer in range(size)]
            equal(output, torch.cat(blocks), "all_to_all")
        splits = [[(src + 2 * dst) % 4 for dst in range(size)] for src in range(size)]
        incoming = [splits[peer][rank] for peer in range(size)]
        output = torch.full((sum(incoming), 3), -1)
        dist.all_to_all_single(output, torch.full((sum(splits[rank]), 3), rank), incoming, splits[rank])
        assert output[:, 0].tolist() == [peer for peer, rows in enumerate(incoming) for _ in range(rows)]
        uneven = [torch.zeros(peer) for peer in range(size)]
        dist.all_gather(uneven, torch.full((rank,), float(rank)))
        assert [each.tolist() for each in uneven] == [[float(peer)] * peer for peer in range(size)]

    spawn(body, size)


@pytest.mark.parametrize("size", [3, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 5, 7))])
def test_the_bits_are_those_of_the_registered_schedule(size: int) -> None:
    """Small: "direct"; large: "two_shot"; reduce_scatter: "direct". Run by the executor in Python over gloo."""

    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        rank = dist.get_rank()
        for dtype, count, op in itertools.product(FLOATS, (1031, 90_001), (Op.SUM, Op.AVG, Op.PRODUCT)):
            ours, reference = (noise(rank, dtype, count) for _ in range(2))
            dist.all_reduce(ours, op)
            dist_prims.all_reduce(reference, op, gloo, algorithm="direct" if count == 1031 else "two_shot")
            assert bits(ours) == bits(reference), (dtype, count, op)
        mine, expected = torch.zeros(1031), torch.zeros(1031)
        dist.reduce_scatter_tensor(mine, noise(rank, torch.float32, 1031 * size))
        dist_prims.reduce_scatter(expected, noise(rank, torch.float32, 1031 * size), group=gloo, algorithm="direct")
        assert bits(mine) == bits(expected)

    spawn(body, size)


def test_every_type_and_reduction_is_as_in_python() -> None:
    def body() -> None:
        gloo = dist.new_group(backend="gloo")
        for dtype, op in REDUCTIONS:
            if dtype in COMPLEX and op == Op.PRODUCT:
                continue  # refused by torch.distributed itself
            generator = torch.Generator().manual_seed(dist.get_rank())
            raw = torch.randint(0, 256, (600 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tensor = raw.view(dtype) if dtype in INTEGERS else (raw[:600] % 7).to(dtype)
            ours, reference = tensor.clone(), tensor.clone()
            dist.all_reduce(ours, op)
            dist_prims.all_reduce(reference, op, gloo, algorithm="direct")
            assert bits(ours) == bits(reference), (dtype, op)
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX, torch.bool, *FLOAT8]:
            tensor = torch.full((9,), dist.get_rank()).to(dtype)
            dist.broadcast(tensor, 2)
            assert bits(tensor) == bits(torch.full((9,), 2).to(dtype)), dtype

    spawn(body, 3)


def test_half_types_round_as_torch_does() -> None:
    """All 65,536 patterns of both half types, added to zero: what comes back is what went in, but for the payloads of
    NaN, whose bits no library promises."""

    def body() -> None:
        patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
        for dtype in (torch.float16, torch.bfloat16):
            tensor = patterns.view(dtype).clone() if dist.get_rank() == 0 else torch.zeros(1 << 16, dtype=dtype)
            expected = torch.where(patterns == -(1 << 15), torch.zeros((), dtype=dtype), patterns.view(dtype))
            dist.all_reduce(tensor)
            assert torch.equal(tensor.isnan(), expected.isnan())
            assert bits(tensor.nan_to_num(0)) == bits(expected.nan_to_num(0)), dtype
        steps = torch.linspace(-70000, 70000, 100_003)
        total = steps.to(torch.float16)
        dist.all_reduce(total)
        assert torch.equal(total, (2 * steps.to(torch.float16).float()).to(torch.float16))

    spawn(body, 2)


def test_not_a_number_stays_so() -> None:
    def body() -> None:
        for dtype, op in itertools.product(FLOATS, (Op.MIN, Op.MAX)):
            tensor = torch.tensor([1.0, float("nan"), float("inf"), -1.0], dtype=dtype)
            if dist.get_rank() == 1:
                tensor = torch.tensor([float("nan"), 1.0, -float("inf"), 2.0], dtype=dtype)
            dist.all_reduce(tensor, op)
            assert tensor[:2].isnan().all(), (dtype, op)
            assert tensor[3] == (-1.0 if op == Op.MIN else 2.0)

    spawn(body, 2)


def test_tensors_of_every_shape() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        base = torch.full((6, 5), -7)
        base[::2, 1] = rank
        dist.all_reduce(base[::2, 1])
        assert base[::2, 1].tolist() == [3] * 3
        assert base.sum() == 3 * 3 - 7 * 27
        rows = torch.zeros(size, 4).t()
        dist.broadcast(rows if rank else rows.fill_(5), 0)
        assert rows.eq(5).all()
        scalar = torch.tensor(rank)
        dist.all_reduce(scalar)
        assert scalar.item() == 3
        factor = dist._make_nccl_premul_sum(2.0)
        premultiplied = torch.ones(3)
        dist.all_reduce(premultiplied, factor)
        assert premultiplied.tolist() == [6.0] * 3

    spawn(body, 3)


def test_async_work_sub_groups_and_point_to_point() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = even if rank % 2 == 0 else odd
        tensors = [torch.full((1000 + i,), float(rank + i)) for i in range(30)]
        works = [dist.all_reduce(each, group=(None, mine)[i % 2], async_op=True) for i, each in enumerate(tensors)]
        dist.barrier()
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert work.is_completed()
            members = range(size) if i % 2 == 0 else [rank, (rank + 2) % 4]
            assert tensor.eq(sum(members) + i * len(members)).all()
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        assert future.wait()[0].tolist() == [4.0, 4.0]
        if rank < 2:  # behind a receive, a collective; before it, its send
            received = torch.zeros(3)
            work = dist.irecv(received, 1 - rank)
            sent = dist.isend(torch.full((3,), float(rank)), 1 - rank)
            sent.wait()
            work.wait()
            assert received.tolist() == [1.0 - rank] * 3
        dist.barrier()

    spawn(body, 4)


def test_a_receive_does_not_hold_up_a_collective() -> None:
    def body() -> None:
        total, received = torch.ones(3), torch.zeros(3)
        if dist.get_rank() == 0:
            work = dist.irecv(received, 1)
            dist.all_reduce(total)
            work.wait()
            assert received.tolist() == [7.0] * 3
        else:
            dist.all_reduce(total)
            dist.send(torch.full((3,), 7.0), 0)
        assert total.tolist() == [2.0] * 3

    spawn(body, 2)


MISMATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[str]]] = {
    "collective": (lambda: dist.all_reduce(torch.ones(5)), lambda: dist.barrier(), ["all_reduce", "barrier"]),
    "count": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(90_000)),
        ["5 el", "90000 el"],
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(5).int()),
        ["float32", "int32"],
    ),
    "operation": (
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(5), Op.MAX),
        ["SUM", "MAX"],
    ),
    "root": (lambda: dist.broadcast(torch.ones(5), 0), lambda: dist.broadcast(torch.ones(5), 1), ["root 0", "root 1"]),
}


def test_ranks_that_disagree_all_get_an_error_that_names_both_sides() -> None:
    def body() -> None:
        for one, two, words in MISMATCHES.values():
            with pytest.raises(MismatchError) as caught:
                (one if dist.get_rank() == 0 else two)()
            for word in ("Rank 0", "rank 1", *words):
                assert word in str(caught.value), caught.value
            tensor = torch.ones(5)
            dist.all_reduce(tensor)  # the group goes on
            assert tensor.tolist() == [2.0] * 5

    spawn(body, 2)


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    def body() -> None:
        for call, words in (
            (lambda: dist.all_reduce(torch.ones(2), Op.BXOR), "BXOR cannot reduce float32: bits belong to whole numb"),
            (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "for movement only"),
            (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "1 tensors for a group of 2 ranks"),
            (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "cannot be shared evenly by 2 ranks"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
            dist.barrier()

    spawn(body, 2)


def test_a_rank_that_is_killed_is_named_by_all_the_others() -> None:
    """Also by ranks that do not wait for it directly, and although no other rank exits."""

    def body() -> str:
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)

        def on_and_on() -> None:
            for _ in range(10**6):
                dist.all_reduce(torch.ones(100_000))

        with pytest.raises(PeerDiedError) as caught:
            on_and_on()
        return str(caught.value)

    errors = dist_prims.spawn(body, 4, backend="dist_prims", timeout=30, min_ranks=3)
    assert errors[2] is None
    for survivor in (0, 1, 3):
        found = re.match(
            rf"rank {survivor}: rank 2 \(process \d+\) has died in all_reduce\(SUM, float32", errors[survivor]
        )
        assert found, errors


def test_a_rank_that_does_not_come_is_named_when_time_is_up() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            group = dist.group.WORLD
            options = dist.AllreduceOptions()
            options.timeout = timedelta(milliseconds=300)
            options.asyncOp = False
            with pytest.raises(CommTimeoutError, match=r"timeout after 300 ms in all_reduce.*: no sign of rank 1"):
                group.allreduce([torch.ones(3)], options).wait()
            dist.distributed_c10d._get_default_store().set("raised", "")
        else:
            dist.distributed_c10d._get_default_store().wait(["raised"])
            with pytest.raises(CommTimeoutError, match="rank 0 has given up waiting"):  # the group has ended
                dist.all_reduce(torch.ones(3))

    spawn(body, 2)


def test_a_rank_that_has_left_is_named() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        else:
            with pytest.raises(PeerLeftError, match="rank 1 has left the group in all_reduce"):
                dist.all_reduce(torch.ones(3))

    spawn(body, 2)


def test_destroying_a_group_with_work_in_flight_ends_it() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)  # rank 1 never comes
            behind = dist.all_reduce(torch.ones(3), async_op=True)
            began = time.monotonic()
            dist.destroy_process_group()
            assert time.monotonic() - began < 20
            for each in (work, behind):
                with pytest.raises(RuntimeError, match=r"left the group|destroyed"):
                    each.wait()
        else:
            time.sleep(1)

    spawn(body, 2)


def test_ctrl_c_ends_a_wait() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            return
        press_ctrl_c_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))

    spawn(body, 2)


def test_a_call_in_a_forked_child_is_refused_and_harms_nothing() -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                dist.all_reduce(torch.ones(3))
            except RuntimeError as error:
                os.write(writer, str(error).encode()[:500])
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"forked from a rank" in os.read(reader, 500)
        if (pid := os.fork()) == 0:
            dist.destroy_process_group()
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3

    spawn(body, 2)


def test_ddp_trains_as_over_gloo() -> None:
    def train(group: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = []
        for step in range(10):
            torch.manual_seed(100 * step + dist.get_rank())
            loss = ddp(torch.randn(8, 20)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def body() -> None:
        assert train(None) == train(dist.new_group(backend="gloo"))  # two addends have one order

    spawn(body, 2)


def test_nothing_stays_behind() -> None:
    before = children(), len(os.listdir("/proc/self/fd"))
    spawn(everything, 2, 2)
    assert (children(), len(os.listdir("/proc/self/fd"))) == before
