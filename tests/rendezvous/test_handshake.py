"""The handshake of the ranks, here threads with one store, while other processes write to the store."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dist_prims.rendezvous import handshake as module
from dist_prims.rendezvous.handshake import handshake
from dist_prims.rendezvous.secret import REMEDY, Secret

OURS, THEIRS = Secret(b"o" * 32, "a test"), Secret(b"t" * 32, "a test")


def join(
    store: dist.Store, rank: int, secret: Secret | None, size: int = 2, seconds: float = 20, group: str = "0"
) -> Any:
    return handshake(store, rank, size, time.monotonic() + seconds, secret, group)[:2]


@contextmanager
def repeatedly(act: Callable[[], None]) -> Iterator[None]:
    """Another process, which acts again and again."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.001):
            act()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(run)
        try:
            yield
        finally:
            stop.set()
        done.result()


@pytest.mark.parametrize(("kind", "secret"), [("hash", None), ("hash", OURS), ("tcp", OURS)])
def test_ranks_find_each_other_and_delete_their_keys(kind: str, secret: Secret | None) -> None:
    """A process that makes groups over and over would otherwise keep three keys of each rank for each group."""
    make: dict[str, Callable[[], Any]] = {
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    store = make[kind]()
    before, names = store.num_keys(), set()
    for attempt in range(1, 4):  # each time there is what the attempts before have left
        with ThreadPoolExecutor(4) as threads:
            found = [*threads.map(lambda rank: join(store.clone(), rank, secret, 4), range(4))]
        assert found == [found[0]] * 4
        assert len(found[0][1]) == 4
        names.add(found[0][0])
        assert store.num_keys() - before == attempt  # the hosts
    assert len(names) == 3


def test_all_ranks_name_the_missing_ones() -> None:
    """Rank 1 said "no sign of the last ranks"."""
    store = dist.HashStore()

    def error(rank: int) -> str:
        with pytest.raises(TimeoutError) as caught:
            join(store, rank, None, size=4, seconds=1)
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(error, (0, 1))] == ["no sign of ranks [2, 3]"] * 2


def test_rank_0_names_the_ranks_that_do_not_acknowledge() -> None:
    """It said "no acknowledgement of a rank". Here rank 2 ends after its hello."""
    store = dist.HashStore()
    store.set("hello/2", module.signed(OURS.of_group("0"), ("hello", 2, 3), "0" * 16, "host", module.version(), ""))
    with ThreadPoolExecutor(1) as threads:
        rank_1 = threads.submit(join, store, 1, OURS, 3, 2)
        with pytest.raises(TimeoutError, match=r"^no acknowledgement of ranks \[2\]$"):
            join(store, 0, OURS, 3, 1)
        with pytest.raises(TimeoutError, match="no sign of rank 0, which may itself wait"):
            rank_1.result()


_THREAD = threading.local()  # its version: that of the rank


def joined_as(version: str, store: dist.Store, rank: int, size: int) -> str:
    """Join as a rank of this version; return the text of the error, "" without one."""
    _THREAD.version = version
    try:
        join(store, rank, OURS, size)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("other", ["dist_prims 9 (protocol 9)", "an earlier version"])
def test_ranks_of_unlike_versions_are_refused_by_all_that_know_of_versions(
    other: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such ranks would misread each other's messages. A rank from before protocol 1 sends no version."""

    def signed_by_version(secret: Secret | None, context: tuple[str | int, ...], *texts: str) -> str:
        if _THREAD.version == "an earlier version":
            texts = {"hello": texts[:2], "hosts": texts[:-1]}.get(str(context[0]), texts)
        return signed(secret, context, *texts)

    signed = module.signed
    monkeypatch.setattr(module, "version", lambda: _THREAD.version)
    monkeypatch.setattr(module, "signed", signed_by_version)
    store = dist.HashStore()
    versions = ["dist_prims 8 (protocol 8)"] * 3
    versions[place] = other
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda rank: joined_as(versions[rank], store, rank, 3), range(3))]
    for rank in range(3):
        unlike = place or (rank if other == "an earlier version" else 1)
        expected = (
            f"rank {rank}: the group cannot be made: rank 0 has {versions[0]}, and rank {unlike} has "
            f"{versions[unlike]}; install the same version of dist_prims for all ranks, and start them again"
        )
        assert versions[rank] == "an earlier version" or found[rank] == expected


