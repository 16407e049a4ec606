"""Offsets between the monotonic clocks of hosts, measured while a trace is active.

The rank 0 of a group answers requests over UDP with its time. Every rank with another clock sends some requests at the
begin, at intervals, and at the end; the request with the least round trip counts::

    rank 1   sends at t1                               receives at t4
    rank 0               receives at t2, sends at t3                     offset = ((t2 - t1) + (t3 - t4)) / 2

The offset is wrong by half of the round trip at most, if the clocks run equally fast meanwhile. All of this happens on
a thread: no rank waits for another one, and without answers the trace says that the offset was not measured. Ranks of
one clock (see ``recorder.clock_domain``) send nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from typing import Any

from ..threads import start_thread
from . import format as fmt
from . import recorder

__all__: list[str] = []

_PACKET = struct.Struct("<16sqqq")  # token, t1, t2, t3
_REQUESTS = 16  # of a measurement
_ANSWER_TIME = 0.2  # seconds
_TIME_TO_PUBLISH = 60.0  # seconds in which rank 0 must have begun its trace
_INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between measurements; the last one repeats
_TIME_TO_END = 2.0
_WAKE = b"end"

_group: tuple[weakref.ref[Any], int] | None = None  # a store, and the rank of this process at it


def register(store: Any, rank: int) -> None:
    """Remember a store that this process shares with ranks of other hosts, the first one that still exists; align the
    active trace."""
    global _group
    if _group is None or _group[0]() is None:
        _group = weakref.ref(store), rank
    if recorder.active is not None:
        attach(recorder.active)


def attach(recording: recorder.TraceRecorder) -> None:
    """Align the clock of a trace, if this process shares a store with other ranks."""
    store = _group[0]() if _group is not None else None
    if _group is None or store is None or recording.closers:
        return
    key = f"trace clock/{recording.number}"
    with contextlib.suppress(OSError):  # without a socket nothing is measured, and the report says so
        made = ClockServer(store, key) if _group[1] == 0 else ClockClient(recording, store, key)
        recording.closers.append(made.close)


def _forget() -> None:
    """In a forked child: the connection to the store belongs to the parent."""
    global _group
    _group = None


os.register_at_fork(after_in_child=_forget)


class ClockServer:
    """Answers the requests of other ranks on a thread."""

    def __init__(self, store: Any, key: str) -> None:
        self._token = secrets.token_bytes(16)
        self._socket = _server_socket()
        facts = {
            "domain": recorder.clock_domain(),
            "addresses": _addresses(),
            "port": self._socket.getsockname()[1],
            "token": self._token.hex(),
        }
        self._closing = False
        self._thread = start_thread("clock", self._serve)
        try:
            store.set(key, json.dumps(facts))
        except RuntimeError:  # the store has ended
            self.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while not self._closing:
                packet, sender = self._socket.recvfrom(_PACKET.size)
                received = time.monotonic_ns()
                if len(packet) == _PACKET.size and packet[:16] == self._token:
                    sent = _PACKET.unpack(packet)[1]
                    answer = _PACKET.pack(self._token, sent, received, time.monotonic_ns())
                    with contextlib.suppress(OSError):  # the sender is gone
                        self._socket.sendto(answer, sender)

    def close(self) -> None:
        """End the thread; a packet wakes it."""
        self._closing = True
        loopback = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
        with contextlib.suppress(OSError), socket.socket(self._socket.family, socket.SOCK_DGRAM) as sender:
            sender.sendto(_WAKE, (loopback, self._socket.getsockname()[1]))
        self._thread.join(_TIME_TO_END)
        self._socket.close()


class ClockClient:
    """Measures the offset to the clock of rank 0 on a thread, and writes it to the trace."""

    def __init__(self, recording: recorder.TraceRecorder, store: Any, key: str) -> None:
        self._recording, self._key = recording, key
        self._server: dict[str, Any] | None = None
        self._address: Any = None
        self._family: Any = socket.AF_INET
        self._count = 0
        self._closing = threading.Event()
        self._thread = start_thread("clock", self._run, store)

    def _run(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):  # the store has ended
            self._server = self._find(store)
        del store  # it may be the last reference
        if self._server is None or self._server["domain"] == recorder.clock_domain():
            self._server = None
            return
        number = 0
        while not self._closing.is_set():
            self._measure()
            self._closing.wait(_INTERVALS[min(number, len(_INTERVALS) - 1)])
            number += 1

    def _find(self, store: Any) -> dict[str, Any] | None:
        """What rank 0 has published; None if it publishes nothing."""
        deadline = time.monotonic() + _TIME_TO_PUBLISH
        while time.monotonic() < deadline and not self._closing.is_set():
            if store.check([self._key]):
                found: dict[str, Any] = json.loads(store.get(self._key))
                return found
            self._closing.wait(0.05)
        return None

    def _measure(self) -> None:
        """Write the offset by the fastest of some requests; nothing without an answer."""
        assert self._server is not None
        best: tuple[int, int, int] | None = None
        for _ in range(_REQUESTS):
            found = self._request()
            if found is None:
                break
            best = min(best or found, found)
        if best is None:
            return
        self._count += 1
        facts = {"error": best[0] // 2 + 1, "at": best[1], "offset": best[2], "reference": self._server["domain"]}
        self._recording.text(fmt.CLOCK, self._count, json.dumps(facts))

    def _request(self) -> tuple[int, int, int] | None:
        """(round trip, time, offset) of one request in nanoseconds; None without an answer."""
        assert self._server is not None
        targets = [self._address] if self._address else _targets(self._server["addresses"], self._server["port"])
        token = bytes.fromhex(self._server["token"])
        for family, address in targets:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
                own.settimeout(_ANSWER_TIME)
                sent = time.monotonic_ns()
                own.sendto(_PACKET.pack(token, sent, 0, 0), address)
                answer = own.recv(_PACKET.size)
                now = time.monotonic_ns()
                got, first, received, answered = _PACKET.unpack(answer)
                if got == token and first == sent:
                    self._address = family, address
                    offset = ((received - sent) + (answered - now)) // 2
                    return (now - sent) - (answered - received), (sent + now) // 2, offset
        return None

    def close(self) -> None:
        """Measure once more, and end the thread."""
        self._closing.set()
        self._thread.join(_TIME_TO_END)
        if self._server is not None and not self._thread.is_alive():
            self._measure()


def _server_socket() -> socket.socket:
    from ..rendezvous.network import at_free_port  # fcntl exists on POSIX systems only, and traces are read everywhere

    if socket.has_dualstack_ipv6():
        made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    at_free_port(lambda port: made.bind(("", port)))
    return made


def _addresses() -> list[str]:
    from ..rendezvous.network import addresses

    return [*addresses(), "127.0.0.1"]


def _targets(addresses: list[str], port: int) -> list[tuple[Any, Any]]:
    found = []
    for address in addresses:
        with contextlib.suppress(OSError):
            found += [(each[0], each[4]) for each in socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[:1]]
    return found
