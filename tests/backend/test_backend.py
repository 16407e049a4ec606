"""The backend "dist_prims": what its collectives give, bit for bit, and what faults get."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import backend_of, children, spawn
from torch.distributed.distributed_c10d import AllgatherOptions
from values import COMPLEX, FLOAT8, FLOATS, INTEGERS, bits, equal, every_collective, held, noise

import dist_prims
from dist_prims.errors import CommTimeoutError, MismatchError, PeerDiedError, PeerLeftError

SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)]
Op = dist.ReduceOp


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_PRIMS_SLOT_BYTES", str(1 << 17))  # so that large is soon several segments


@pytest.mark.parametrize("size", SIZES)
def test_every_collective(size: int) -> None:
    def body() -> None:
        assert not backend_of().spans_hosts
        every_collective()

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


def test_every_type_is_moved() -> None:
    def body() -> None:
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
        gathered = torch.full((size * 5, 2), -1)
        dist.all_gather_into_tensor(gathered, held(rank, 10).view(-1, 2))
        equal(gathered.flatten(), torch.cat([held(peer, 10) for peer in range(size)]), "all_gather")
        sent, received = ([1, 2, 0], [1, 1, 1]), ([1], [2], [0])[rank] * size
        rows = torch.full((sum(received), 3), -1)
        dist.all_to_all_single(rows, torch.full((3, 3), rank), received, sent[0])
        assert rows.tolist() == [[peer] * 3 for peer in range(size) for _ in range(received[peer])]
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


@pytest.mark.parametrize("size", [1, 2])
def test_the_future_of_a_coalesced_all_gather_holds_the_outputs_of_each_rank(size: int) -> None:
    """The future once held the inputs. gloo's holds a list for each rank."""

    def body() -> None:
        rank, options = dist.get_rank(), AllgatherOptions()
        for options.asyncOp in (True, False):
            outputs = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
            inputs = [torch.full((2,), rank + 1.0), torch.full((1,), rank + 10.0)]
            future = dist.group.WORLD.allgather_coalesced(outputs, inputs, options).get_future()
            gathered = [[tensor.tolist() for tensor in of_rank] for of_rank in future.wait()]
            assert gathered == [[[1.0, 1.0], [10.0]], [[2.0, 2.0], [11.0]]][:size]

    spawn(body, size)


def ones(count: int = 5) -> torch.Tensor:
    return torch.ones(count)


# The calls of rank 0 and of rank 1, and what the error must name.
MISMATCHES: list[tuple[Callable[[], Any], Callable[[], Any], list[str]]] = [
    (lambda: dist.all_reduce(ones()), dist.barrier, ["all_reduce", "barrier", "call number"]),
    (lambda: dist.all_reduce(ones()), lambda: dist.all_reduce(ones(90_000)), ["5 el", "90000 el"]),
    (lambda: dist.all_reduce(ones()), lambda: dist.all_reduce(ones().int()), ["float32", "int32"]),
    (lambda: dist.all_reduce(ones()), lambda: dist.all_reduce(ones(), Op.MAX), ["SUM", "MAX"]),
    (lambda: dist.broadcast(ones(), 0), lambda: dist.broadcast(ones(), 1), ["root 0", "root 1"]),
]


def test_ranks_that_disagree_all_get_an_error_that_names_both_sides() -> None:
    def body() -> None:
        for one, two, words in MISMATCHES:
            with pytest.raises(MismatchError) as caught:
                (one if dist.get_rank() == 0 else two)()
            for word in ("Rank 0", "rank 1", *words):
                assert word in str(caught.value), caught.value
            tensor = ones()
            dist.all_reduce(tensor)  # the group goes on
            assert tensor.tolist() == [2.0] * 5

    spawn(body, 2)


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    def body() -> None:
        turned, expanded = torch.ones(4, 3).t(), torch.ones(1).expand(4)
        for call, words in (
            (lambda: dist.all_reduce(torch.ones(2), Op.BXOR), "BXOR cannot reduce float32: operations on bits need"),
            (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "not reduced; convert to bfloat16"),
            (lambda: dist.reduce(torch.ones(2).to(torch.complex32), 0), "not reduced; convert to complex64"),
            (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "1 tensors for a group of 2 ranks"),
            (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "cannot be shared evenly by 2 ranks"),
            # The blocks of 6 elements are no views of a transposed output with 3 rows.
            (lambda: dist.all_gather_into_tensor(turned, torch.ones(6)), r"all_gather: the output of shape \[3, 4\]"),
            (lambda: dist.all_to_all_single(turned, torch.ones(12)), r"all_to_all: the output of shape \[3, 4\]"),
            (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [-1, 4], [-1, 4]), r"split sizes \[-1, 4\]"),
            (lambda: dist.all_to_all_single(torch.ones([]), torch.ones([]), [0, 1], [0, 1]), r"shape \[\]; give 2"),
            # An expanded output once failed after the data had moved, and without the name of the call.
            (lambda: dist.all_reduce(expanded), "all_reduce: several elements of the tensor lie in one place"),
            (lambda: dist.all_gather_into_tensor(expanded, torch.ones(2)), "all_gather: several elements"),
            (lambda: dist.all_to_all_single(expanded, torch.ones(4)), "all_to_all: several elements"),
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


