"""Butterflies: in every step the ranks pair up, and what a pair has exchanged the next pairs build on.

Who pairs with whom is all that halving-doubling and Swing differ in. Let ``peers[s][r]`` be rank r's peer in step s.
Reducing and scattering, rank r must end with its own block, so before the last step it and its last peer together
answer for both blocks, before that four ranks for four:

    duty[last + 1][r] = {block of r}          duty[s][r] = duty[s + 1][r]  with  duty[s + 1][peers[s][r]]

and in step s rank r sends its peer what is the peer's duty from then on. Gathering is the same, backwards.

A butterfly wants a power of two. For another size the surplus ranks first add theirs to a partner, and get the result
from it at the end.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost_card import floor_pow2
from ..schedule import Step

__all__ = ["fold", "gather", "reduce_scatter", "unfold"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def fold(size: int, chunks: Ints) -> Iterator[Step]:
    """Ranks p.. add the chunks of all their data to ranks 0.. (p: the largest power of two)."""
    p = floor_pow2(size)
    if p < size:
        yield _each(np.arange(p, size), np.arange(size - p), chunks, reduce=True)


def unfold(size: int, chunks: Ints) -> Iterator[Step]:
    """Ranks p.. get the chunks of the result from ranks 0.."""
    p = floor_pow2(size)
    if p < size:
        yield _each(np.arange(size - p), np.arange(p, size), chunks, reduce=False)


def _each(src: Ints, dst: Ints, chunks: Ints, reduce: bool) -> Step:
    return Step(np.repeat(src, len(chunks)), np.repeat(dst, len(chunks)), np.tile(chunks, len(src)), reduce)


def _duties(peers: Sequence[Ints], blocks: Bools) -> list[Bools]:
    """duty[s][r, chunk]: whether rank r still answers for the chunk before step s."""
    duties = [blocks]
    for peer in reversed(peers):
        duties.append(duties[-1] | duties[-1][peer])
    return duties[::-1]


def _exchange(peer: Ints, duty: Bools, reduce: bool) -> Step:
    """Every rank sends its peer the chunks of the peer's duty (reducing) or of its own (gathering)."""
    src, chunk = np.nonzero(duty[peer] if reduce else duty)
    return Step(src, peer[src], chunk, reduce)


def reduce_scatter(peers: Sequence[Ints], blocks: Bools) -> Iterator[Step]:
    """Rank r ends with the chunks that blocks[r] marks, reduced over all ranks of the butterfly."""
    for peer, after in zip(peers, _duties(peers, blocks)[1:], strict=True):
        yield _exchange(peer, after, reduce=True)


def gather(peers: Sequence[Ints], blocks: Bools) -> Iterator[Step]:
    """Rank r begins with the chunks that blocks[r] marks, and every rank of the butterfly ends with all."""
    for peer, after in reversed(list(zip(peers, _duties(peers, blocks)[1:], strict=True))):
        yield _exchange(peer, after, reduce=False)
