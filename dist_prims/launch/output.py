"""The output of spawned ranks: whole lines, on the streams of the parent.

Ranks that share a stream mix their words: ``print`` writes each piece by itself where nothing buffers it, and a
notebook collects every process in its own way. So each rank writes to a pipe of its own for stdout and one for stderr,
from C as well, and the parent passes on complete lines to whatever its ``sys.stdout`` is: a terminal, a file, the cell
of a notebook.
"""

import builtins
import contextlib
import os
import re
import sys
from typing import TextIO

__all__ = ["Output", "is_watched"]

_LINE = re.compile(rb"[^\r\n]*(?:\n|\r\n|\r(?=[^\n]))")  # whether a \n follows the last \r is not known yet
_CAPACITY = 1 << 20  # bytes; more than a pipe holds
_LONGEST = 1 << 16  # bytes of a line that is held back until it ends


def is_watched(stream: TextIO | None) -> bool:
    """Whether a person reads it as it comes: a terminal, or a notebook."""
    return stream is not None and (stream.isatty() or hasattr(builtins, "__IPYTHON__"))


class Output:
    """One stream of one rank, seen from the parent."""

    def __init__(self, name: str, rank: int, prefix: bool) -> None:
        self._name, self._prefix = name, f"[rank {rank}] " if prefix else ""
        self._rest = b""
        reads, writes = os.pipe()
        # Open in both directions it never ends: not before the rank has opened it, nor when the rank has gone.
        self.descriptor = os.open(f"/proc/self/fd/{reads}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(reads)
        os.close(writes)

    def pass_on(self) -> None:
        """Write the lines that are complete."""
        try:
            self._rest += os.read(self.descriptor, _CAPACITY)
        except BlockingIOError:
            return
        lines = _LINE.findall(self._rest)
        self._rest = self._rest[sum(map(len, lines)) :]
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write the rest when the rank has gone. A stream that takes no more must not stop the cleaning up."""
        with contextlib.suppress(OSError, ValueError):
            self.pass_on()
            self._write([self._rest + b"\n"] if self._rest.strip(b"\r") else [])
        os.close(self.descriptor)

    def _write(self, lines: list[bytes]) -> None:
        stream: TextIO | None = getattr(sys, self._name)
        if not lines or stream is None:
            return
        text = "".join(self._told(line.decode(errors="backslashreplace")) for line in lines)
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

    def _told(self, line: str) -> str:
        return line if line == "\r" else self._prefix + line