def test_nothing_stays_behind() -> None:
    before = children(), len(os.listdir("/proc/self/fd"))
    spawn(every_collective, 2)
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


def test_direct_calls_take_groups_of_this_backend_and_plain_tensors_only() -> None:
    """They read the objects of Python without the checks of pybind11."""

    class Members(dist.ProcessGroup):
        pass

    class Tensor(torch.Tensor):
        pass

    def body() -> None:
        from dist_prims import _backend

        tensor, world = torch.ones(2), dist.group.WORLD
        no_groups = (None, 3, dist.GroupMember.NON_GROUP_MEMBER, backend_of())
        in_python: Any = Members
        without_a_backend = (in_python(0, 1), in_python.__new__(in_python))  # the second is not initialised
        of_gloo = [dist.new_group(backend=name) for name in ("gloo", "cuda:gloo")]  # the second has none for the CPU
        others = (*no_groups, *without_a_backend, *of_gloo)
        # By the name of the function: its arguments before the group. Each tensor is replaced by each of `unsuitable`.
        calls: dict[str, tuple[Any, ...]] = {
            "all_reduce": (tensor, Op.SUM),
            "reduce_scatter": (tensor, tensor.clone(), Op.SUM),
            "all_gather": (tensor, tensor.clone()),
            "all_to_all": (tensor, tensor.clone()),
            "broadcast": (tensor, 0),
            "barrier": (),
        }
        gaps, graded, double = torch.ones(4)[::2], torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.double)
        unsuitable = (3, [tensor], gaps, graded, tensor.as_subclass(Tensor), torch.ones(2, device="meta"))
        for name, arguments in calls.items():
            call = getattr(_backend, name)
            for group in others:
                assert not call(*arguments, group), (name, group)
            assert call(*arguments, world)
            for wrong_number in ((), arguments, (*arguments, world, world)):
                assert not call(*wrong_number), (name, wrong_number)
            if name == "all_reduce":
                continue
            for place in (place for place, each in enumerate(arguments) if isinstance(each, torch.Tensor)):
                pair = () if name == "broadcast" else (double, torch.ones(3))  # another type, another length
                for each in (*unsuitable, *pair):
                    assert not call(*arguments[:place], each, *arguments[place + 1 :], world), (name, place, each)
        for root in (1, -1, 1 << 80, True, "0"):
            assert not _backend.broadcast(tensor, root, world), root
        assert not _backend.all_reduce(3, Op.SUM, world)
        assert _backend.all_reduce(tensor, dist.ReduceOp(Op.MAX), world)
        for call in (_backend.all_reduce, lambda *end: _backend.reduce_scatter(tensor.clone(), *end)):
            assert not call(tensor, "mean", world)
            with pytest.raises(TypeError, match="op is a ReduceOp or its name, not int"):
                call(tensor, 3, world)

    spawn(body, 1)


def test_ranks_may_differ_in_how_they_reach_the_backend() -> None:
    """A rank whose tensors have gaps makes a Call in Python; the others call the backend directly."""

    def body() -> None:
        rank = dist.get_rank()

        def tensor(*values: int) -> torch.Tensor:
            return torch.tensor([[value, -1] for value in values])[:, 0] if rank else torch.tensor(values)

        output, both = tensor(0), tensor(0, 0)
        dist_prims.all_gather(both, tensor(rank + 1))
        assert both.tolist() == [1, 2]
        dist_prims.all_to_all(both, tensor(10 * rank, 10 * rank + 1))
        assert both.tolist() == [rank, 10 + rank]
        dist_prims.reduce_scatter(output, tensor(rank, rank + 1))
        assert output.tolist() == [2 * rank + 1]
        dist_prims.broadcast(output)
        assert output.tolist() == [1]
        with pytest.raises(MismatchError, match="barrier"):
            dist_prims.barrier() if rank else dist_prims.all_to_all(both, tensor(1, 2))

    spawn(body, 2)
