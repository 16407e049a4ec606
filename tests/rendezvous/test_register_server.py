"""The server of registers: authenticated calls with a deadline, and garbage."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import random
import socket
import threading
import time
from typing import Any

import pytest

from dist_prims.rendezvous import register_server
from dist_prims.rendezvous.register_server import RegisterClient, RegisterServer, _code

KEY = b"the key of a group"


class Served:
    """A server with one group."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.server = RegisterServer(self.listening)
        self.registers = self.server.add("group", KEY)
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"

    def client(self, key: bytes = KEY, group: str = "group", timeout: float = 20) -> RegisterClient:
        return RegisterClient(self.address, group, key, timeout)

    def answers(self, data: bytes) -> bytes:
        """What the server sends to a process that sends this and nothing more."""
        with socket.create_connection(("127.0.0.1", self.listening.getsockname()[1]), 20) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 16):
                    found += part
            return found


def request(key: bytes, *parts: Any, group: str = "group") -> list[Any]:
    return [group, "1", _code(key, "request", group, "1", parts), parts]


def test_each_call_has_its_result() -> None:
    served = Served()
    client = served.client()
    assert client.call("read") == [[], {}]
    assert client.call("announce", 1, 5, "new") is True
    assert client.call("announce", 1, 4, "late") is True  # a copy of an earlier call
    assert client.call("compare_and_set", "key", "", "a") == "a"
    assert client.call("compare_and_set", "key", "b", "c") == "a"
    assert client.call("publish", "key", "a") is True
    assert client.call("publish", "key", "b") is True
    assert client.call("read") == [[[1, [5, "new"]]], {"key": "a"}]


@pytest.mark.parametrize(("key", "group"), [(b"another key", "group"), (b"", "group"), (KEY, "another group")])
def test_a_process_without_the_key_is_refused(key: bytes, group: str) -> None:
    served = Served()
    with pytest.raises(ConnectionError, match="has closed the connection"):
        served.client(key, group).call("announce", 0, 1, "text")
    assert served.client().call("read") == [[], {}]


FORGED = json.dumps(["0" * 64, "forged"]).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "times", "words"),
    [
        (FORGED, 1, "an answer without the right code"),
        (b"HTTP/1.1 400 Bad Request\r\n\n", 1, None),
        (b"[1, 2]\n", 1, None),
        (b"5\n", 1, None),
        (b'["\xc3\xa9", 1]\n', 1, None),
        (b"[", 1000, None),  # a byte now and then does not delay the deadline
        (b"", 0, None),  # a stopped process: the kernel accepts the connection
    ],
    ids=["forged", "HTTP", "list", "number", "letters", "bytes now and then", "nothing"],
)
def test_another_process_at_the_address_of_a_rank_is_a_lost_server(
    answer: bytes, times: int, words: str | None
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        connection, _ = listening.accept()
        with contextlib.suppress(OSError):
            for _ in range(times):
                connection.sendall(answer)
                time.sleep(0.02)

    if times:
        threading.Thread(target=send, daemon=True).start()
    client = RegisterClient(f"127.0.0.1:{listening.getsockname()[1]}", "group", KEY, timeout=0.3)
    began = time.monotonic()
    # With a byte now and then, the error depends on whether the limit ends within or after the wait for a byte.
    error = {0: TimeoutError, 1: ConnectionError}.get(times, (TimeoutError, ConnectionError))
    with pytest.raises(error, match=words):
        client.call("read")
    assert time.monotonic() - began < 10


def test_a_call_of_two_requests_has_one_deadline() -> None:
    """Each request, and each answer, had the whole timeout. Here the first answer is processed at the deadline."""
    served = Served()
    client = served.client(timeout=0.3)
    receive = client._line

    def receive_late(deadline: float) -> bytes:
        line = receive(deadline)
        time.sleep(max(0.0, deadline - time.monotonic()))
        return line

    client._line = receive_late  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"timed out|no answer"):
        client.call("announce", 0, 1, "x" * 900_000)


@pytest.mark.slow
def test_an_answer_that_does_not_fit_the_buffers() -> None:
    """The server sends the rest when the client has read, and serves others meanwhile."""
    served = Served()
    client, other = served.client(), served.client()
    for rank in range(20):
        client.call("announce", rank, 1, "x" * 900_000)
    receive = client._line

    def receive_late(deadline: float) -> bytes:
        assert other.call("publish", "key", "value") is True
        return receive(deadline)

    client._line = receive_late  # type: ignore[method-assign]
    records, _ = client.call("read")
    assert [text for _, (_, text) in records] == ["x" * 900_000] * 20


