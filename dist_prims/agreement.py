"""Agreement of the ranks: all ranks give the same value and go on, or every rank raises.

Before a rank sends bulky data, it sends a small description of its call, or of the error that keeps it from making the
call. So no rank waits for data that will not come, and no rank adds data of another meaning to its own:

- Ranks that differ: every rank raises MismatchError with both values and the remedy.
- A rank that failed: that rank raises its own error; the others raise MismatchError, which names the rank, the
  operation and the text of the error.

The functions are :func:`gather_values`, :func:`check_same` (or :func:`check_lists` of gathered values), and
:func:`broadcast_value`. Values travel as JSON (plain_values.py), no pickle, in one collective; long values, and the
value of one rank, in two.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .errors import MismatchError
from .plain_values import from_text, to_text
from .torch_compat import all_gather_single, message_device

__all__: list[str] = []

T = TypeVar("T")
_LENGTH, _FITS = 8, 504  # bytes of a row of gather_values: the length of a text, and the text as far as it fits


def check_same(text: str, remedy: str, group: dist.ProcessGroup | None, failure: Exception | None = None) -> None:
    """Return when every rank gives the same ``text`` and none gives a ``failure``; otherwise raise on every rank.

    ``text`` describes the call of this rank, and ``remedy`` is a sentence for the error. Every rank calls this.

    >>> check_same("step 8", "Make the same number of steps on every rank", None)
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group in which it begins: {text}")
    check_lists("", [[of_rank] for of_rank in gather_values(text, group, text, failure)], remedy, group)


def check_lists(
    operation: str, lists: Iterable[Sequence[object] | None], remedy: str, group: dist.ProcessGroup | None
) -> None:
    """Raise MismatchError with the first items that differ if the lists of two ranks do.

    ``lists`` has the list of each rank, or None for a rank without a list; it must be the same on all ranks.
    """
    if found := first_difference(enumerate(lists)):
        raise MismatchError(
            f"rank {dist.get_rank(group)}: {operation and f'{operation}: '}ranks disagree, no data was touched. "
            f"Rank {found.first} has {found.here}; rank {found.second} has {found.there}. {remedy}"
        )


def check_failures(
    operation: str, failure: Exception | None, texts: Iterable[str | None], group: dist.ProcessGroup | None
) -> None:
    """Raise this rank's ``failure``, or MismatchError if the text of another rank's failure is among ``texts``."""
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise MismatchError(f"rank {dist.get_rank(group)}: {operation}: rank {rank} failed: {text}")


def failure_text(failure: Exception | None) -> str | None:
    """The text of an error as other ranks report it."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


class Difference(NamedTuple):
    """Two lists, by their numbers, and the items at the first place at which they differ."""

    first: int
    here: object
    second: int
    there: object


def first_difference(numbered: Iterable[tuple[int, Sequence[object] | None]]) -> Difference | None:
    """The first difference of a list from the first list, if there is one; a list that is None is left out.

    >>> first_difference([(0, ["a", "b"]), (1, None), (2, ["a"])])
    Difference(first=0, here='b', second=2, there='nothing more')
    """
    lists = [(number, items) for number, items in numbered if items is not None]
    for number, items in lists:
        for here, there in zip_longest(lists[0][1], items, fillvalue="nothing more"):
            if here != there:
                return Difference(lists[0][0], here, number, there)
    return None


def gather_values(
    value: T, group: dist.ProcessGroup | None, operation: str = "gather", failure: Exception | None = None
) -> list[T]:
    """Return the ``value`` of each rank, which must be plain (see plain_values.py).

    Every rank calls this, and it is a barrier. Every rank raises if one gives a ``failure`` of the ``operation``, or a
    value that is not plain.

    >>> gather_values(3, None)
    [3]
    """
    if dist.get_world_size(group) == 1:
        check_failures(operation, failure, (), group)
        return [value]
    text, failure = _text_or_failure(value, failure)
    pairs = [from_text(of_rank) for of_rank in _gather_texts(text, group)]  # value and text of the failure
    check_failures(operation, failure, [text_of_failure for _, text_of_failure in pairs], group)
    return [value_of_rank for value_of_rank, _ in pairs]


def broadcast_value(value: T, source: int, group: dist.ProcessGroup | None) -> T:
    """The ``value`` of rank ``source`` of the group, on every rank; see :func:`gather_values`."""
    is_source = dist.get_rank(group) == source
    text, failure = _text_or_failure(value) if is_source else ("", None)
    device = message_device(group)
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, group=group, group_src=source)
    data = _bytes_of(text.encode("ascii"), int(length), device)
    dist.broadcast(data, group=group, group_src=source)
    sent: tuple[T, str | None] = from_text(bytes(data.tolist()).decode())
    texts = [sent[1] if rank == source else None for rank in range(dist.get_world_size(group))]
    check_failures("broadcast", failure, texts, group)
    return sent[0]


def _text_or_failure(value: Any, failure: Exception | None = None) -> tuple[str, Exception | None]:
    """The pair (value, text of the failure) as text, and the failure: the given one, or that the value is not plain."""
    try:
        return to_text((value if failure is None else None, failure_text(failure))), failure
    except TypeError as error:
        return to_text((None, failure_text(error))), error


def _gather_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The text of each rank; all are ASCII."""
    data, device = text.encode("ascii"), message_device(group)
    # 1. Each rank sends the length of its text, and as much of the text as fits.
    row = _bytes_of(len(data).to_bytes(_LENGTH, "little") + data[:_FITS], _LENGTH + _FITS, device)
    gathered, work = gather_rows(row, group)
    work.wait()
    rows = [bytes(row) for row in gathered.tolist()]
    lengths = [int.from_bytes(row[:_LENGTH], "little") for row in rows]
    if max(lengths) <= _FITS:
        return [row[_LENGTH : _LENGTH + length].decode() for row, length in zip(rows, lengths, strict=True)]
    # 2. If a text did not fit, each rank sends the whole text.
    whole, work = gather_rows(_bytes_of(data, max(lengths), device), group)
    work.wait()
    return [bytes(text[:length].tolist()).decode() for text, length in zip(whole, lengths, strict=True)]


def _bytes_of(data: bytes, width: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8).to(device)


def gather_rows(mine: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """Start to gather a flat tensor of every rank. Return the rows and the work to wait for: row r is from rank r.

    >>> rows, work = gather_rows(torch.tensor([1, 2], dtype=torch.uint8), None)
    >>> work.wait(), rows.tolist()
    (True, [[1, 2]])
    """
    rows = mine.new_empty(dist.get_world_size(group), mine.numel())
    return rows, all_gather_single(rows.view(-1), mine, group, async_op=True)


def fit(text: str, width: int) -> bytes:
    """The text in at most ``width`` bytes; a longer one ends in a checksum, so that two long texts still differ.

    >>> fit("all_reduce", 10), fit("reduce_scatter", 10)
    (b'all_reduce', b'r~2bf3c55c')
    """
    data = text.encode()
    return data if len(data) <= width else data[: max(width - 9, 0)] + b"~%08x" % zlib.crc32(data)
