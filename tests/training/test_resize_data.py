"""Samplers and streams whose ranks change within an epoch: no item is lost and none is given twice."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import dist_prims
from dist_prims.training.data import ShardedIterable, ShardedSampler

# Changes of the ranks: the steps before it, whether each rank is lost in it (one remains at least), and the new ranks.
changes = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 2)), max_size=4
)


def survivors(ranks: list[Any], lost: list[bool]) -> list[Any]:
    return [rank for rank, is_lost in zip(ranks, lost, strict=False) if not is_lost] or ranks[-1:]


@settings(deadline=None, max_examples=100)
@given(count=st.integers(0, 200), size=st.integers(1, 5), changes=changes, uneven=st.sampled_from(["keep", "drop"]))
def test_a_sampler_over_changes_of_the_ranks(count: int, size: int, changes: list[Any], uneven: Any) -> None:
    def fresh(rank: int, size: int) -> ShardedSampler:
        return ShardedSampler(count, rank=rank, size=size, seed=3, uneven=uneven)

    ranks = [fresh(rank, size) for rank in range(size)]
    seen: list[int] = []
    for steps, lost, new in changes:
        for _ in range(steps):
            items = min(3, len(ranks[0]))
            for rank in ranks:
                seen += list(rank)[:items]
            for rank in ranks:
                rank.advance(items)
        left = survivors(ranks, lost)
        ranks = [*left, *(fresh(number, 99) for number in range(new))]
        for rank in ranks[len(left) :]:
            rank.load_state_dict(left[0].state_dict())
        for number, rank in enumerate(ranks):
            rank.resize(rank=number, size=len(ranks))
    seen += chain(*ranks)
    assert len(seen) == len(set(seen))
    assert count - len(seen) < (len(ranks) if uneven == "drop" else 1)


def group_of(rank: int, size: int) -> dist.ProcessGroup:
    return dist.ProcessGroup(dist.HashStore(), rank, size)


@pytest.mark.usefixtures("alone")
@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 30), max_size=6),
    size=st.integers(1, 4),
    changes=changes,
    window=st.sampled_from([1, 4]),
)
def test_a_stream_over_changes_of_the_ranks(lengths: list[int], size: int, changes: list[Any], window: int) -> None:
    """Samples may be repeated only where all ranks that are left had come to their end, and a lost one had not."""
    sources = [[(shard, item) for item in range(length)] for shard, length in enumerate(lengths)]

    def fresh(rank: int, size: int) -> ShardedIterable:
        return ShardedIterable(sources, group=group_of(rank, size), seed=3, window=window)

    ranks = [fresh(rank, size) for rank in range(size)]
    seen: list[Any] = []
    may_repeat = False
    for steps, lost, new in changes:
        batches = [rank.batches(2, list) for rank in ranks]
        taken: list[Any] = [[next(each, []) for _ in range(steps)] for each in batches]
        seen += chain(*chain(*taken))
        full = [sum(bool(batch) for batch in each) for each in taken]
        left = survivors(ranks, lost)
        may_repeat |= max(full) > max(full[rank.rank] for rank in left)
        states = [rank.state_dict() for rank in left]
        ranks = [*left, *(fresh(number, 99) for number in range(new))]
        for number, rank in enumerate(ranks):
            rank.resize(group_of(number, len(ranks)), states=states)
    seen += chain(*(batch for rank in ranks for batch in rank.batches(2, list)))
    assert {*seen} == {*chain(*sources)}
    assert may_repeat or len(seen) == len(set(seen))


@pytest.mark.usefixtures("alone")
def test_a_stream_with_workers_loses_no_sample() -> None:
    sources = [[(shard, item) for item in range(length)] for shard, length in enumerate([9, 14, 8, 11, 10, 12, 3])]
    ranks = [ShardedIterable(sources, group=group_of(rank, 2), workers=2, seed=1) for rank in range(2)]
    batches = [rank.batches(2, list) for rank in ranks]
    seen = [*chain(*(next(each) for each in batches for _ in range(5)))]
    ranks[1].resize(states=[ranks[1].state_dict()])
    with pytest.raises(RuntimeError, match=r"call batches\(\) again"):
        next(batches[1])
    seen += chain(*ranks[1].batches(4, list))
    assert sorted(seen) == sorted(chain(*sources))


def test_a_stream_gathers_the_states_of_the_ranks_that_are_left() -> None:
    def body() -> list[Any]:
        stream = ShardedIterable([range(0, 8), range(8, 16), range(16, 24)], seed=2)
        batches = stream.batches(2)
        seen = [item for _ in range(2) for item in next(batches).tolist()]
        if dist.get_rank() == 1:
            return seen  # as if it died: the others go on without it
        pair = dist_prims.shrink(timeout=0.5)
        stream.resize(pair)
        return [*seen, *chain(*stream.batches(3, list))]

    found = dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)
    assert sorted(chain(*found)) == list(range(24))


def test_an_iterator_from_before_a_resize_raises() -> None:
    data = TensorDataset(torch.arange(12))
    sampler = ShardedSampler(data, rank=0, size=2, seed=1)
    indices, loader = iter(sampler), DataLoader(data, 2, sampler=sampler)
    prefetching = DataLoader(data, 2, sampler=sampler, num_workers=1)
    batches, prefetched = sampler.follow(loader), sampler.follow(prefetching)
    for each in (indices, batches, prefetched):
        next(each)
    sampler.resize(rank=0, size=1)
    for each in (indices, batches, prefetched):
        with pytest.raises(RuntimeError, match=r"resize\(\) was called after this iterator was made"):
            next(each)
    assert sum(len(batch) for (batch,) in sampler.follow(loader)) == 12 - 2 * 4
