"""torchdata's StatefulDataLoader over our samplers: every item once, also through a resume.

Once the state that it saved did not say how far the loader had drawn, and a resumed epoch began again: 70 items were
given for 50.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.utils.data import Dataset

from dist_prims.training import ShardedSampler

stateful = pytest.importorskip("torchdata.stateful_dataloader")

COUNT, SIZE, BATCH = 50, 2, 4


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


def over_a_sampler(rank: int, workers: int, **options: Any) -> tuple[Any, Any]:
    sampler = ShardedSampler(COUNT, rank=rank, size=SIZE, seed=3)
    return stateful.StatefulDataLoader(Numbers(), BATCH, sampler=sampler, num_workers=workers, **options), sampler


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 2])
def test_every_item_once_through_a_resume(workers: int) -> None:
    # A loader that was read to its end begins again at its start, by its own rule.
    for stop, epoch in [(3, 1)] if workers else [(0, 0), (0, 1), (1, 1), (3, 0)]:
        seen: list[int] = []
        for rank in range(SIZE):
            loader, data = over_a_sampler(rank, workers)
            data.set_epoch(epoch)
            batches = iter(loader)
            before = [batch.tolist() for batch in itertools.islice(batches, stop)]
            state = loader.state_dict()
            del batches

            resumed, data = over_a_sampler(rank, workers)
            data.set_epoch(epoch)
            resumed.load_state_dict(state)
            after = [batch.tolist() for batch in resumed]
            undisturbed, data = over_a_sampler(rank, workers)
            data.set_epoch(epoch)
            assert before + after == [batch.tolist() for batch in undisturbed], (stop, epoch, rank)
            seen += [item for batch in before + after for item in batch]
        assert sorted(seen) == list(range(COUNT)), (stop, epoch)


def test_the_epoch_after_a_resumed_one_is_whole() -> None:
    seen: list[int] = []
    for rank in range(SIZE):
        loader, data = over_a_sampler(rank, 0)
        next(iter(loader))
        resumed, data = over_a_sampler(rank, 0)
        resumed.load_state_dict(loader.state_dict())
        assert len(list(resumed)) < len(list(over_a_sampler(rank, 0)[0]))
        data.set_epoch(1)
        seen += [item for batch in resumed for item in batch.tolist()]
    assert sorted(seen) == list(range(COUNT))
