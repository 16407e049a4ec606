"""Tensors sharded by rows: written by the ranks that hold them, read on any number of ranks.

A whole tensor is the concatenation of the ranks' rows (its first dimension). Rank r of n has the rows from
r * count // n up to (r + 1) * count // n. With padding it has those from r * block up to (r + 1) * block, with
block = count / n rounded up, and zeros beyond the last row. A reader thus knows which rows it needs, the manifest says
where they are, and only those are read. Tensors without rows, such as an optimizer's number of steps, and plain values
must be the same on all ranks. This is not checked: those of one rank are read.

::

    3 ranks saved 7 rows     | 0 1 | 2 3 | 4 5 6 |
    2 ranks read them        | 0 1   2 | 3   4 5 6 |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...collectives.flat import split_evenly
from .plain_state import Target, change, leaves, whole_number

__all__: list[str] = []


@dataclass(frozen=True)
class Padded:
    """A sharded object whose tensors have equal length on all ranks: ``rows`` rows of data, then padding with zeros.

    >>> Padded(torch.zeros(4), rows=10).rows  # rank r of 3 has rows 4r to 4r + 3; the last two of rank 2 are none
    10
    """

    target: Target
    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", whole_number(self.rows, "Padded: rows"))
        if self.rows < 0:
            raise ValueError(f"Padded: rows={self.rows} must be at least 0")


Piece = Callable[[int], Any]  # a saved rank's state


def unpadded(given: Target | Padded) -> tuple[Target, int | None]:
    """The object, and the number of its rows without padding; None if it is not padded."""
    return (given.target, given.rows) if isinstance(given, Padded) else (given, None)


def rows_of(count: int, size: int, padded: bool) -> list[int]:
    """The number of rows of each rank, including padding.

    >>> rows_of(7, 3, padded=False), rows_of(7, 3, padded=True)
    ([2, 2, 3], [3, 3, 3])
    """
    return [-(-count // size)] * size if padded else split_evenly(count, size)


def describe(name: str, state: Any) -> list[dict[str, Any]]:
    """The tensors of this rank's part: path, number of rows, and shape and dtype of a row."""
    return [
        {"path": list(path), "rows": len(tensor), "row": list(tensor.shape[1:]), "dtype": str(tensor.dtype)[6:]}
        for path, tensor in leaves(name, state)
        if tensor.dim()
    ]


def agreed(what: str, parts: Sequence[list[dict[str, Any]]], padded: int | None) -> dict[str, Any]:
    """One description of all ranks' parts, with the rows by rank; ValueError if they are not parts of one tensor."""
    size = len(parts)
    tensors = []
    for rank, part in enumerate(parts):
        if [_but_rows(each) for each in part] != [_but_rows(each) for each in parts[0]]:
            raise ValueError(
                f"{what} holds {_words(parts[0])} on rank 0 and {_words(part)} on rank {rank}; "
                "only the number of rows may differ"
            )
    for each in zip(*parts, strict=True):
        rows = [part["rows"] for part in each]
        wanted = rows_of(sum(rows) if padded is None else padded, size, padded is not None)
        if rows != wanted:
            rule = "split evenly" if padded is None else f"padded, {padded} rows"
            raise ValueError(
                f"{what} has {rows} rows by rank at {each[0]['path']}; {rule}, they would be {wanted}; give "
                "the ranks these numbers of rows, or use Padded(..., rows)"
            )
        tensors.append({**each[0], "rows": rows})
    return {"padded": padded, "tensors": tensors}


def join(name: str, about: dict[str, Any], rank: int, size: int, piece: Piece) -> Any:
    """The state of ``rank`` of ``size``, from the pieces of the ranks that saved; only the needed ones are read."""
    padded = about["padded"]
    saved_by = len(about["tensors"][0]["rows"]) if about["tensors"] else 1
    own = piece(rank % saved_by)
    found = {}
    for each in about["tensors"]:
        count = sum(each["rows"]) if padded is None else padded
        saved = [0, *itertools.accumulate(each["rows"])]
        ends = [0, *itertools.accumulate(rows_of(count, size, padded is not None))]
        low, high = min(ends[rank], count), min(ends[rank + 1], count)
        path = tuple(each["path"])
        parts = [
            _at(piece(owner), path)[max(low - start, 0) : high - start]
            for owner, (start, stop) in enumerate(itertools.pairwise(saved))
            if start < high and low < stop
        ]
        whole = _at(own, path).new_zeros(ends[rank + 1] - ends[rank], *each["row"])
        if parts:
            torch.cat(parts, out=whole[: high - low])
        found[path] = whole
    return change(name, own, lambda path, tensor: found[path] if path in found else tensor.clone())


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def _but_rows(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != "rows"}


def _words(part: list[dict[str, Any]]) -> str:
    shown = [f"{each['path']}: {each['dtype']} rows of {each['row']}" for each in part]
    return ", ".join(shown[:3]) + f" and {len(shown) - 3} more" * (len(shown) > 3) or "no tensor"
