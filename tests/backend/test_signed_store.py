"""The store whose values carry codes: what its ranks read back, and what they do not accept."""

from __future__ import annotations

import hmac
import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import free_port

import dist_prims
from dist_prims.backend import tcp_endpoint
from dist_prims.backend.extension import extension

KEY = b"the key of an attempt"


def signed(store: dist.Store, key: bytes = KEY) -> dist.Store:
    return extension().SignedStore(store, key)


def code(key: bytes, name: str, value: bytes) -> bytes:
    return hmac.digest(key, f"{len(name.encode())} {name}".encode() + value, "sha256")


def test_codes_are_those_of_python() -> None:
    inner = dist.HashStore()
    for count in [*range(200), 1000, 100_000]:
        for key in (b"", b"k" * count):
            value = bytes(each % 256 for each in range(count))
            signed(inner, key).set(f"n{count}", value.decode("latin-1"))
            stored = inner.get(f"n{count}")
            assert stored == stored[:-32] + code(key, f"n{count}", stored[:-32])
            assert signed(inner, key).get(f"n{count}") == stored[:-32]


def test_values_come_back() -> None:
    inner = dist.HashStore()
    store: Any = signed(inner)
    store.set("a", "1")
    store.multi_set(["b", "c"], ["2", ""])
    assert [store.get("a"), *store.multi_get(["b", "c"])] == [b"1", b"2", b""]
    assert store.clone().get("a") == b"1"
    assert dist.PrefixStore("p", store).underlying_store is not None
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("a", "3")
    assert (prefixed.get("a"), store.get("a"), store.get("p/a")) == (b"3", b"1", b"3")
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.compare_set("d", "", "4") == b"4"
    assert store.compare_set("d", "x", "5") == b"4"
    assert store.compare_set("d", "4", "5") == b"5"
    assert store.check(["a", "b"])
    assert not store.check(["a", "z"])
    assert store.delete_key("a")
    store.wait(["b"], timedelta(seconds=1))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.wait(["a"], timedelta(milliseconds=10))
    store.set_timeout(timedelta(seconds=7))
    assert inner.timeout == timedelta(seconds=7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"1",
        b"2" * 32,
        b"2" + code(KEY, "a", b"1"),  # another value
        b"1" + code(KEY, "b", b"1"),  # of another key
        b"1" + code(b"another key", "a", b"1"),
        b"1" + code(KEY, "a", b"1") + b"0",
        b"1" + code(KEY, "a", b"1")[:-1],
    ],
)
def test_a_forged_value_is_refused(forged: bytes) -> None:
    inner = dist.HashStore()
    store = signed(inner)
    store.set("b", "right")
    inner.set("a", forged)  # type: ignore[arg-type]  # takes bytes too
    for read in (lambda: store.get("a"), lambda: store.multi_get(["b", "a"])):
        with pytest.raises(dist.DistStoreError, match="the value of 'a' in the store was not written by a rank"):
            read()


def test_a_value_cannot_be_appended_to() -> None:
    with pytest.raises(RuntimeError, match="cannot append"):
        signed(dist.HashStore()).append("a", "1")  # type: ignore[attr-defined]


needs_list_keys = pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list keys")


def make_group(port: int, seconds: float) -> None:
    """A group of two hosts whose ranks meet at a TCPStore of this host."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(DIST_PRIMS_HOST_ID="ab"[rank], DIST_PRIMS_TRANSPORT="tcp")
    url, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=seconds)
    dist.init_process_group("dist_prims", init_method=url, rank=rank, world_size=2, timeout=limit)


def at_store(port: int) -> dist.TCPStore:
    """Another process at the store of the ranks, which reads and writes what it wants."""
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=10))


@needs_list_keys
def test_the_address_of_a_rank_cannot_be_replaced() -> None:
    """Rank 0 alone said so, and rank 1 waited for its timeout and named rank 0."""
    port = free_port()

    def rank() -> str:
        make = tcp_endpoint.make

        def replacing(store: Any, rank: int, *rest: Any) -> Any:
            if rank == 1:
                store.wait(["tcp/0"])
                other = at_store(port)
                (key,) = (each for each in other.list_keys() if each.endswith("/tcp/0"))
                other.set(key, "127.0.0.1:1")
            return make(store, rank, *rest)

        tcp_endpoint.make = replacing  # type: ignore[assignment]
        with pytest.raises(RuntimeError) as caught:
            make_group(port, 5)
        return str(caught.value)

    refused, learned = dist_prims.spawn(rank, 2, timeout=100)
    assert refused.startswith("the value of 'tcp/0' in the store was not written by a rank of this group")
    assert learned.startswith(f"rank 1: {refused[:60]}")


@needs_list_keys
def test_the_store_shows_no_key() -> None:
    """The key of connections is in no value that other processes can read, and every text of the group is signed."""
    port = free_port()

    def rank() -> tuple[str, dict[str, bytes]]:
        make, keys, found = tcp_endpoint.make, [], dict[str, bytes]()

        def looking(*arguments: Any) -> Any:
            made, other = make(*arguments), at_store(port)
            keys.append(arguments[-1])
            names = [name for name in other.list_keys() if not re.search("/(hello|welcome|acknowledged)/", name)]
            found.update((name, other.get(name)) for name in names)  # before the ranks delete them
            return made

        tcp_endpoint.make = looking  # type: ignore[assignment]
        make_group(port, 30)
        dist.all_reduce(torch.ones(1))
        other = at_store(port)
        dist.barrier()
        left = [name for name in other.list_keys() if "/tcp/" in name]
        found.update((name, other.get(name)) for name in other.list_keys())
        dist.barrier()
        assert not left
        return keys[0], found

    (first, values), (second, _) = dist_prims.spawn(rank, 2, timeout=100)
    assert first == second
    assert len(first) == 64
    assert not [key for key, value in values.items() if first.encode() in value or bytes.fromhex(first) in value]
    own = [key for key in values if re.search(r"dist_prims/[0-9a-f]{16}/(?!acknowledged|hosts)", key)]
    assert [key for key in own if key.endswith("/tcp/0")]
    assert not [key for key in own if len(values[key]) < 32]
