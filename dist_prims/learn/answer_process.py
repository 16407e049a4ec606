"""The processes that run an answer, as the process that checks it sees them: limits, replies, and what they print.

Each rank's program has a process of its own, so it knows only what it was given and has received:

    check ── request: a function and its arguments ──> process of rank r   runs the file
          <── reply: steps, actions or values, data ──
          <── what the file prints, shown with a prefix

A process has 4 GiB of memory, all of them together have two minutes, and they end with the check. That stops mistakes.
It does not stop an attack: the file runs with the permissions of the user who checks it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from . import wire
from .exercise import WrongAnswerError

__all__: list[str] = []

SECONDS = 120  # that all processes of a check have
MEMORY = 4 << 30  # bytes of address space of each process
_MOST_REPLY = 4 << 20  # bytes
_MOST_PRINTED = 64 << 10  # bytes that are shown
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread of NumPy's library takes memory


class AnswerProcesses:
    """The processes of one answer, started when they are first asked; ``with`` ends them."""

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._path = path
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._of_rank: dict[int, _Process] = {}

    def ask(self, rank: int, request: dict[str, Any]) -> dict[str, Any]:
        """The reply of a rank's process to a request."""
        if rank not in self._of_rank:
            self._of_rank[rank] = _Process(self._path, self._seconds, self._deadline)
        return self._of_rank[rank].ask(request)

    def __enter__(self) -> AnswerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._of_rank.values():
            process.end()


class _Process:
    """One process. ``_channel`` carries requests and replies; the pipe of its output carries what the file prints."""

    def __init__(self, path: Path, seconds: float, deadline: float) -> None:
        self._seconds, self._deadline = seconds, deadline
        self._received, self._printed, self._shown = b"", b"", 0
        self._closed = False
        self._channel, child_socket = socket.socketpair()
        limits = [str(MEMORY), str(int(seconds) + 1), str(os.getpid())]
        command = [sys.executable, "-m", f"{__package__}.run_answer", str(path), str(child_socket.fileno()), *limits]
        with child_socket:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[child_socket.fileno()],
                start_new_session=True,
                env={**os.environ, **_ONE_THREAD},
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._channel, selectors.EVENT_READ, self._receive)
        self._ready.register(self._output, selectors.EVENT_READ, self._show)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(ConnectionError):  # the process has ended, which the wait for its reply tells
            self._channel.settimeout(self._seconds_left())
            try:
                self._channel.sendall(wire.to_line(request))
            except TimeoutError:
                self._seconds_left()  # raises, because the deadline has passed
        while b"\n" not in self._received:
            if self._closed:
                raise WrongAnswerError(self._how_it_ended())
            self._wait(self._seconds_left())
        self._wait(0)  # what was printed before the reply
        line, _, self._received = self._received.partition(b"\n")
        try:
            return wire.from_line(line)
        except ValueError as error:
            raise WrongAnswerError(f"the process of the answer has sent a reply that is {error}") from error

    def end(self) -> None:
        """Kill the process and those that it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._ready.close()
        self._channel.close()
        self._output.close()

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise WrongAnswerError(f"the answer has not ended after {self._seconds:g} s. Does a loop of it end?")
        return left

    def _wait(self, seconds: float) -> None:
        for key, _ in self._ready.select(seconds):
            key.data()

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._ready.unregister(self._channel)
            self._closed = True
        self._received += data
        if len(self._received) > _MOST_REPLY:
            raise WrongAnswerError(f"the process of the answer has sent more than {_MOST_REPLY >> 20} MiB in a reply")

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout=5)
            how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            return f"the process of the answer ended {how} before it had replied"
        return "the process of the answer has closed its connection"

    def _show(self) -> None:
        """Print the output of the file, each line with a prefix, so that none looks like the result of a check."""
        data = os.read(self._output.fileno(), 1 << 16)
        if not data:
            self._ready.unregister(self._output)
        *lines, self._printed = (self._printed + data).split(b"\n")
        if not data and self._printed:
            lines.append(self._printed)
        for line in lines if self._shown <= _MOST_PRINTED else ():
            print(f"  the answer prints: {wire.printable(line.decode(errors='replace'))}")
            self._shown += len(line) + 1
            if self._shown > _MOST_PRINTED:
                print("  the answer prints more, which is not shown")
                break
        self._printed = self._printed[-_MOST_PRINTED:]
