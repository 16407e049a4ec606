"""Offsets between the monotonic clocks of hosts, measured while a trace is active.

Rank 0 of a group answers requests over UDP with its time. Every rank with another clock sends 16 requests at the
beginning of its trace, at intervals, and at the end; of these 16 the request with the shortest round trip counts::

    rank 1   sends at t1                               receives at t4
    rank 0               receives at t2, sends at t3                     offset = ((t2 - t1) + (t3 - t4)) / 2

The error of the offset is at most half of the round trip, if the clocks run equally fast meanwhile. The requests and
the answers have a thread of their own: no rank waits for another one, and without answers the trace says that the
offset was not measured. Ranks of one clock (see ``recorder.clock_domain``) send nothing. Times are nanoseconds, unless
a comment says otherwise.
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
from typing import Any, NamedTuple

from ..threads import start_thread
from . import format as fmt
from . import recorder

__all__: list[str] = []

_PACKET = struct.Struct("<16sqqq")  # token, t1, t2, t3
_REQUESTS = 16  # of a measurement
_ANSWER_TIME = 0.2  # seconds
_TIME_TO_PUBLISH = 60.0  # seconds in which rank 0 must have begun its trace
_INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between measurements; the last one repeats
_TIME_TO_END = 2.0  # seconds for the thread
_WAKE = b"end"

_group: tuple[weakref.ref[Any], int] | None = None  # the store of a group, and the rank of this process in the group


def register(store: Any, rank: int) -> None:
    """Note the store that this process shares with ranks of other hosts, and measure the clock of the active trace. A
    store that was noted earlier stays in use as long as it exists. The backend calls this when it makes a group."""
    global _group
    if _group is None or _group[0]() is None:
        _group = weakref.ref(store), rank
    if recorder.active is not None:
        attach(recorder.active)


def attach(recording: recorder.TraceRecorder) -> None:
    """Measure the clock of a trace until it ends, if this process shares a store with other ranks."""
    store = _group[0]() if _group is not None else None
    if _group is None or store is None or recording.closers:
        return
    key = f"trace clock/{recording.number}"
    with contextlib.suppress(OSError):  # without a socket nothing is measured, and the report says so
        side = ClockServer(store, key) if _group[1] == 0 else ClockClient(recording, store, key)
        recording.closers.append(side.close)


def _forget() -> None:
    """In a forked child: the connection to the store belongs to the parent."""
    global _group
    _group = None


os.register_at_fork(after_in_child=_forget)


class ClockServer:
    """Answers the requests of other ranks on a thread. The address of its socket is in the store, with a token: packets
    without the token are not answered."""

    def __init__(self, store: Any, key: str) -> None:
        from ..rendezvous.network import addresses  # here for the reason in _server_socket()

        self._token = secrets.token_bytes(16)
        self._socket = _server_socket()
        facts = {
            "domain": recorder.clock_domain(),
            "addresses": [*addresses(), "127.0.0.1"],
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


class _Answer(NamedTuple):
    """What one request shows; the answer with the shortest round trip is the smallest."""

    round_trip: int
    at: int  # on this rank's clock
    offset: int  # of rank 0's clock to this rank's


class ClockClient:
    """Measures the offset to the clock of rank 0 on a thread, and writes each measurement to the trace as a text."""

    def __init__(self, recording: recorder.TraceRecorder, store: Any, key: str) -> None:
        self._recording, self._key = recording, key
        self._server: dict[str, Any] | None = None  # what rank 0 has published; None: nothing is to be measured
        self._target: Any = None  # the socket family and address at which rank 0 has answered
        self._count = 0  # of the measurements
        self._closing = threading.Event()
        self._thread = start_thread("clock", self._run, store)

    def _run(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError, ValueError, KeyError, TypeError):  # the store has ended
            self._server = self._wait_for_server(store)
        del store  # it may be the last reference
        if self._server is None or self._server["domain"] == recorder.clock_domain():
            self._server = None
            return
        number = 0
        while not self._closing.is_set():
            self._measure()
            self._closing.wait(_INTERVALS[min(number, len(_INTERVALS) - 1)])
            number += 1

    def _wait_for_server(self, store: Any) -> dict[str, Any] | None:
        """What rank 0 has published; None if it publishes nothing within a minute, or this trace ends before."""
        deadline = time.monotonic() + _TIME_TO_PUBLISH
        while time.monotonic() < deadline and not self._closing.is_set():
            if store.check([self._key]):
                published: dict[str, Any] = json.loads(store.get(self._key))
                return published
            self._closing.wait(0.05)
        return None

    def _measure(self) -> None:
        """Write the offset by the fastest of some requests; nothing without an answer."""
        assert self._server is not None
        best: _Answer | None = None
        for _ in range(_REQUESTS):
            answer = self._request()
            if answer is None:
                break
            best = min(best or answer, answer)
        if best is not None:
            self._count += 1
            error, reference = best.round_trip // 2 + 1, self._server["domain"]
            facts = {"error": error, "at": best.at, "offset": best.offset, "reference": reference}
            self._recording.text(fmt.CLOCK, self._count, json.dumps(facts))

    def _request(self) -> _Answer | None:
        """Send one request, and wait for its answer; None without an answer."""
        assert self._server is not None
        targets = [self._target] if self._target else _targets(self._server["addresses"], self._server["port"])
        token = bytes.fromhex(self._server["token"])
        for family, address in targets:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
                own.settimeout(_ANSWER_TIME)
                sent = time.monotonic_ns()
                own.sendto(_PACKET.pack(token, sent, 0, 0), address)
                packet = own.recv(_PACKET.size)
                now = time.monotonic_ns()
                answer_token, t1, t2, t3 = _PACKET.unpack(packet)
                if answer_token == token and t1 == sent:
                    self._target = family, address
                    return _Answer((now - t1) - (t3 - t2), (t1 + now) // 2, ((t2 - t1) + (t3 - now)) // 2)
        return None

    def close(self) -> None:
        """Measure once more, and end the thread."""
        self._closing.set()
        self._thread.join(_TIME_TO_END)
        if self._server is not None and not self._thread.is_alive():
            self._measure()


def _server_socket() -> socket.socket:
    from ..rendezvous.network import at_free_port  # it imports fcntl, for POSIX only, and traces are read everywhere

    if socket.has_dualstack_ipv6():
        server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    at_free_port(lambda port: server.bind(("", port)))
    return server


def _targets(addresses: list[str], port: int) -> list[tuple[Any, Any]]:
    """The socket family and address of each of these addresses that this host can resolve."""
    targets = []
    for address in addresses:
        with contextlib.suppress(OSError):
            family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
            targets.append((family, target))
    return targets