@pytest.mark.slow
def test_registers_end_with_their_group_unless_they_were_changed() -> None:
    served = Served()
    client = served.client()
    unused = served.server.add("unused", b"")
    assert served.client(b"", "unused").call("read") == [[], {}]
    del unused
    gc.collect()
    with pytest.raises(ConnectionError):
        served.client(b"", "unused").call("read")
    client.call("publish", "key", "value")
    del served.registers
    gc.collect()
    assert client.call("read") == [[], {"key": "value"}]


def mutations(generator: random.Random) -> bytes:
    right = json.dumps(request(b"wrong", "announce", 0, 1, "text")).encode()
    values = [None, 5, -1.5, True, [], {}, "x", [["x"]], "\udc00", 10**400]
    kind = generator.randrange(5)
    if kind == 0:
        return generator.randbytes(generator.randrange(200))
    if kind == 1:
        text = bytearray(right + b"\n")
        text[generator.randrange(len(text))] = generator.randrange(256)
        return bytes(text)
    if kind == 2:
        return json.dumps(generator.choices(values, k=generator.randrange(7))).encode() + b"\n"
    if kind == 3:
        parts = json.loads(right)
        parts[generator.randrange(4)] = generator.choice(values)
        return json.dumps(parts).encode() + b"\n"
    return b"[" * generator.randrange(1, 5000) + b"\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2_000, pytest.param(50_000, marks=pytest.mark.long(minutes=0.5))])
def test_changed_requests_are_not_answered_and_change_nothing(count: int) -> None:
    """Random and changed requests: no answer, no change, no descriptor left; a right client is served."""
    served, generator = Served(), random.Random(7)
    assert served.answers(b"x" * (3 << 20)) == b"", "a line without end is refused"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        assert served.answers(mutations(generator)) == b""
    assert len(os.listdir("/proc/self/fd")) <= before
    assert served.client().call("read") == [[], {}]


def accepts(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[float]:
    """The times of the calls of accept(), of which the first ones fail as without a free descriptor."""
    times: list[float] = []
    accept = socket.socket.accept

    def counted(listening: socket.socket) -> Any:
        times.append(time.monotonic())
        if len(times) <= failures:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", counted)
    return times


def test_without_a_free_descriptor_the_server_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that waits kept the listening socket ready, so the thread spun: 50,000 calls of accept() a s."""
    monkeypatch.setattr(register_server, "_PAUSE", 0.2)
    times = accepts(monkeypatch, failures=2)
    assert Served().client().call("read") == [[], {}]
    assert len(times) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 0.2


def test_connections_without_the_key_use_little_memory_and_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 1024 connections without the key could leave 1 MiB. Now the oldest of 64 goes for each new one."""
    monkeypatch.setattr(register_server, "_TIME_TO_PROVE", 1000.0)
    served = Served()
    port = served.listening.getsockname()[1]
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(3 * 64)]
        for connection in sockets[::2]:
            with contextlib.suppress(OSError):  # closed already
                connection.sendall(b"x" * 60_000)
        client = served.client()
        assert client.call("read") == [[], {}]
        for connection in sockets[: 2 * 64]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        connections = list(served.server._connections.values())
        assert sum(not each.is_proved for each in connections) <= 64
        assert client.call("announce", 0, 1, "x" * 900_000) is True


def test_a_first_request_has_a_limit_of_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is too long for a new connection follows a short one."""
    monkeypatch.setattr(register_server, "_TIME_TO_PROVE", 1000.0)
    served = Served()
    with socket.create_connection(("127.0.0.1", served.listening.getsockname()[1]), 20) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"x" * (1 << 18))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "closed, although it has sent less than 1 MiB"
    with monkeypatch.context() as patch:  # not for the client below, which may need longer
        patch.setattr(register_server, "_TIME_TO_PROVE", 0.2)
        with socket.create_connection(("127.0.0.1", served.listening.getsockname()[1]), 20) as connection:
            connection.sendall(b"[")
            assert connection.recv(1) == b"", "closed, although it was used less than 60 s ago"
    assert served.client().call("announce", 0, 1, "x" * 900_000) is True
