"""The schedules of registered algorithms."""

from __future__ import annotations

import functools
import operator
from typing import Any

from .contract import ROOTED
from .registry import lookup, version
from .schedule import Schedule

__all__: list[str] = []


def build(collective: str, algorithm: str, size: int, **parameters: Any) -> Schedule:
    """The schedule of an algorithm for a number of ranks; rooted collectives take ``root=``, by default 0.

    >>> ring = build("all_reduce", "ring", size=4)
    >>> len(ring.steps), ring.bytes_sent(rank=0)
    (6, Fraction(3, 2))
    """
    registered = lookup(collective, algorithm)
    ranks = _integer(f"{collective} {algorithm}", "size", size)
    if ranks < 1:
        raise ValueError(f"{collective} {algorithm}: size={size}; it must be at least 1 rank")
    unknown = set(parameters) - set(registered.parameters) - ({"root"} if collective in ROOTED else set())
    if unknown:
        takes = ", ".join([*registered.parameters, *(["root"] if collective in ROOTED else [])]) or "none"
        raise ValueError(f"{collective} {algorithm} takes no parameter {sorted(unknown)[0]!r}; it takes: {takes}")
    for key, value in parameters.items():
        _check_kind(f"{collective} {algorithm}", key, value, registered.parameters.get(key))
    if collective not in ROOTED:
        return Schedule.of(registered(ranks, **parameters))
    root = _integer(f"{collective} {algorithm}", "root", parameters.pop("root", 0))
    if not 0 <= root < ranks:
        raise ValueError(f"{collective} {algorithm}: root {root} is out of range; ranks are 0..{ranks - 1}")
    return Schedule.of(registered(ranks, root, **parameters))


def _integer(where: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{where}: {name}={value!r}; it must be a whole number") from None


def _check_kind(where: str, name: str, value: Any, default: Any) -> None:
    """Raise ValueError unless a value is of the kind of the parameter's default; None permits every kind."""
    if type(default) is int and not hasattr(value, "__index__"):
        raise ValueError(f"{where}: {name}={value!r}; it must be a whole number, such as {default}, its default")
    if type(default) is str and not isinstance(value, str):
        raise ValueError(f"{where}: {name}={value!r}; it must be a name, such as {default!r}, its default")


def build_shared(collective: str, algorithm: str, size: int, /, **parameters: Any) -> Schedule:
    """The same as :func:`build`, but equal calls return one object, for which prices and programs are cached."""
    return _build_once(version(), collective, algorithm, size, tuple(sorted(parameters.items())))


@functools.lru_cache(maxsize=256)
def _build_once(
    _version: int, collective: str, algorithm: str, size: int, parameters: tuple[tuple[str, Any], ...]
) -> Schedule:
    return build(collective, algorithm, size, **dict(parameters))
