"""Output of spawned ranks: the parent forwards complete lines to its own streams.

The output of ranks that share a stream is interleaved within lines: ``print`` writes each piece by itself where the
stream is unbuffered, and a notebook does not collect the output of other processes. Each rank therefore writes to two
pipes of its own, for stdout and stderr, including what C code writes. The parent forwards complete lines to its
``sys.stdout`` and ``sys.stderr``: a terminal, a file or the cell of a notebook.
"""

import builtins
import contextlib
import os
import re
import sys
from typing import TextIO

__all__: list[str] = []

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_READ_BYTES = 1 << 20  # more than the capacity of a pipe
_LONGEST = 1 << 16  # bytes of an incomplete line that is buffered; a longer one is forwarded in parts


def is_interactive(stream: TextIO | None) -> bool:
    """Whether a stream is shown to a user at once: a terminal, or a notebook."""
    return stream is not None and (stream.isatty() or hasattr(builtins, "__IPYTHON__"))


def open_pipe() -> int:
    """Open a pipe for both directions, so that it never reports end of file, not even after the ranks have exited."""
    ends = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        for end in ends:
            os.close(end)


class Output:
    """The pipe of one output stream of one rank, on the side of the parent. ``name`` is "stdout" or "stderr"."""

    def __init__(self, name: str, rank: int, prefix: bool) -> None:
        self._name, self._prefix = name, f"[rank {rank}] " if prefix else ""
        self._rest = b""  # the beginning of an incomplete line
        self.descriptor = open_pipe()

    def forward(self) -> None:
        """Write the lines that are complete to the stream of the parent."""
        try:
            self._rest += os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        # The pattern gets complete lines only: it would search an incomplete line from each of its bytes.
        # A final \r is no line end yet: \n may follow.
        end = 1 + max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r", 0, -1))
        lines, self._rest = _LINE.findall(self._rest[:end]), self._rest[end:]
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def close(self) -> None:
        """Write the rest after the rank has exited, and close the pipe."""
        with contextlib.suppress(OSError, ValueError):  # a stream that can no longer be written
            self.forward()
            self._write([self._rest + b"\n"] if self._rest.strip(b"\r") else [])
        os.close(self.descriptor)

    def _write(self, lines: list[bytes]) -> None:
        stream: TextIO | None = getattr(sys, self._name)
        if not lines or stream is None:
            return
        texts = [line.decode(errors="backslashreplace") for line in lines]
        text = "".join(line if line == "\r" else self._prefix + line for line in texts)
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
