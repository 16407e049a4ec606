"""What passes through the store while a group is made, for more ranks than a test can start.

Rank 0 and the last rank run the code of the library. What the ranks between them write is there before, written by the
functions that these ranks would call.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dist_prims.backend import create
from dist_prims.backend.origin import GroupRequest, Origin, Repairs
from dist_prims.rendezvous import handshake
from dist_prims.rendezvous.handshake import signed
from dist_prims.rendezvous.rank_values import values_of_ranks
from dist_prims.rendezvous.secret import Secret

SECRET = Secret(b"s" * 32, "a test")


class CountingClient:
    """A client of a store that counts the bytes of keys and values."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.bytes = store, 0

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            result = getattr(self._store, name)(*arguments)
            self.bytes += size_of(arguments) + size_of(result)
            return result

        return request


def size_of(thing: Any) -> int:
    if isinstance(thing, list | tuple):
        return sum(map(size_of, thing))
    return len(thing) if isinstance(thing, str | bytes) else 1


def bytes_of_clients(hosts: int, ranks: int) -> tuple[int, int]:
    """Do the steps of a new group of ``hosts`` hosts with ``ranks`` ranks each that use the store.

    Return the bytes that rank 0 has exchanged with the store, and the last rank.
    """
    size, draw, store = hosts * ranks, random.Random(1), dist.HashStore()
    first, last = CountingClient(store), CountingClient(store)
    request = GroupRequest(
        store, "0", 0, size, timedelta(seconds=60), [], None, Origin.LAUNCHED, Repairs(print, str, print)
    )
    decide = functools.partial(create._decide, request, "tcp", True)
    rank_0 = handshake._Rank0(first, size, SECRET, '{"addresses": ["10.0.0.7"]}', decide)  # type: ignore[arg-type]
    other = handshake._OtherRank(last, size - 1, size, SECRET, '{"addresses": ["10.0.0.7"]}')  # type: ignore[arg-type]
    # 1. What the other ranks write.
    names = [f"node{host:05}-{draw.randbytes(8).hex()}" for host in range(hosts)]
    for rank in range(1, size - 1):
        host, token = rank // ranks, draw.randbytes(8).hex()
        address = f"10.{host >> 8}.{host & 255}.7"
        texts = token, names[host], handshake.version(), json.dumps({"addresses": [address]})
        store.set(f"hello/{rank}", signed(SECRET, ("hello", rank, size), *texts))
        acknowledgement = signed(SECRET, ("acknowledgement", rank, token), rank_0._name)
        store.set(f"{rank_0._name}/acknowledged/{rank}", acknowledgement)
        ports = draw.sample(range(32768, 61000), 2)
        store.set(f"tcp/{rank}", " ".join(f"{address}:{port}" for port in ports))
    # 2. What rank 0 and the last rank do.
    with ThreadPoolExecutor(2) as threads:
        deadline = time.monotonic() + 60
        of_rank_0, of_other = (threads.submit(side.join, deadline, lambda: None) for side in (rank_0, other))
        meeting = of_rank_0.result()
        assert of_other.result() == meeting
        assert len(meeting.hosts) == size
        for rank in (0, size - 1):
            store.set(f"tcp/{rank}", "10.0.0.7:40000 10.0.0.7:40001")
        values = [
            *threads.map(lambda client, rank: values_of_ranks(client, rank, "tcp", size), (first, last), (0, size - 1))
        ]
    assert values[0] == values[1]
    return first.bytes, last.bytes


@pytest.mark.parametrize(
    ("hosts", "ranks", "most"),
    [
        (8, 1, 1_500),
        (8, 8, 2_000),
        (1_000, 8, 100_000),
        pytest.param(12_500, 8, 1_000_000, marks=pytest.mark.slow),
    ],
)
def test_a_rank_reads_some_10_bytes_for_each_rank_of_a_large_group(hosts: int, ranks: int, most: int) -> None:
    """Each rank asked for the address of every rank by a key of its own: 0.9 MB for 1,000 hosts of 8 ranks, which the
    store of rank 0 sent 8,000 times."""
    of_rank_0, of_last = bytes_of_clients(hosts, ranks)
    assert of_last <= most
    assert of_rank_0 / (hosts * ranks) + of_last <= most + 1_000  # rank 0 reads and answers three texts of each rank


def test_a_rank_that_waits_a_minute_for_rank_0_does_not_repeat_its_hello_with_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wrote its hello every 0.1 s: 129 KB in a minute, more than it reads for a group of 1,000 hosts."""
    now = 0.0

    def look_for_a_minute(done: Callable[[], bool], deadline: float, awaited: str) -> None:
        nonlocal now
        for _ in range(600):
            assert not done()
            now += 0.1
        raise TimeoutError(awaited)

    monkeypatch.setattr(handshake, "until", look_for_a_minute)
    monkeypatch.setattr(handshake, "time", SimpleNamespace(monotonic=lambda: now))
    client = CountingClient(dist.HashStore())
    rank = handshake._OtherRank(client, 7_999, 8_000, SECRET, '{"addresses": ["10.0.0.7"]}')  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="no sign of"):
        rank.join(60.0, lambda: None)
    assert client.bytes < 30_000
