"""A server of registers: what the survivors of groups on several hosts agree by, see :mod:`dist_prims.repair.quorum`.

A TCPStore would do but for one thing: its client waits without a deadline for a server that is stopped, or whose host
is cut off. Here every call has a deadline. A request and an answer are one line of JSON each, with a code if the group
has a key (:mod:`.secret`): a process that does not know the key is not served.

    [group, number, code, ["announce", rank, version, text]]        true; replaces the record with a lower version
    [group, number, code, ["read"]]                                 records with their versions by rank, decisions
    [group, number, code, ["compare_and_set", key, from, to]]       the value of the key afterwards
    [group, number, code, ["publish", key, value]]                  true; a decision

    [code, answer]
"""

from __future__ import annotations

import contextlib
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

__all__: list[str] = []

_MOST_BYTES = 1 << 20  # of the line of a request
_MOST_BYTES_OF_ANSWER = 1 << 26  # the records of all ranks
_MOST_CONNECTIONS = 1024
_IDLE_TIME = 60.0  # seconds after which a connection is closed


@dataclass(eq=False)
class GroupRegisters:
    """The registers of a group. A server serves them as long as a reference exists, and after their first change."""

    key: bytes = field(repr=False)
    records: dict[int, tuple[int, str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)

    def perform(self, operation: str, *arguments: Any) -> Any:
        match operation, arguments:
            case "announce", (int(rank), int(version), str(text)):
                self.records[rank] = max(self.records.get(rank, (0, "")), (version, text))
                return True
            case "read", ():
                return list(self.records.items()), self.decisions
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
    received: bytes = b""
    unsent: bytes = b""  # of answers
    used: float = 0.0


class RegisterServer:
    """Serves registers at a listening socket, on a thread that ends with the process."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._groups: weakref.WeakValueDictionary[str, GroupRegisters] = weakref.WeakValueDictionary()
        self._used: set[GroupRegisters] = set()  # for ranks that read a decision after this rank has gone on
        self._connections: dict[int, _Connection] = {}  # by descriptor
        listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="dist_prims registers", daemon=True).start()

    def add(self, group: str, key: bytes) -> GroupRegisters:
        """Serve the registers of a group to clients with this key, which is empty if the group has no secret."""
        registers = self._groups[group] = GroupRegisters(key)
        return registers

    def _run(self) -> None:
        while True:
            limit = _IDLE_TIME if self._connections else None
            for key, events in self._selector.select(limit):
                if key.data is None:
                    self._accept()
                elif events & selectors.EVENT_WRITE:
                    self._send(key.data)
                else:
                    self._serve(key.data)
            now = time.monotonic()
            for connection in list(self._connections.values()):
                if now > connection.used + _IDLE_TIME:
                    self._close(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other side has closed it already, or no descriptor is left
            accepted, _ = self._listening.accept()
            if len(self._connections) >= _MOST_CONNECTIONS:
                accepted.close()
                return
            accepted.setblocking(False)
            connection = _Connection(accepted, used=time.monotonic())
            self._connections[accepted.fileno()] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
            *lines, connection.received = (connection.received + data).split(b"\n")
            if not data or len(connection.received) > _MOST_BYTES:
                self._close(connection)
                return
            connection.used = time.monotonic()
            for line in lines:
                connection.unsent += json.dumps(self._answer(*json.loads(line))).encode() + b"\n"
            self._send(connection)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no connection or request
            self._close(connection)

    def _send(self, connection: _Connection) -> None:
        """Send what the connection takes. As long as something is left, no further request is read."""
        try:
            with contextlib.suppress(BlockingIOError):
                while connection.unsent:
                    connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
                    connection.used = time.monotonic()
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
        registers = self._groups[group]
        if not hmac.compare_digest(_code(registers.key, "request", group, number, request).encode(), code.encode()):
            raise ValueError("a request with a wrong code")
        answer = registers.perform(*request)
        if request[0] != "read":
            self._used.add(registers)
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
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._group, self._key, self._timeout = group, key, timeout

    def call(self, *request: Any) -> Any:
        number = secrets.token_hex(8)
        code = _code(self._key, "request", self._group, number, request)
        self._socket.settimeout(self._timeout)
        self._socket.sendall(json.dumps([self._group, number, code, request]).encode() + b"\n")
        line = self._line(time.monotonic() + self._timeout)
        try:
            found, answer = json.loads(line)
            is_right = hmac.compare_digest(_code(self._key, "answer", self._group, number, answer), found)
        except (ValueError, TypeError, RecursionError):
            is_right = False
        if not is_right:
            raise ConnectionError("an answer without the right code: another process listens at this address")
        return answer

    def _line(self, deadline: float) -> bytes:
        """The next line. Another process than a server may listen there, and send slowly or without end."""
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