@pytest.mark.parametrize(
    ("secrets", "first", "second", "warning"),
    [
        (
            (OURS, None),
            r"TimeoutError: no sign of ranks \[1\]; a process that came as rank 1 has no secret; give all",
            "RuntimeError: rank 1 of 2 cannot join: rank 0 has a secret, and this rank has none; give",
            "rank 0 refuses a process as rank 1 of 2: it has no secret",
        ),
        (
            (OURS, THEIRS),
            ".* a process that came as rank 1 has another secret than rank 0",
            "TimeoutError: no sign of rank 0; rank 1 of 2 cannot join: rank 0 has another secret",
            "rank 0 refuses a process as rank 1 of 2: it has another secret",
        ),
        (
            (None, OURS),
            re.escape(f"RuntimeError: rank 1 of 2 has a secret, and rank 0 has none; {REMEDY}"),
            ".* this rank has a secret, and rank 0 has none",
            "cannot join",  # at once, and the error when the time is over
        ),
    ],
    ids=["rank 1 has none", "rank 1 has another", "rank 0 has none"],
)
def test_both_ranks_learn_that_their_secrets_differ(
    secrets: tuple[Secret | None, ...], first: str, second: str, warning: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()

    def outcome(rank: int) -> str:
        try:
            return str(join(store, rank, secrets[rank], seconds=0.5)[0])
        except (RuntimeError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(2) as threads:
        outcomes = [*threads.map(outcome, range(2))]
    assert re.match(first, outcomes[0])
    assert re.match(second, outcomes[1])
    errors = capfd.readouterr().err
    assert warning in errors
    assert errors.count("dist_prims:") <= 2  # not for each attempt


@pytest.mark.parametrize("secret", [None, THEIRS], ids=["without", "another"])
def test_another_process_cannot_join_as_a_rank(secret: Secret | None) -> None:
    store = dist.HashStore()

    def intrude() -> None:
        with pytest.raises((RuntimeError, TimeoutError), match=r"cannot join|no sign of rank 0"):
            join(store, 1, secret, seconds=0.5)

    with ThreadPoolExecutor(3) as threads:
        rank_0 = threads.submit(join, store, 0, OURS)
        intrude()
        assert not rank_0.done()
        again, rank_1 = threads.submit(intrude), threads.submit(join, store, 1, OURS)
        assert rank_0.result() == rank_1.result()
        again.result()


def test_a_forged_answer_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()

    def forge() -> None:
        token = json.loads(store.get("hello/1"))[0]
        for name, secret in (("stolen", None), ("stolen", THEIRS)):
            store.set(f"welcome/{token}", module.signed(secret, ("welcome", 1, token), name))
            store.set(f"{name}/hosts", module.signed(secret, ("hosts", name), "a", "b", ""))

    with ThreadPoolExecutor(1) as threads:
        rank_1: Future[Any] = threads.submit(join, store, 1, OURS)
        with repeatedly(forge):
            time.sleep(0.5)
        assert not rank_1.done()
        name, hosts = join(store, 0, OURS)
        assert rank_1.result() == (name, hosts)
    assert "written by a process without the secret" in capfd.readouterr().err


class _KeepingStore(dist.HashStore):
    """A store whose texts another process has copied before they are deleted."""

    def delete_key(self, key: str) -> bool:
        return True


def test_texts_of_an_earlier_attempt_have_no_effect() -> None:
    store = _KeepingStore()
    with ThreadPoolExecutor(1) as threads:
        rank_1 = threads.submit(join, store, 1, OURS)
        name, _ = join(store, 0, OURS)
        rank_1.result()
    hello, acknowledgement = store.get("hello/1"), store.get(f"{name}/acknowledged/1")
    token = json.loads(hello)[0]

    def replay() -> None:
        store.set("hello/1", hello)  # type: ignore[arg-type]
        if store.check([f"welcome/{token}"]):
            later = json.loads(store.get(f"welcome/{token}"))[0]
            store.set(f"{later}/acknowledged/1", acknowledgement)  # type: ignore[arg-type]

    with repeatedly(replay), pytest.raises(TimeoutError, match="no acknowledgement"):
        join(store, 0, OURS, seconds=1)


def copy_texts(source: dist.Store, target: Any) -> None:
    """Copy what a rank 1 and a rank 0 have written there, as far as it exists."""

    def copy(key: str) -> str:
        if not source.check([key]):
            return ""
        target.set(key, source.get(key))
        return str(json.loads(source.get(key))[0])

    for store in (source, target):
        token = json.loads(store.get("hello/1"))[0] if store.check(["hello/1"]) else ""
        name = copy(f"welcome/{token}")
        copy(f"{name}/acknowledged/1")
        copy(f"{name}/hosts")
    copy("hello/1")


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")], ids=["names differ", "names are the same"])
def test_texts_of_another_group_have_no_effect(names: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    """A process without the secret copied all texts between two groups of a job, and rank 1 of one group and rank 0 of
    the other one formed a group. Only the names in the codes prevent that."""
    both = dist.HashStore()
    both.set_timeout(timedelta(milliseconds=200))
    a, b = dist.PrefixStore("a", both), dist.PrefixStore("b", both)

    def copy() -> None:
        with contextlib.suppress(dist.DistStoreError):  # a rank has deleted a text that was there a moment before
            copy_texts(a, b)
            copy_texts(b, a)

    def outcome(store: dist.Store, rank: int, group: str, seconds: float) -> str:
        try:
            return str(join(store, rank, OURS, seconds=seconds, group=group)[0])
        except TimeoutError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        with repeatedly(copy):
            ends = [threads.submit(outcome, a, 1, names[0], 1), threads.submit(outcome, b, 0, names[1], 1)]
            found = [end.result() for end in ends]
        if names[0] == names[1]:
            assert found[0] == found[1]
            return
        assert found[0].startswith("no sign of rank 0")
        assert found[1].startswith("no sign of ranks [1]")
        for store, name in ((a, "a"), (b, "b")):  # which the right ranks can still form
            ranks = [threads.submit(join, store, rank, OURS, group=name) for rank in range(2)]
            assert ranks[0].result() == ranks[1].result()
    assert "rank 0 refuses a process as rank 1 of 2: it has another secret" in capfd.readouterr().err


def mutated(hello: bytes, number: int, draw: random.Random) -> bytes:
    """A hello with some bytes changed, removed or repeated, or random bytes, or JSON of another form."""
    data = bytearray(hello)
    if number % 4 == 0:
        return draw.randbytes(draw.randrange(200))
    if number % 4 == 1:
        forms: list[Any] = [[], {}, [1], [[]], ["x"] * 5, None, [None, "", ""], ["0" * 16, "h" * 3000, "c"], "[" * 100]
        return json.dumps(draw.choice(forms)).encode() if draw.random() < 0.9 else b"[" * 100_000
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(data))
        if number % 4 == 2:
            data[place] ^= 1 << draw.randrange(8)
        else:
            data[place : place + draw.randrange(3)] = data[: draw.randrange(4)]
    return bytes(data)


@pytest.mark.parametrize("count", [5000, pytest.param(500_000, marks=pytest.mark.long(minutes=1))])
def test_a_damaged_hello_is_not_answered(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    store, draw = dist.HashStore(), random.Random(1)
    server = module._Rank0(store, 2, OURS, "", lambda hosts, texts: "")  # whose secret is that of the group
    hello = module.signed(OURS, ("hello", 1, 2), "0" * 16, "host", "a version").encode()
    for number in range(count):
        text = mutated(hello, number, draw)
        if module._texts(text) != module._texts(hello):  # more than the spaces between the texts
            server._answer(1, text)
    assert not server._answered
    assert store.num_keys() < 3 * count // 4
    server._answer(1, hello)
    assert server._answered == {1: module._Answer("0" * 16, "host", "a version", "")}
    assert len(capfd.readouterr().err.splitlines()) == 1
