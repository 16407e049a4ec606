"""Plain values as JSON: what ranks send each other about their calls.

A pickle can call any function when it is read, so a process that joined a group without permission could run code in
the processes of all ranks. This form has fixed kinds of values: None, bool, int, float, str, torch.dtype, and lists,
tuples and dictionaries of these. JSON itself keeps neither tuples nor keys that are not strings, so these are written
as objects with one key.
"""

from __future__ import annotations

import json
from typing import Any

import torch

__all__: list[str] = []


def to_text(value: Any) -> str:
    """The value as JSON; TypeError with the type of what is not plain.

    >>> to_text([None, 0.5, (1, "a"), {3: torch.int8}])
    '[null, 0.5, {"tuple": [1, "a"]}, {"dict": [[3, {"dtype": "int8"}]]}]'
    >>> to_text({"a": {1, 2}})
    Traceback (most recent call last):
    TypeError: a set cannot be sent to other ranks; use numbers, texts, and lists, tuples and dictionaries of these
    """
    return json.dumps(_encoded(value))


def from_text(text: str) -> Any:
    """The value that :func:`to_text` has written; ValueError for any other text.

    >>> from_text(to_text([None, 0.5, (1, "a"), {3: torch.int8}]))
    [None, 0.5, (1, 'a'), {3: torch.int8}]
    >>> from_text('{"eval": ["1"]}')
    Traceback (most recent call last):
    ValueError: not a plain value: {"eval": ["1"]}
    """
    try:
        return _decoded(json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a plain value: {text[:100]}") from error


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    if type(value) in (tuple, torch.Size):  # a named tuple would arrive without its names
        return {"tuple": [_encoded(each) for each in value]}
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to other ranks; use numbers, texts, and lists, tuples and "
        "dictionaries of these"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "tuple":
        return tuple(_decoded(each) for each in content)
    if kind == "dict":
        return {_decoded(key): _decoded(each) for key, each in content}
    raise ValueError(kind)


_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
