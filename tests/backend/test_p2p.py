"""send and recv of the backend: in no order with the collectives, by tag and from anyone, and what goes wrong."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import span, spawn
from values import equal

import dist_prims
from dist_prims.errors import PeerDiedError, PeerLeftError

LAYOUTS = ["a a", "a b"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_of_one_tag_keep_their_order(layout: str) -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            for number in range(200):
                dist.send(torch.tensor(number), 1, tag=number % 2)
        else:
            found = torch.zeros(200, dtype=torch.int64)
            for tag in (1, 0):
                for number in range(tag, 200, 2):
                    dist.recv(found[number], 0, tag=tag)
            equal(found, torch.arange(200), "order")

    span(layout, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_every_type_and_shape(layout: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.complex128, torch.bool, torch.int16):
            given = torch.arange(24).to(dtype).view(4, 6)
            for view in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1]):
                found = view(torch.zeros(4, 6).to(dtype))
                works = [dist.isend(view(given), 1 - rank), dist.irecv(found, 1 - rank)]
                for work in works:
                    work.wait()
                assert torch.equal(found.to(torch.complex128), view(given).to(torch.complex128)), dtype

    span(layout, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_messages_and_collectives_do_not_wait_for_each_other(layout: str) -> None:
    def body() -> None:
        found = torch.zeros(300_000)
        if dist.get_rank() == 0:
            receive = dist.irecv(found, 1)
            dist.all_reduce(torch.ones(3))
            receive.wait()
            assert found.sum() == 300_000
        else:
            dist.all_reduce(torch.ones(3))
            dist.send(torch.ones(300_000), 0)

    span(layout, body)


def test_messages_arrive_although_no_thread_waits() -> None:
    """A message of many times the lane, and each rank busy with something else until it is there."""

    def body() -> None:
        found = torch.zeros(1_000_000)
        works = [dist.isend(torch.ones(1_000_000), 1 - dist.get_rank()), dist.irecv(found, 1 - dist.get_rank())]
        deadline = time.monotonic() + 30
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert found.sum() == 1_000_000

    spawn(body, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_have_their_own_messages(layout: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        groups = [dist.new_group() for _ in range(3)]
        if rank == 0:
            for number, group in reversed(list(enumerate(groups))):
                dist.send(torch.tensor(number), 1, group=group)
        else:
            for number, group in enumerate(groups):
                found = torch.tensor(-1)
                dist.recv(found, 0, group=group)
                assert found.item() == number

    span(layout, body)


@pytest.mark.parametrize("kind", ["recv", "send"])
def test_a_peer_that_dies_is_named(kind: str) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.zeros(1_000_000)  # more than the lane holds
        began = time.monotonic()
        with pytest.raises(PeerDiedError, match=rf"rank 1 \(process \d+\) has died in {kind}\(4000000 bytes"):
            dist.send(data, 1) if kind == "send" else dist.recv(data, 1)
        assert time.monotonic() - began < 20

    with pytest.raises(dist_prims.launch.RankFailedError, match="rank 1"):
        spawn(body, 2)


def test_what_was_sent_before_leaving_is_received() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            dist.send(torch.ones(100), 0)
            dist.destroy_process_group()
            return
        time.sleep(0.3)
        found = torch.zeros(100)
        dist.recv(found, 1)
        assert found.sum() == 100
        with pytest.raises(PeerLeftError, match="rank 1 has left the group in recv"):
            dist.recv(found, 1)

    spawn(body, 2)
