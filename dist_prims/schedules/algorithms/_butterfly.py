"""Butterfly exchanges, shared by halving-doubling and Swing: in every step each rank exchanges with one peer.

The two algorithms differ only in their peers. Let ``peers[s][r]`` be the peer of rank r in step s. A reduce-scatter
must leave each rank with its own block only. Let ``active[s][r]`` be the blocks that rank r still works on before step
s. Both ranks of a pair work on the same blocks before their exchange, and afterwards each on its part of them. So the
sets follow from the last step backwards:

    active[last + 1][r] = {block of r}          active[s][r] = active[s + 1][r]  |  active[s + 1][peers[s][r]]

Step s of a reduce-scatter: rank r sends its peer the blocks ``active[s + 1][peer]`` and adds what it receives to its
own ``active[s + 1][r]``. After s steps its sums cover the 2^s ranks that it exchanged with, directly or indirectly;
after the last step they cover all ranks. An all-gather runs the same steps backwards and copies instead of adding.

If the number of ranks is not a power of two, a block may reach a rank in two ways. An all-gather then sends only the
blocks that the peer does not have yet, so every rank receives each block once; a reduce-scatter is its reverse.

The exchanges run over p ranks: a power of two for halving-doubling, an even number for Swing. For any other size the
surplus ranks p.. first add their data to a partner below p (``fold``), and receive the result from it at the end
(``unfold``).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..closed_form_load import EqualSteps, zigzag
from ..steps import CountedStep, Step

__all__: list[str] = []

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def fold(size: int, p: int, chunks: Ints) -> Iterator[Step]:
    """Add the data of the surplus ranks p.. to ranks 0.."""
    if p < size:
        yield _send_all_chunks(np.arange(p, size), np.arange(size - p), chunks, reduce=True)


def unfold(size: int, p: int, chunks: Ints) -> Iterator[Step]:
    """Copy the result from ranks 0.. to the surplus ranks p.."""
    if p < size:
        yield _send_all_chunks(np.arange(size - p), np.arange(p, size), chunks, reduce=False)


def _send_all_chunks(src: Ints, dst: Ints, chunks: Ints, reduce: bool) -> Step:
    return Step(np.repeat(src, len(chunks)), np.repeat(dst, len(chunks)), np.tile(chunks, len(src)), reduce)


def _active_chunks(peers: Sequence[Ints], blocks: Bools) -> list[Bools]:
    """active[s][r, chunk]: whether rank r still works on the chunk before step s. ``blocks``: after the last step."""
    active = [blocks]
    for peer in reversed(peers):
        active.append(active[-1] | active[-1][peer])
    return active[::-1]


def _exchange_with_peers(peer: Ints, after: Bools, reduce: bool) -> Step:
    """The exchange of every rank with its peer; ``after``: the active chunks after this step of the reduce-scatter.

    A reducing rank sends the chunks that its peer keeps and it does not keep itself. A gathering rank sends the chunks
    that it has and its peer does not have.
    """
    sent = after[peer] & ~after if reduce else after & ~after[peer]

    def rows() -> Step:
        src, chunk = np.divmod(np.flatnonzero(sent), sent.shape[1])  # np.nonzero takes twice as long
        return Step(src, peer[src], chunk, reduce)

    count = np.count_nonzero(sent, axis=1)
    src = np.flatnonzero(count)
    return CountedStep(Step(src, peer[src], np.zeros_like(src), reduce), count[src], rows)


def reduce_scatter(peers: Sequence[Ints], blocks: Bools) -> Iterator[Step]:
    """Reduce-scatter: rank r ends with the chunks that blocks[r] marks, reduced over all ranks of the butterfly."""
    for peer, after in zip(peers, _active_chunks(peers, blocks)[1:], strict=True):
        yield _exchange_with_peers(peer, after, reduce=True)


def gather(peers: Sequence[Ints], blocks: Bools) -> Iterator[Step]:
    """All-gather: rank r begins with the chunks that blocks[r] marks; every rank of the butterfly ends with all."""
    for peer, after in reversed(list(zip(peers, _active_chunks(peers, blocks)[1:], strict=True))):
        yield _exchange_with_peers(peer, after, reduce=False)


def all_reduce(size: int, p: int, peers: Sequence[Ints]) -> Iterator[Step]:
    """All-reduce of ``size`` ranks, of which the first p are in the butterfly: reduce-scatter, then all-gather."""
    own, chunks = np.eye(p, dtype=bool), np.arange(p)
    yield from fold(size, p, chunks)
    yield from reduce_scatter(peers, own)
    yield from gather(peers, own)
    yield from unfold(size, p, chunks)


def swing_gather(p: int, surplus: int = 0) -> Iterator[EqualSteps]:
    """The steps of an all-gather among p ranks, an even number, with the peers of Swing.

    ``surplus``: the chunks of surplus ranks, which rank 0 sends in each step with its own ones. Every rank has them
    here: the busiest rank of a step decides about its time.
    """
    steps = (p - 1).bit_length()
    for step in reversed(range(steps)):
        held = 1 << (steps - 1 - step)
        yield EqualSteps(1, [zigzag(p, (1 - (-2) ** (step + 1)) // 3, min(held, p - held) + surplus)])
