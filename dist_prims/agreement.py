"""Agreement of the ranks on what they are about to do, where the messages alone would not show that they differ."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from .errors import MismatchError
from .torch_compat import all_gather_single

__all__ = ["check_same", "gather_rows"]

_WIDTH = 256


def check_same(text: str, remedy: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Return when every rank gives the same text; MismatchError on every rank, with both texts, when two do not.

    >>> check_same("step 8", "count steps alike", None, torch.device("cpu"))
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group in which it begins: {text}")
    data = text.encode()
    if len(data) > _WIDTH:  # what is too long ends in a checksum, so that it differs where the whole does
        data = data[: _WIDTH - 9] + b"~%08x" % zlib.crc32(data)
    mine = torch.frombuffer(bytearray(data.ljust(_WIDTH, b"\0")), dtype=torch.uint8).to(device)
    everyones, work = gather_rows(mine, group)
    work.wait()
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyones.tolist()]
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise MismatchError(
                f"rank {dist.get_rank(group)}: ranks disagree, no data was touched. Rank 0 has {texts[0]}; "
                f"rank {rank} has {other}. {remedy}"
            )


def gather_rows(mine: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """Begin to gather a flat tensor of every rank; row r is that of rank r, once the work has been waited for.

    >>> rows, work = gather_rows(torch.tensor([1, 2], dtype=torch.uint8), None)
    >>> work.wait(), rows.tolist()
    (True, [[1, 2]])
    """
    rows = mine.new_empty(dist.get_world_size(group), mine.numel())
    return rows, all_gather_single(rows.view(-1), mine, group, async_op=True)
