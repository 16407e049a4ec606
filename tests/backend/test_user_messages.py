"""Messages of users in groups that span hosts, over TCP and UCX: through shared memory to ranks of this host, and from
any rank of both kinds. test_multi_host.py has what holds over MPI as well."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import press_ctrl_c_soon, span, store
from torch._C._distributed_c10d import FakeProcessGroup
from values import equal

from dist_prims.backend import create
from dist_prims.errors import CommError, CommTimeoutError, MismatchError, PeerDiedError, PeerLeftError
from dist_prims.launch import RankFailedError

SIZES = (0, 1, 7, 1000, 20_000, 500_000)  # elements


pytestmark = pytest.mark.usefixtures("host_transport")


def content(sender: int, receiver: int, number: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 1000 + 1e6 * sender + 1e4 * receiver + number


@pytest.mark.parametrize(("layout", "seed"), [("a a b b c", 0), ("a a b b c", 1), ("a a a a", 2)])
def test_a_random_exchange(layout: str, seed: int) -> None:
    """Every rank posts its sends and receives in an order of its own, and waits for them in another."""

    def body() -> None:
        plan = random.Random(seed)  # the same on all ranks
        rank, size = dist.get_rank(), dist.get_world_size()
        messages = [
            (sender, receiver, number, plan.choice(SIZES))
            for number in range(60)
            for sender, receiver in [plan.sample(range(size), 2)]
        ]
        mine = [each for each in messages if rank in each[:2]]
        own = random.Random(rank)
        own.shuffle(mine)
        works, inbox = [], []
        for sender, receiver, number, count in mine:
            if rank == sender:
                works.append(dist.isend(content(sender, receiver, number, count), receiver, tag=number))
            else:
                inbox.append((content(sender, receiver, number, count), torch.zeros(count)))
                works.append(dist.irecv(inbox[-1][1], sender, tag=number))
        own.shuffle(works)
        for work in works:
            work.wait()
            assert work.is_completed()
        for expected, found in inbox:
            equal(found, expected, "a message")

    span(layout, body)


@pytest.mark.parametrize("layout", ["a a b b c", "a a a a"])
def test_from_any_rank_of_this_host_and_of_others(layout: str) -> None:
    """Each message meets one receive, whose source is its sender, also beside receives from one rank."""

    def body() -> None:
        rank, size, count = dist.get_rank(), dist.get_world_size(), 40
        if rank:
            for number in range(count):
                dist.send(torch.full((1 + 3000 * (number % 2),), 100.0 * rank + number), 0, tag=number % 2)
            dist.send(torch.full((5,), float(rank)), 0, tag=7)
            return
        found: Counter[float] = Counter()
        last = torch.zeros(5)
        named = dist.irecv(last, size - 1, tag=7)
        for tag in (1, 0):
            tensor = torch.zeros(1 + 3000 * tag)
            for _ in range(count // 2 * (size - 1)):
                source = dist.recv(tensor, tag=tag)
                assert source == int(tensor[0] // 100)
                assert (tensor == tensor[0]).all()
                found[tensor[0].item()] += 1
        assert found == Counter(100.0 * each + number for each in range(1, size) for number in range(count))
        named.wait()
        assert (last == size - 1).all()
        others = {dist.recv(torch.zeros(5), tag=7) for _ in range(size - 2)}
        assert others == set(range(1, size - 1))

    span(layout, body)


def test_messages_that_no_thread_waits_for() -> None:
    """They end, their callbacks run, and a small one comes although a large one before it has no receive yet. Works
    that are dropped are sent, too."""

    def body() -> None:
        rank = dist.get_rank()
        peer = 2 if rank == 0 else 0
        if rank == 0:
            dist.isend(torch.full((2_000_000,), 3.0), peer, tag=1)
            dist.isend(torch.full((3,), 4.0), peer, tag=2)
            dist.recv(torch.zeros(1), peer)
        elif rank == 2:
            small, any_of_all, large = torch.zeros(3), torch.zeros(3), torch.zeros(2_000_000)
            called = threading.Event()
            work, from_any = dist.irecv(small, 0, tag=2), dist.irecv(any_of_all, tag=3)
            work.get_future().then(lambda _: called.set())
            assert called.wait(20)
            assert (small == 4).all()
            until = time.monotonic() + 20
            while not from_any.is_completed():
                assert time.monotonic() < until
                time.sleep(0.01)
            assert (any_of_all == 5).all()
            dist.recv(large, 0, tag=1)
            assert (large == 3).all()
            dist.send(torch.zeros(1), 0)
        else:
            dist.isend(torch.full((3,), 5.0), 2, tag=3)

    span("a b b", body)


def test_many_threads_and_collectives_at_once() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        errors: list[BaseException] = []

        def pass_on(tag: int) -> None:
            try:
                tensor = torch.zeros(5000 * tag + 1)
                for number in range(30):
                    sent = dist.isend(torch.full_like(tensor, number + rank), (rank + 1) % size, tag=tag)
                    dist.recv(tensor, (rank - 1) % size, tag=tag)
                    sent.wait()
                    assert (tensor == number + (rank - 1) % size).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=pass_on, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            total = torch.ones(3000)
            dist.all_reduce(total)
            assert (total == size).all()
        for thread in threads:
            thread.join()
        assert not errors

    span("a a b", body)


@pytest.mark.parametrize(("layout", "receiver"), [("a a b", 1), ("a a b", 2), ("a a", 1)])
def test_a_message_of_another_length_is_an_error_of_its_receiver(layout: str, receiver: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        if rank == 0:
            for count in (3, 5, 4):
                dist.send(torch.ones(count), receiver)
        elif rank == receiver:
            for source in (0, None):
                with pytest.raises(MismatchError, match=r"rank 0 has sent .*(12|20) .*16 bytes.* must be of one size"):
                    dist.recv(torch.zeros(4), source)
            tensor = torch.zeros(4)
            dist.recv(tensor, 0)
            assert (tensor == 1).all()
        dist.barrier()  # the group goes on

    span(layout, body)


@pytest.mark.parametrize("waits_for", [3, None])
def test_the_death_of_a_rank_ends_what_waits_for_it(waits_for: int | None) -> None:
    """A receive from any rank waits for all: it ends when a rank of its own host that waits knows of the death."""

    def body() -> None:
        rank = dist.get_rank()
        dist.barrier()
        if rank == 3:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerDiedError, match="rank 3 on host b"):
            dist.recv(torch.zeros(3), waits_for if rank == 0 else 3)
        assert time.monotonic() - began < 10

    with pytest.raises(RankFailedError, match="rank 3"):
        span("a a b b", body)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_receive_from_any_rank_where_another_host_has_no_rank_left(is_killed: bool) -> None:
    """A server of parameters waited for a dead worker until its timeout: no rank waited for that worker only."""

    def body() -> None:
        rank = dist.get_rank()
        if rank > 0:
            dist.send(torch.full((3,), float(rank)), 0)
            dist.recv(torch.zeros(3), 0)
        if rank == 1:
            return os.kill(os.getpid(), signal.SIGKILL) if is_killed else dist.destroy_process_group()
        if rank == 2:
            store().wait(["raised"]) if is_killed else time.sleep(1)
            with contextlib.suppress(PeerDiedError):  # this rank is alive, and the group may not be
                dist.send(torch.zeros(3), 0)
            return None
        assert {dist.recv(torch.zeros(3)), dist.recv(torch.zeros(3))} == {1, 2}
        dist.send(torch.zeros(3), 2)
        dist.send(torch.zeros(3), 1)
        if not is_killed:
            assert dist.recv(torch.ones(3)) == 2  # which comes after rank 1 has left
            return None
        with pytest.raises(PeerDiedError, match=r"rank 1 on host b .* in recv\(12 bytes from any rank"):
            dist.recv(torch.zeros(3))
        store().set("raised", "")
        return None

    with pytest.raises(RankFailedError, match="rank 1") if is_killed else contextlib.nullcontext():
        span("a b c", body)


def test_an_abort_by_another_thread_is_reported_to_other_hosts() -> None:
    """The thread that aborts leaves the group. The notice of the thread that it interrupts comes after that."""

    def body() -> None:
        peer = 1 - dist.get_rank()
        dist.send(torch.ones(3), peer)
        dist.recv(torch.ones(3), peer)
        if peer == 1:
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            threading.Timer(0.3, backend.abort).start()
        began = time.monotonic()
        with pytest.raises(PeerLeftError, match="rank 0"):
            dist.recv(torch.ones(3), peer)
        assert time.monotonic() - began < 10
        # Until then the connections of rank 0 stay open.
        store().wait(["raised"]) if peer == 1 else store().set("raised", "")

    span("a b", body)


def send_and_meet() -> None:
    dist.send(torch.ones(3), 0)
    dist.barrier()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "source"), [("a a b", 2), ("a a b", None), ("a a a", 2)])
def test_a_limit_ends_the_wait_and_the_group(layout: str, source: int | None) -> None:
    wait = r"recv\(12 bytes from (rank 2( on host b)?|any rank), tag 0\)"

    def body() -> None:
        if dist.get_rank() == 0:
            tensor = torch.zeros(3)
            work = dist.irecv(tensor, source)
            with pytest.raises(CommTimeoutError, match=wait):
                work.wait(timedelta(milliseconds=300))
            store().set("raised", "")
            store().wait(["sent 1", "sent 2"])
            time.sleep(0.2)
            assert not tensor.any()  # nothing is written late
        else:
            store().wait(["raised"])
            with pytest.raises((PeerDiedError, CommTimeoutError)):
                send_and_meet()
            store().set(f"sent {dist.get_rank()}", "")

    span(layout, body)


@pytest.mark.parametrize("source", [1, None])
def test_ctrl_c_ends_a_wait_for_a_message(source: int | None) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            store().wait(["interrupted"])
            return
        press_ctrl_c_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.ones(3), source)
        store().set("interrupted", "")

    span("a b", body)


def test_destroyed_with_messages_in_flight() -> None:
    def body() -> None:
        works = [dist.irecv(torch.ones(3), 1 - dist.get_rank(), tag=5), dist.irecv(torch.ones(3))]
        dist.barrier()
        began = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - began < 5
        for work in works:
            with pytest.raises(RuntimeError, match=r"left|destroyed"):
                work.wait()

    span("a b", body)


def test_batches_of_cpu_messages_in_a_group_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch coalesces a batch where the group has NCCL, whose place a backend of torch that sends nothing has here.

    Past bug: the Works of the messages were lost, so a receive was not awaited.
    """

    def body() -> None:
        fake = FakeProcessGroup._create_internal(dist.get_rank(), 2)
        monkeypatch.setattr(create, "_nccl", lambda store, rank, size, timeout: fake)
        group: Any = dist.new_group()
        assert group._get_backend(torch.device("cpu")).supports_coalescing
        rank = dist.get_rank()
        if rank == 1:
            time.sleep(0.3)  # the receive of rank 0 is unfinished when its batch returns
        received = torch.zeros(100_000)
        operations = [
            dist.P2POp(dist.isend, torch.full((100_000,), float(rank)), 1 - rank, group),
            dist.P2POp(dist.irecv, received, 1 - rank, group),
        ]
        (work,) = dist.batch_isend_irecv(operations)
        assert work.wait()
        assert received.eq(1 - rank).all()
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1 - rank, group)])
        group.abort()
        with pytest.raises(CommError):
            work.wait()
        assert work.exception() is not None

    span("a a", body)
