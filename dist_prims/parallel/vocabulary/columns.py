"""Agreement before rows are gathered: where each rank's columns begin, and that all ranks mean the same rows.

Each rank sends one small message of a fixed size, which describes its call or has the error that prevents the call. So
every rank raises then, instead of waiting for rows that will not come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ...agreement import check_failures, check_lists, failure_text, gather_fields
from ...torch_compat import device_types

__all__: list[str] = []

_WIDTH = 320  # bytes of a rank's message
_REMEDY = "Every rank gives the same rows, targets, dtype and options, and columns of its own"
_Prepared = TypeVar("_Prepared")


@dataclass(frozen=True)
class Share:
    """Numbers of all ranks that a gradient needs. No group: a graph that keeps one alive ends it after Python."""

    words: int
    class_weights: tuple[float, ...]  # their sum on each rank; the number of columns where there are none


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary."""

    group: dist.ProcessGroup
    first: int  # the word of this rank's first column
    share: Share


@dataclass(frozen=True)
class Targets:
    """Targets as three numbers to compare: the lowest and the highest that count, and a checksum of all."""

    lowest: int = 0
    highest: int = -1
    checksum: int = 0

    @staticmethod
    def of(targets: torch.Tensor, ignore_index: int) -> Targets:
        """
        >>> Targets.of(torch.tensor([3, -100, 1]), ignore_index=-100)
        Targets(lowest=1, highest=3, checksum=833389194)
        """
        if not targets.numel():
            return Targets()
        flat = targets.reshape(-1)
        # Not linear in the number or its place, or many different targets would have the same sum.
        mixed = flat + torch.arange(len(flat), device=flat.device) * -7046029254386353131
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        mixed = mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
        checksum = mixed.sum()
        live = flat != ignore_index
        limits = torch.iinfo(torch.int64)
        lowest = torch.where(live, flat, limits.max).min()
        highest = torch.where(live, flat, limits.min).max()
        found = torch.stack([lowest, highest, checksum]).tolist()  # one copy from the device
        return (
            Targets(found[0], found[1], found[2] % 2**32) if found[0] <= found[1] else Targets(0, -1, found[2] % 2**32)
        )


@dataclass(frozen=True)
class Announcement:
    """The call that a rank is about to make: ``text`` and ``targets`` must be the same on every rank."""

    text: str
    columns: int
    class_weight: float = 0.0  # the sum over its columns
    targets: Targets = Targets()


def agree(
    call: str, group: dist.ProcessGroup, rows: object, prepare: Callable[[], tuple[Announcement, _Prepared]]
) -> tuple[VocabularyPart, _Prepared]:
    """This rank's part of the columns, and the second result of ``prepare``; every rank raises if ``prepare`` fails on
    one, or the announcements of two differ."""
    # The device of the rows; a rank whose argument is no tensor sends its error from another one.
    device = rows.device if isinstance(rows, torch.Tensor) else torch.device(device_types(group)[-1])
    failure: Exception | None = None
    announced = Announcement("", 0)
    try:
        announced, prepared = prepare()
    except Exception as error:
        failure = ValueError(f"rank {group.rank()}: {call}: {error}")
        failure.__cause__ = error
    targets = announced.targets
    text = f"{announced.text}, targets from {targets.lowest} to {targets.highest}, {targets.checksum:08x}"
    fields = (failure_text(failure), text, announced.columns, announced.class_weight)
    found = gather_fields(fields, _WIDTH, group, device)
    check_failures(call, failure, [each[0] for each in found], group)
    check_lists(call, [[each[1]] for each in found], _REMEDY, group)
    columns = [each[2] for each in found]
    _check_range(call, group.rank(), targets, sum(columns))
    share = Share(sum(columns), tuple(each[3] for each in found))
    return VocabularyPart(group, sum(columns[: group.rank()]), share), prepared


def _check_range(call: str, rank: int, targets: Targets, words: int) -> None:
    for value in (targets.lowest, targets.highest) if targets.lowest <= targets.highest else ():
        if not 0 <= value < words:
            raise ValueError(
                f"rank {rank}: {call}: target {value} is out of range: the ranks together have {words} columns, so "
                f"targets go from 0 to {words - 1}; rows without a target have ignore_index"
            )
