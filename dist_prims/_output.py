"""Output that must not fail: to a stream whose encoding lacks some characters, or that cannot be written."""

from __future__ import annotations

import codecs
import contextlib
import sys

__all__: list[str] = []

_ASCII = {"✓": "+", "✗": "x", "─": "-", "→": ">", "│": "|", "µ": "u"}


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that they cannot encode; without it such a character is an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="dist_prims.in_ascii")


def print_notice(text: str) -> None:
    """Print a line of the library on stderr; a line that cannot be written is dropped.

    The disk may be full, or the reader of the pipe may have ended. An exception would end a call on this rank, such as
    ``init`` or ``grow``, that the other ranks complete.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the program has closed sys.stderr
        print(f"dist_prims: {text}", file=sys.stderr, flush=True)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error("dist_prims.in_ascii", _in_ascii)
