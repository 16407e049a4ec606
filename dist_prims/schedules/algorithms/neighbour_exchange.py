"""Neighbour exchange all-gather: n/2 steps, half as many as a ring, between neighbours only.

A ring moves one chunk a step in one direction. Here neighbours *exchange*. In step 0 each rank exchanges its own chunk
with one neighbour, so each pair holds a pair of chunks. In every further step each rank exchanges with its other
neighbour, alternating, and sends the pair of chunks that it received last (in step 1: its own pair). Each step brings a
new pair, so after n/2 steps every rank has all n chunks.

    size 6, step 0    0-1 2-3 4-5    each its own chunk: pairs 01, 23, 45 are known to their members
            step 1    1-2 3-4 5-0    each its pair
            step 2    0-1 2-3 4-5    each the pair it got in step 1

If n is odd, the last rank is a *guest*, and the rank before it is its *carrier*, which sends the guest's chunk with its
own chunks, and forwards to the guest what it receives.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, LoadItem, MessageSet, exchanged
from ..cost_card import Card
from ..load import Hosts
from ..registry import algorithm
from ..steps import Step, WideStep

__all__: list[str] = []


def _load(hosts: Hosts) -> Iterator[LoadItem]:
    """The steps below in closed form, for prices on any number of ranks and hosts."""
    size, even = hosts.size, hosts.size - hosts.size % 2
    guest = int(size > even > 0)
    to_guest = [[MessageSet(even - 1, even, 1, chunks=2)]] * guest
    yield EqualSteps(guest, [[MessageSet(even, size, -1)]])
    if even:
        yield EqualSteps(1, [exchanged(even, 1, 1 + guest), *to_guest])
    rest = even // 2 - 1
    # In steps 1, 3, ...: ranks 1-2, 3-4, ..., and the last rank with rank 0.
    other = [m._replace(first=m.first + 1, last=m.last + 1) for m in exchanged(even - 2, 1)]
    other += [MessageSet(0, 1, even - 1), MessageSet(even - 1, even, 1 - even)]
    yield EqualSteps((rest + 1) // 2, [[move._replace(chunks=2 + guest) for move in other], *to_guest])
    yield EqualSteps(rest // 2, [exchanged(even, 1, 2 + guest), *to_guest])
    yield EqualSteps(guest, to_guest)


@algorithm(
    "all_gather",
    name="neighbour_exchange",
    card=Card(
        "(n - n%2)/2 + 2*(n%2)*min(n-1, 1)",
        "(n - 1 + (n%2)*max(0, n - max(0, 4-n)))/n",
        "medium data, even sizes, ranks next to each other",
        "Chen, Zhang, Zhang et al. 2005 (Open MPI)",
        load=_load,
    ),
)
def all_gather(size: int) -> Iterator[Step]:
    even = size - size % 2  # the number of ranks that exchange, and the rank of the guest
    carrier = even - 1
    has_guest = size % 2 == 1 and size > 1
    if has_guest:
        yield Step(src=even, dst=carrier, chunk=even)
    rank = np.arange(even)
    peers = [(rank + np.where((rank + step) % 2 == 0, 1, -1)) % even for step in (0, 1)]
    newest = rank // 2  # the pair of chunks that each rank received last, chunks 2 i and 2 i + 1; at first its own pair
    for step in range(even // 2):
        peer = peers[step % 2]
        exchange = _pairs(rank, peer, newest, even, has_guest) if step else _own(rank, peer, even, has_guest)
        yield Step.concat([exchange, _to_guest(step, carrier, newest)]) if has_guest else exchange
        newest = newest[peer] if step else newest
    if has_guest:
        yield _to_guest(even // 2, carrier, newest)


def _to_guest(step: int, carrier: int, newest: NDArray[np.int64]) -> Step:
    """The carrier forwards what it received in the previous step: in step 0 its own chunk, as it has received none."""
    received = [[carrier], [carrier - 1]][step] if step < 2 else [2 * newest[carrier], 2 * newest[carrier] + 1]
    return Step(src=carrier, dst=carrier + 1, chunk=received)


def _own(rank: NDArray[np.int64], peer: NDArray[np.int64], even: int, has_guest: bool) -> Step:
    """Step 0: each rank sends its own chunk, and the carrier sends the guest's chunk too."""
    chunk_of_guest = [Step(src=even - 1, dst=peer[even - 1], chunk=even)] if has_guest else []
    return Step.concat([Step(rank, peer, rank), *chunk_of_guest])


def _pairs(
    rank: NDArray[np.int64], peer: NDArray[np.int64], newest: NDArray[np.int64], even: int, has_guest: bool
) -> Step:
    """A later step: each rank sends its newest pair; the guest's chunk travels with the last pair."""
    pairs = WideStep(Step(rank, peer, 2 * newest), 2)  # two consecutive chunks
    if not has_guest:
        return pairs
    senders = rank[newest == even // 2 - 1]  # of the last pair
    return Step.concat([pairs, Step(senders, peer[senders], even)])
