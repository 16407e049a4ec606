"""Bruck's algorithms: all-gather and all-to-all in ceil(log2 n) steps for any number of ranks.

All-gather: before step k rank r holds the 2^k chunks r, r+1, ... (modulo n). In step k it receives from rank r + 2^k
the chunks that continue them. The last step brings only the chunks that are still missing, so each rank receives n-1
chunks, as few as possible.

All-to-all: the *way* i of a block is the number of places from its sender to its receiver. The block travels by the
powers of two in i: in step k rank r sends to rank r + 2^k, in one message, every block that it holds whose way has bit
k set:

    size 6, a block for the rank 5 places further (5 = 1 + 4)    step 0: +1, into scratch    step 2: +4, arrives

The first hop reads the input, the last one writes the output, and the hops between go through scratch. A block travels
up to log2 n times, so the algorithm pays for small blocks only.

``radix``: ways in digits to another base than 2, as in the paper. In step k rank r sends a message for each digit d,
from 1 to radix-1, to rank r + d * radix^k. All-to-all then moves each block fewer times, in more messages:

    size 9     radix 2: 4 steps, 4 messages, 13 blocks sent     radix 3: 2 steps, 4 messages, 12 blocks

All-gather moves the same bytes in fewer steps, and several messages of a step are on the link one after the other
without waiting for each other.
"""

from collections.abc import Iterator

import numpy as np

from ..closed_form_load import EqualSteps, LoadItem, shifted
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import CountedStep, Step
from .binomial import distances

__all__: list[str] = []

SOURCE = "Bruck, Ho, Kipnis, Upfal and Weathersby 1997"


def _gather_load(hosts: Hosts, radix: int) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size = hosts.size
    for before in distances(size, radix):
        after = min(radix * before, size)
        yield EqualSteps(
            1, [shifted(size, -place, min(before, after - place)) for place in range(before, after, before)]
        )


def _all_to_all_load(hosts: Hosts, radix: int) -> Iterator[LoadItem]:
    size = hosts.size
    way = np.arange(size)
    for distance in distances(size, radix):
        digits = np.bincount(way // distance % radix, minlength=radix)[1:].tolist()
        messages = [(digit * distance, blocks) for digit, blocks in enumerate(digits, start=1) if blocks]
        yield EqualSteps(1, [shifted(size, places, blocks) for places, blocks in messages])


@algorithm(
    "all_gather",
    name="bruck",
    card=Card("L", "(n-1)/n", "small data, any size", SOURCE, load=_gather_load),
    variants=[{"radix": 3}],
)
def all_gather(size: int, radix: int = 2) -> Iterator[Step]:
    for before in distances(size, radix):
        yield _gather_step(size, before, min(radix * before, size))


def _gather_step(size: int, before: int, after: int) -> Step:
    """The step before which each rank r holds ``before`` chunks, r, r + 1, ..., and after which it holds ``after``."""
    rank = np.arange(size)

    def rows() -> Step:
        receiver, place = np.repeat(rank, after - before), np.tile(np.arange(before, after), size)
        return Step((receiver + place // before * before) % size, receiver, (receiver + place) % size)

    first = np.arange(before, after, before)  # of the chunks of each message, counted from the receiver's own
    receiver, place = np.repeat(rank, len(first)), np.tile(first, size)
    messages = Step((receiver + place) % size, receiver, (receiver + place) % size)
    return CountedStep(messages, np.minimum(before, after - place), rows)


@algorithm(
    "all_to_all",
    name="bruck",
    scratch=lambda size, radix: size,
    card=Card(
        "max(L, 1)",
        "b/n",
        "small blocks",
        SOURCE,
        {"b": lambda n: sum(i.bit_count() for i in range(n))},
        _all_to_all_load,
    ),
    variants=[{"radix": 3}, {"radix": 4}, {"radix": 8}],
)
def all_to_all(size: int, radix: int = 2) -> Iterator[Step]:
    rank = np.arange(size)
    keep = Step(src=rank, dst=rank, chunk=rank, into=size + rank)
    if size == 1:
        yield keep
    for distance in distances(size, radix):
        hop = _hop(size, distance, radix)
        yield hop if distance > 1 else Step.concat([keep, hop])


def _hop(size: int, distance: int, radix: int) -> Step:
    """Move the blocks whose way has the digit d at this distance by d * ``distance`` ranks, in one message a digit.

    Block i of a rank lies in scratch chunk 2 * size + i between its first hop and its last.
    """
    rank = np.arange(size)
    digit = rank // distance % radix
    count = np.bincount(digit)  # np.unique() would import numpy.ma, which takes longer than the choice of a schedule
    way, digits = digit.nonzero()[0], count[1:].nonzero()[0] + 1

    def rows() -> Step:
        src, i = np.repeat(rank, len(way)), np.tile(way, size)
        dst = (src + np.tile(digit[way], size) * distance) % size
        has_hopped, will_hop = i % distance > 0, i // (distance * radix) > 0
        chunk = np.where(has_hopped, 2 * size + i, (src + i) % size)
        into = np.where(will_hop, 2 * size + i, size + (dst - i) % size)
        return Step(src, dst, chunk, into=into)

    src, dst = rank.repeat(len(digits)), (rank[:, None] + digits * distance).ravel() % size
    return CountedStep(Step(src, dst, src), count[digits][None].repeat(size, axis=0).ravel(), rows)
