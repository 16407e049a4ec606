"""``python -m dist_prims tune``: measure the size up to which one shot is the faster all_reduce on this machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..backend import BackendOptions
from ..backend.tuning import TUNING
from ..launch import spawn
from .measure import measure

__all__: list[str] = []

_SIZES = [1 << exponent for exponent in range(11, 20)]  # 2 KB to 512 KB
_ALGORITHMS = {"one shot": _SIZES[-1], "two shots": 0}
_ROUNDS = 9


def main(ranks: Sequence[int]) -> int:
    """Measure for each number of ranks, print, and write the file that new groups read."""
    try:
        TUNING.check_writable()
    except OSError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    limits = {size: spawn(_limit, size, timeout=600)[0] for size in ranks}
    for size, limit in limits.items():
        print(f"{size} ranks: one shot up to {limit} bytes")
    print(f"written to {TUNING.write({'one_shot_bytes': {str(size): limit for size, limit in limits.items()}})}")
    return 0


def _limit() -> int:
    """The largest size up to which one shot was not slower than two shots."""
    torch.set_num_threads(1)
    groups = {
        name: dist.new_group(pg_options=BackendOptions(one_shot_bytes=limit), backend="dist_prims")
        for name, limit in _ALGORITHMS.items()
    }
    limit = 0
    for nbytes in _SIZES:
        _, one, two = measure("all_reduce", nbytes, [], iterations=_ROUNDS, groups=groups)
        if statistics.median(a / b for a, b in zip(one.seconds, two.seconds, strict=True)) > 1.03:
            break
        limit = nbytes
    return limit
