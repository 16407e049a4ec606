"""A server of registers, by which the survivors of groups on several hosts agree: see :mod:`dist_prims.repair.quorum`.

The *registers* of a group are a record for each rank, values that change by compare-and-set, and decisions.

A TCPStore is not sufficient, because its client waits without a deadline for a server that is stopped, or whose host is
cut off. Here every call has a deadline. A request and an answer are one line of JSON each. If the group has a key
(:mod:`.secret`), both carry a code that proves that the sender knows the key; a process without the key is not served.

    [group, number, code, ["announce", rank, version, text]]        true; replaces the record with a lower version
    [group, number, code, ["read"]]                                 records with their versions by rank, decisions
    [group, number, code, ["compare_and_set", key, from, to]]       the value of the key afterwards
    [group, number, code, ["publish", key, value]]                  true; a decision

    [code, answer]

Until its first valid request, which proves that it knows the key, a connection may send little and for a short time.
Where many such connections are open, the server closes the oldest for each new one, so processes without the key
neither use the memory of a rank nor keep other ranks out.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from ..threads import start_thread
from .network import split_address

__all__: list[str] = []

_MOST_BYTES = 1 << 20  # of the line of a request
_MOST_BYTES_UNPROVED = 1 << 16  # of the first request of a connection
_MOST_UNPROVED = 64  # connections without a valid request
_TIME_TO_PROVE = 10.0  # seconds until the first valid request
_MOST_BYTES_OF_ANSWER = 1 << 26  # the records of all ranks
_MOST_CONNECTIONS = 1024
_IDLE_TIME = 60.0  # seconds after which a connection is closed
_PAUSE = 1.0  # seconds without accept() where no descriptor is left: the waiting connection stays ready
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


_used: set[GroupRegisters] = set()  # kept alive: other ranks may read a decision after this rank has gone on


@dataclass(eq=False)
class GroupRegisters:
    """The registers of a group on the rank that serves them.

    That rank calls them directly, while the thread of the server may get no processor time for long. The server serves
    them to other ranks as long as a reference exists; after their first change this module keeps one.
    """

    key: bytes = field(repr=False)
    records: dict[int, tuple[int, str]] = field(default_factory=dict)  # version and text by rank
    values: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def call(self, operation: str, *arguments: Any) -> Any:
        with self.lock:
            answer = self._perform(operation, *arguments)
        if operation != "read":
            _used.add(self)
        return answer

    def close(self) -> None:
        """Do nothing, as other ranks may read the registers. A RegisterClient closes its connection here."""

    def _perform(self, operation: str, *arguments: Any) -> Any:
        match operation, arguments:
            case "announce", (int(rank), int(version), str(text)):
                self.records[rank] = max(self.records.get(rank, (0, "")), (version, text))
                return True
            case "read", ():
                return list(self.records.items()), dict(self.decisions)
            case "compare_and_set", (str(key), str(expected), str(desired)):
                if self.values.get(key, "") == expected:
                    self.values[key] = desired
                return self.values.get(key, "")
            case "publish", (str(key), str(value)):
                self.decisions.setdefault(key, value)
                return True
        raise ValueError(f"no operation: {operation}")


@dataclass
class _Connection:
    socket: socket.socket
    received: bytes = b""  # the beginning of a request
    unsent: bytes = b""  # answers
    deadline: float = 0.0  # when it is closed
    is_proved: bool = False  # whether it has made a valid request


class RegisterServer:
    """Serves registers at a listening socket, on a thread that ends with the process."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._groups: weakref.WeakValueDictionary[str, GroupRegisters] = weakref.WeakValueDictionary()
        self._connections: dict[int, _Connection] = {}  # by descriptor; the oldest first
        self._resume = 0.0  # when connections are accepted again after a lack of descriptors; 0: they are accepted
        listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        start_thread("registers", self._run)

    def add(self, group: str, key: bytes) -> GroupRegisters:
        """Serve the registers of a group to clients with this key, which is empty if the group has no secret."""
        registers = self._groups[group] = GroupRegisters(key)
        return registers

    def _run(self) -> None:
        """The thread of the server, which alone uses the connections."""
        while True:
            # 1. Read requests and send answers.
            has_new_connection = False
            for key, events in self._selector.select(self._limit()):
                if key.data is None:
                    has_new_connection = True
                elif events & selectors.EVENT_WRITE:
                    self._send(key.data)
                else:
                    self._serve(key.data)
            # 2. Accept last: that may close a connection, and its first request may have just been served.
            if has_new_connection:
                self._accept()
            # 3. What the clock requires.
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if now >= connection.deadline:
                    self._close(connection)
            if self._resume and now >= self._resume:
                self._selector.register(self._listening, selectors.EVENT_READ)
                self._resume = 0.0

    def _limit(self) -> float | None:
        """Seconds until the next deadline; None: no limit."""
        times = [connection.deadline for connection in self._connections.values()]
        times += [self._resume] if self._resume else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:  # with another number: the other side has closed the connection already
            if error.errno in _NO_RESOURCES:
                self._selector.unregister(self._listening)
                self._resume = time.monotonic() + _PAUSE
            return
        unproved = [connection for connection in self._connections.values() if not connection.is_proved]
        if len(unproved) >= _MOST_UNPROVED:
            self._close(unproved[0])
        if len(self._connections) >= _MOST_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, deadline=time.monotonic() + _TIME_TO_PROVE)
        self._connections[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        """Read what has arrived, and answer each complete request; close the connection after an invalid one."""
        try:
            data = connection.socket.recv(1 << 16)
            *lines, connection.received = (connection.received + data).split(b"\n")
            for line in lines:
                connection.unsent += json.dumps(self._answer(*json.loads(line))).encode() + b"\n"
                connection.is_proved = True
            most = _MOST_BYTES if connection.is_proved else _MOST_BYTES_UNPROVED
            if not data or len(connection.received) > most:
                self._close(connection)
                return
            if connection.is_proved:
                connection.deadline = time.monotonic() + _IDLE_TIME
            self._send(connection)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # lost, or a wrong request
            self._close(connection)

    def _send(self, connection: _Connection) -> None:
        """Send what the connection takes. As long as something is left, no further request is read."""
        try:
            with contextlib.suppress(BlockingIOError):
                while connection.unsent:
                    connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
                    connection.deadline = time.monotonic() + _IDLE_TIME
            events = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
            self._selector.modify(connection.socket, events, connection)
        except OSError:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self, group: str, number: str, code: str, request: list[Any]) -> Any:
        """Perform a request, and return the answer with its code; raise if the code of the request is wrong."""
        registers = self._groups[group]
        if not hmac.compare_digest(_code(registers.key, "request", group, number, request).encode(), code.encode()):
            raise ValueError("a request with a wrong code")
        answer = registers.call(*request)
        return _code(registers.key, "answer", group, number, answer), answer


