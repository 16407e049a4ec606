"""The store whose values carry codes: what its ranks read back, and what they do not accept."""

from __future__ import annotations

import hmac
from datetime import timedelta

import pytest
import torch.distributed as dist

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
    store = signed(inner)
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
    assert inner.timeout == timedelta(seconds=7)


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
        signed(dist.HashStore()).append("a", "1")
