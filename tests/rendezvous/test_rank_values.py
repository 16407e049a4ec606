"""Values that all ranks publish, and what they raise together; a thread of this process is a rank."""

from __future__ import annotations

import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dist_prims.backend import create, death_monitor, tcp_endpoint
from dist_prims.errors import PeerDiedError
from dist_prims.launch import join
from dist_prims.rendezvous import handshake, rank_values
from dist_prims.rendezvous.rank_values import packed, unpacked


def outcome(call: Any, *arguments: Any) -> str:
    try:
        return str(call(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_rank_0_ends_the_wait_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others waited for their timeout, and named rank 0 as missing."""

    def fails(*_: Any) -> list[str]:
        raise RuntimeError("a value is damaged")

    monkeypatch.setattr(rank_values, "values_at", fails)
    store = dist.HashStore()
    for rank in range(3):
        store.set(f"name/{rank}", "text")
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda rank: outcome(rank_values.values_of_ranks, store, rank, "name", 3), range(3))]
    assert found == [
        "RuntimeError: a value is damaged",
        "RuntimeError: rank 1: a value is damaged",
        "RuntimeError: rank 2: a value is damaged",
    ]


class LateStore:
    """A store whose first read ends by its timeout just before the value comes."""

    def __init__(self, key: str, value: str) -> None:
        self.store, self.late = dist.HashStore(), [(key, value)]

    def _read(self, name: str, *arguments: Any) -> Any:
        if self.late:
            self.store.set(*self.late.pop())
            raise RuntimeError("wait timeout")
        return getattr(self.store, name)(*arguments)

    def get(self, key: str) -> bytes:
        return self._read("get", key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._read("multi_get", keys)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)


def test_a_value_that_comes_as_the_wait_ends_is_read() -> None:
    """The error was torch's, with the name of a key instead of the late rank."""
    assert rank_values.values_at(LateStore("name/1", "text"), 0, {1: "name/1"}) == ["text"]
    late = LateStore("name", f"={packed(['a', 'b'])}")
    assert rank_values.values_of_ranks(late, 1, "name", 2) == ["a", "b"]


def test_a_damaged_text_of_all_ranks_names_its_key() -> None:
    for text in ("no text of this kind", packed(["a"])[:-3], ""):
        with pytest.raises(RuntimeError, match="the value of 'tcp' in the store was not written by a rank"):
            unpacked(text, "tcp")


@pytest.mark.parametrize("reason", ["[Errno 24] Too many open files", "GLOO_SOCKET_IFNAME=x: no such interface"])
def test_a_rank_without_an_address_is_named(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of an OSError begins with a bracket, and was read as a list of addresses."""
    good = tcp_endpoint.describe_addresses()

    def fails() -> list[str]:
        raise OSError(reason)

    monkeypatch.setattr(tcp_endpoint, "own_addresses", fails)
    monkeypatch.setenv("MASTER_ADDR", "not known yet")
    bad = tcp_endpoint.describe_addresses()
    family, problem = tcp_endpoint.choose_family([good, bad], None)
    assert (family, problem) == ("", f"rank 1 has no address for the ranks of other hosts: {reason}")


def test_addresses_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group looked up MASTER_ADDR, twice between hosts; where no server answers, a repair waited for it."""
    lookups = itertools.count()
    monkeypatch.setenv("MASTER_ADDR", "a name of this test")
    monkeypatch.setattr(tcp_endpoint, "own_addresses", lambda: [f"10.0.0.{next(lookups)}"])
    described = {tcp_endpoint.describe_addresses() for _ in range(3)}
    assert described == {'{"addresses": ["10.0.0.0"]}'}
    assert tcp_endpoint.address_of_family(described.pop(), "IPv4") == "10.0.0.0"


def test_ranks_compare_digests_of_their_lists_and_show_two_that_differ() -> None:
    """The lists of 8,000 ranks, each of 8,000 numbers, would take 5 GB on each rank."""
    ranks = [*range(1000, 1032)]
    for unlike in (None, 31):
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=20))
        lists = [ranks[::-1] if rank == unlike else ranks for rank in range(32)]
        with ThreadPoolExecutor(32) as threads:
            found = [*threads.map(lambda rank: outcome(create._compare_ranks, store, rank, lists[rank]), range(32))]  # noqa: B023
        assert len(store.get("ranks/1")) == 64
        for rank, text in enumerate(found):
            other = 0 if rank == unlike else unlike
            expected = f"was given the global ranks {lists[rank]}, and rank {other} {lists[other or 0]}; pass"
            assert text == "None" if unlike is None else expected in text, text


def test_rank_0_waits_until_all_have_read_that_backends_differ() -> None:
    """Rank 0 serves the store, which ended with it before another rank had read the backends."""
    store = dist.HashStore()
    store.set("backend/1", "dist_prims")
    with ThreadPoolExecutor(1) as threads:
        place = SimpleNamespace(rank=0, size=2, local_rank=0)
        rank_0 = threads.submit(outcome, join._agreed_backend, "gloo", place, SimpleNamespace(store=store))
        store.wait(["backend"])
        time.sleep(0.2)
        assert not rank_0.done()
        store.set("backend/read/1", "")
        assert "rank 0 has the backend 'gloo', and rank 1 has 'dist_prims'" in rank_0.result()


def test_rank_0_does_not_wait_for_a_reader_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 publishes its value and dies, rank 3 dies without one. Rank 0 waited for 10 s for rank 2 to read."""
    monkeypatch.setattr(rank_values, "SECONDS_FOR_READERS", 200)
    monitor = death_monitor.DeathMonitor(0, lambda: [2, 3])
    store = dist.HashStore()
    for published in range(3):
        store.set(f"name/{published}", "text")
    keys = create._TemporaryKeys(store, [], monitor)
    with ThreadPoolExecutor(1) as threads:
        rank_0 = threads.submit(outcome, rank_values.values_of_ranks, keys, 0, "name", 4)
        assert "no sign of rank 3" in outcome(rank_values.values_of_ranks, store, 1, "name", 4)
        assert "no sign of rank 3" in rank_0.result(60)


def test_rank_0_does_not_wait_for_a_rank_that_has_found_the_death_itself() -> None:
    """It waited 10 s for the note that this rank has read the error, if both found the death at the same time."""
    store = dist.HashStore()
    store.set("name", "!rank 2 has died")
    monitor = death_monitor.DeathMonitor(1, lambda: [2])
    with pytest.raises(PeerDiedError, match="rank 1: rank 2 has died"):
        rank_values.values_of_ranks(create._TemporaryKeys(store, [], monitor), 1, "name", 3)
    assert store.check(["name/read/1"])


def test_hosts_whose_text_is_too_long_end_the_handshake_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 went on, and the other ranks read the text again and again until their deadline."""
    store = dist.HashStore()
    monkeypatch.setattr(handshake, "_LONGEST", 400)
    monkeypatch.setattr(handshake, "packed", lambda hosts: "x" * 500)

    def meet(rank: int) -> str:
        return outcome(handshake.handshake, store, rank, 2, time.monotonic() + 20, None, "0")

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(meet, range(2))]
    reason = r"RuntimeError: rank 0: the hosts of 2 ranks need \d+ bytes of text; give the ranks of each"
    assert re.match(reason, found[0]), found
    assert re.match(f"RuntimeError: .*rank 1: the group is not created, .* failed: {reason}", found[1]), found
