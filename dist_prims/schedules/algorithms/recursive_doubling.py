"""Recursive doubling: all-reduce and scans in log2 n steps, for data so small that only the number of steps counts.

All-reduce: in step k each rank exchanges its whole sum with the rank at distance 2^k and adds what it receives. After
step k each group of 2^(k+1) ranks holds its common sum, and after log2 n steps all ranks hold the sum of all:

    size 4, step 0    0 <-> 1    2 <-> 3    0 and 1 hold r0+r1, 2 and 3 hold r2+r3
            step 1    0 <-> 2    1 <-> 3    all hold (r0+r1)+(r2+r3)

If n is not a power of two, these are the steps of the first p ranks, the largest power of two up to n. The n - p
surplus ranks first give their data to ranks 0, 1, ..., and get the result in a last step.

No algorithm has fewer steps; each step moves the whole buffer. Both ranks of a pair add the same two sums, so all ranks
end with the same bits.

Scan: in step k rank r adds what it receives from rank r - 2^k. Before the step its sum covers the 2^k ranks up to r,
and the received one covers the 2^k ranks before them, so no contribution is counted twice.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, exchanged
from ..cost_card import Card, ceil_log2, floor_pow2
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step
from . import _butterfly as butterfly

__all__: list[str] = []


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size, p = hosts.size, floor_pow2(hosts.size)
    yield EqualSteps(int(size > p), [[MessageSet(p, size, -p, reduce=True)]])
    yield from (EqualSteps(1, [exchanged(p, 1 << step, reduce=True)]) for step in range(ceil_log2(p)))
    yield EqualSteps(int(size > p), [[MessageSet(0, size - p, p)]])


def _scan_load(hosts: Hosts, first: int = 0) -> Iterator[LoadItem]:
    for step in range(ceil_log2(max(hosts.size - first, 1))):
        yield EqualSteps(1, [[MessageSet(first, hosts.size - (1 << step), 1 << step, reduce=True)]])


def _exclusive_scan_load(hosts: Hosts) -> Iterator[LoadItem]:
    yield EqualSteps(int(hosts.size > 1), [[MessageSet(0, hosts.size - 1, 1)]])
    yield from _scan_load(hosts, 1)


@algorithm(
    "all_reduce",
    name="recursive_doubling",
    chunks=1,
    card=Card("l + 2*min(n-p, 1)", "l + min(n-p, 1)", "small data", "Thakur, Rabenseifner and Gropp 2005", load=_load),
)
def all_reduce(size: int) -> Iterator[Step]:
    p = floor_pow2(size)
    rank, buffer = np.arange(p), np.zeros(1, np.int64)
    yield from butterfly.fold(size, p, buffer)
    for step in range(ceil_log2(p)):
        yield Step(src=rank, dst=rank ^ (1 << step), chunk=0, reduce=True)
    yield from butterfly.unfold(size, p, buffer)


def _scan(first: int, size: int) -> Iterator[Step]:
    """Inclusive scan over the ranks ``first`` and above: rank r adds what ranks first..r-1 hold."""
    for step in range(ceil_log2(max(size - first, 1))):
        rank = np.arange(first, size - (1 << step))
        yield Step(src=rank, dst=rank + (1 << step), chunk=0, reduce=True)


SCAN = "Hillis and Steele, Data parallel algorithms, 1986"


@algorithm("scan", name="recursive_doubling", card=Card("L", "L", "any size", SCAN, load=_scan_load))
def scan(size: int) -> Iterator[Step]:
    yield from _scan(0, size)


@algorithm(
    "exclusive_scan",
    name="recursive_doubling",
    card=Card(
        "min(n-1, 1) + K",
        "min(n-1, 1) + K",
        "any size",
        SCAN,
        {"K": lambda n: ceil_log2(max(n - 1, 1))},
        _exclusive_scan_load,
    ),
)
def exclusive_scan(size: int) -> Iterator[Step]:
    rank = np.arange(size - 1)
    if size > 1:
        yield Step(src=rank, dst=rank + 1, chunk=0)  # every rank copies its predecessor's data; a plain scan follows
    yield from _scan(1, size)