def _code(key: bytes, *parts: Any) -> str:
    return hmac.digest(key, json.dumps(parts).encode(), "sha256").hex() if key else ""


class RegisterClient:
    """Calls a :class:`RegisterServer`. Every call raises OSError after ``timeout`` seconds, or if the server is gone.

    >>> listening = socket.create_server(("127.0.0.1", 0))
    >>> server = RegisterServer(listening)
    >>> registers = server.add("group", b"key")
    >>> client = RegisterClient(f"127.0.0.1:{listening.getsockname()[1]}", "group", b"key", timeout=10)
    >>> client.call("compare_and_set", "key", "", "first"), client.call("compare_and_set", "key", "", "second")
    ('first', 'first')
    """

    def __init__(self, address: str, group: str, key: bytes, timeout: float) -> None:
        self._socket = socket.create_connection(split_address(address), timeout)
        self._group, self._key, self._timeout = group, key, timeout
        self._is_proved = False  # a request of this connection has been answered

    def call(self, *request: Any) -> Any:
        """Return the answer to a request, whose forms the module lists."""
        return self._call(request, time.monotonic() + self._timeout)

    def _call(self, request: tuple[Any, ...], deadline: float) -> Any:
        """The number is in the code of the answer, so an earlier answer is not taken for the answer to this request."""
        number = secrets.token_hex(8)
        code = _code(self._key, "request", self._group, number, request)
        line = json.dumps([self._group, number, code, request]).encode() + b"\n"
        if len(line) > _MOST_BYTES_UNPROVED and not self._is_proved:  # a short request first, which proves the key
            self._call(("read",), deadline)
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self._socket.sendall(line)
        line = self._line(deadline)
        try:
            answer_code, answer = json.loads(line)
            is_right = hmac.compare_digest(_code(self._key, "answer", self._group, number, answer), answer_code)
        except (ValueError, TypeError, RecursionError):
            is_right = False
        if not is_right:
            raise ConnectionError("an answer without the right code: another process listens at this address")
        self._is_proved = True
        return answer

    def _line(self, deadline: float) -> bytes:
        """The next line. A process other than a server may listen at the address, and send slowly or without end."""
        received = b""
        while not received.endswith(b"\n"):
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the server of registers has closed the connection")
            received += data
            if len(received) > _MOST_BYTES_OF_ANSWER or time.monotonic() > deadline:
                raise ConnectionError("no answer of a server of registers")
        return received

    def close(self) -> None:
        self._socket.close()
