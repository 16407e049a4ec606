"""Output of the commands on a terminal, or into a file, whose encoding lacks some characters."""

from __future__ import annotations

import codecs
import sys

__all__: list[str] = []

_ASCII = {"✓": "+", "✗": "x", "─": "-", "→": ">", "│": "|", "µ": "u"}


def replace_unencodable() -> None:
    """Make stdout and stderr replace characters that they cannot encode; without it such a character is an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="dist_prims.in_ascii")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(each, "?") for each in error.object[error.start : error.end]), error.end


codecs.register_error("dist_prims.in_ascii", _in_ascii)
