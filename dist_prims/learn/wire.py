"""The form of what a check and the process of an answer send each other: lines of JSON, so data and never code.

JSON has no tuples and no floats of 32 bits; each is an object with one key. A value of any other type arrives as
:class:`Other`, which has its text and equals nothing.

>>> from_line(to_line({"value": (1, np.float32(0.5), [np.int64(2), None])}))
{'value': (1, np.float32(0.5), [2, None])}
>>> from_line(to_line({"value": {3}}))["value"]
{3}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__: list[str] = []

_MOST_TEXT = 200  # characters of a value that is not data


@dataclass(frozen=True, eq=False)
class Other:
    """A value that is not data: its text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def printable(text: str) -> str:
    """A text of an answer that can be shown: its characters cannot end the line or move the cursor of a terminal.

    >>> printable("x\\r\\x1b[2K✓\\ty")
    'x??[2K✓\\ty'
    """
    return "".join(each if each.isprintable() or each == "\t" else "?" for each in text)


def one_line(text: str) -> str:
    """The words of a text of an answer, in one line: no line of it looks like the result of a check."""
    return printable(" ".join(text.split()))


def to_line(message: dict[str, Any]) -> bytes:
    return json.dumps({key: _encoded(value) for key, value in message.items()}).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """The message of a line; ValueError for a line that is none."""
    try:
        message = json.loads(line)
        return {str(key): _decoded(value) for key, value in message.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a message: {line[:100]!r}") from error


def _encoded(value: Any) -> Any:
    if isinstance(value, np.float32):
        return {"float32": float(value)}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(each) for each in value]}
    return {"other": repr(value)[:_MOST_TEXT]}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float32":
        return np.float32(content)
    if kind == "tuple":
        return tuple(_decoded(each) for each in content)
    if kind == "other":
        return Other(one_line(str(content)))
    raise ValueError(kind)
