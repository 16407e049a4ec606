"""Streams over ranks and workers, resumed anywhere."""

from __future__ import annotations

import multiprocessing
from itertools import chain, islice
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_prims.training.data import ShardedIterable

pytestmark = pytest.mark.usefixtures("alone")


def shards_of(lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [[(shard, item) for item in range(length)] for shard, length in enumerate(lengths)]


def ranks_of(sources: list[Any], size: int, **options: Any) -> list[ShardedIterable]:
    groups = [dist.ProcessGroup(dist.HashStore(), rank, size) for rank in range(size)]
    return [ShardedIterable(sources, group=group, **options) for group in groups]


def samples_of(streams: list[ShardedIterable]) -> list[Any]:
    return [*chain.from_iterable(chain.from_iterable(stream.batches(3, list) for stream in streams))]


lengths = st.lists(st.integers(0, 12), max_size=9)
windows = st.sampled_from([1, 3, 100])


@settings(deadline=None)
@given(lengths=lengths, size=st.integers(1, 7), window=windows, epoch=st.integers(0, 3))
def test_each_sample_once(lengths: list[int], size: int, window: int, epoch: int) -> None:
    sources = shards_of(lengths)
    ranks = ranks_of(sources, size, window=window)
    for rank in ranks:
        rank.set_epoch(epoch)
    assert sorted(samples_of(ranks)) == sorted(chain(*sources))


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths,
    window=windows,
    changes=st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=5, max_size=5)), max_size=4),
    last=st.integers(1, 5),
)
def test_changes_of_size_within_an_epoch(lengths: list[int], window: int, changes: list[Any], last: int) -> None:
    """Some batches on each rank, in any number; then other ranks continue from the states of all of them."""
    sources = shards_of(lengths)
    seen: list[Any] = []
    state: Any = None
    for size, batches in [*changes, (last, [99] * 5)]:
        ranks = ranks_of(sources, size, window=window, seed=5)
        for rank, number in zip(ranks, batches, strict=False):
            rank.set_epoch(2)
            if state is not None:
                rank.load_state_dict(state)
            seen += chain(*islice(rank.batches(3, list), number))
        state = [rank.state_dict() for rank in ranks]
    assert sorted(seen) == sorted(chain(*sources))


def test_a_resumed_stream_yields_what_an_undisturbed_one_yields() -> None:
    sources = shards_of([30, 20, 10])
    whole = samples_of([ShardedIterable(sources, window=8)])
    stream = ShardedIterable(sources, window=8)
    before = [*chain(*islice(stream.batches(7, list), 4))]
    later = ShardedIterable(sources, window=8)
    later.load_state_dict(stream.state_dict())
    assert before + samples_of([later]) == whole
    assert before + samples_of([stream]) == whole  # also in the process that stopped


def test_the_order_is_mixed_and_new_in_each_epoch() -> None:
    stream = ShardedIterable(shards_of([50, 50, 50]), window=40)
    first = samples_of([stream])
    stream.set_epoch(1)
    assert first != samples_of([stream])
    assert len({shard for shard, _ in first[:60]}) > 1
    assert first[:40] != sorted(first[:40])


def test_workers_that_prefetch_and_a_change_of_their_number() -> None:
    sources = shards_of([40, 3, 17, 0, 9])
    ranks = ranks_of(sources, 2, workers=2, window=5)
    seen = [*chain(*(islice(rank.batches(4, list), 3) for rank in ranks))]
    assert 0 < len([*chain(*seen)]) < 69
    alone = ShardedIterable(sources, workers=1, window=5)
    alone.load_state_dict([rank.state_dict() for rank in ranks])
    seen += alone.batches(4, list)
    assert sorted(chain(*seen)) == sorted(chain(*sources))
    assert not multiprocessing.active_children()


def test_workers_have_the_epoch_and_the_state_of_their_batches() -> None:
    """Workers that live on once had the order of the first epoch, and skipped again what had been skipped in it."""
    sources = shards_of([8, 8])
    stream = ShardedIterable(sources, workers=1)
    next(stream.batches(4, list))
    stream.load_state_dict(stream.state_dict())
    assert len(samples_of([stream])) == 12
    orders = []
    for epoch in (1, 2, 3):
        stream.set_epoch(epoch)
        orders.append(samples_of([stream]))
        assert sorted(orders[-1]) == [*chain(*sources)]
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_batches_of_another_position_raise() -> None:
    """Their samples would count in the new position."""
    stream = ShardedIterable(shards_of([8, 8]))
    for change in (lambda: stream.set_epoch(1), lambda: stream.load_state_dict(stream.state_dict())):
        batches = stream.batches(2, list)
        next(batches)
        change()
        with pytest.raises(RuntimeError, match=r"call batches\(\) again"):
            next(batches)


def test_states_that_do_not_fit_are_refused() -> None:
    stream = ShardedIterable([range(3)])
    one, two = (rank.state_dict() for rank in ranks_of([range(3)], 2))
    with pytest.raises(ValueError, match=r"of ranks \[0\]; give a list of the states of all ranks"):
        stream.load_state_dict(one)
    with pytest.raises(ValueError, match=r"seed of the states is \[0, 1\]; expected: 0 each"):
        stream.load_state_dict([one, {**two, "seed": 1}])
    with pytest.raises(ValueError, match=r"epoch of the states is \[0, 1\]; expected: 0 each"):
        stream.load_state_dict([one, {**two, "epoch": 1}])
    with pytest.raises(ValueError, match=r"workers of the states is \[1, 2\]; expected: 1 each"):
        stream.load_state_dict([one, {**two, "workers": 2}])
