"""A server of registers: what the survivors of groups on several hosts agree by, see :mod:`dist_prims.repair.quorum`.

A TCPStore would do but for one thing: its client waits without a deadline for a server that is stopped, or whose host
is cut off. Here every call has a deadline. A request and an answer are one line of JSON each:

    ["announce", group, rank, number, text]       true; the record of a rank, replaced by a higher number
    ["read", group]                               the records with their numbers by rank, the decisions by key
    ["compare_and_set", group, key, from, to]     the value of the key afterwards, "" for none
    ["publish", group, key, value]                true; a decision
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

__all__: list[str] = []

_MOST_BYTES = 1 << 20  # of a line
_MOST_CONNECTIONS = 1024
_IDLE_TIME = 60.0  # seconds after which a connection is closed


@dataclass
class _GroupRegisters:
    records: dict[int, tuple[int, str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)


@dataclass
class _Connection:
    socket: socket.socket
    received: bytes = b""
    used: float = 0.0


class RegisterServer:
    """Serves registers at a listening socket, on a thread that ends with the process."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._groups: dict[str, _GroupRegisters] = {}
        self._connections: dict[int, _Connection] = {}  # by descriptor
        listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="dist_prims registers", daemon=True).start()

    def _run(self) -> None:
        while True:
            limit = _IDLE_TIME if self._connections else None
            for key, _ in self._selector.select(limit):
                if key.data is None:
                    self._accept()
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
                answer = json.dumps(self._answer(*json.loads(line))).encode() + b"\n"
                connection.socket.sendall(answer)  # short: if it does not fit the buffer, the other side does not read
        except (OSError, ValueError, TypeError, RecursionError):  # no connection, or no request
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self, operation: str, group: str, *arguments: Any) -> Any:
        registers = self._groups.setdefault(group, _GroupRegisters())
        match operation, arguments:
            case "announce", (int(rank), int(number), str(text)):
                registers.records[rank] = max(registers.records.get(rank, (0, "")), (number, text))
                return True
            case "read", ():
                return list(registers.records.items()), registers.decisions
            case "compare_and_set", (str(key), str(expected), str(desired)):
                if registers.values.get(key, "") == expected:
                    registers.values[key] = desired
                return registers.values.get(key, "")
            case "publish", (str(key), str(value)):
                registers.decisions.setdefault(key, value)
                return True
        raise ValueError(f"no operation: {operation}")


class RegisterClient:
    """Calls a :class:`RegisterServer`. Every call raises OSError after ``timeout`` seconds, or if the server is gone.

    >>> listening = socket.create_server(("127.0.0.1", 0))
    >>> server = RegisterServer(listening)
    >>> client = RegisterClient(f"127.0.0.1:{listening.getsockname()[1]}", "group", timeout=10)
    >>> client.call("compare_and_set", "key", "", "first"), client.call("compare_and_set", "key", "", "second")
    ('first', 'first')
    """

    def __init__(self, address: str, group: str, timeout: float) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._group, self._received = group, b""

    def call(self, operation: str, *arguments: Any) -> Any:
        self._socket.sendall(json.dumps([operation, self._group, *arguments]).encode() + b"\n")
        while b"\n" not in self._received:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the server of registers has closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()
