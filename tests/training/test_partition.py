"""Parts by label and by weight, and batches over the ranks whose mean gradient is the whole batch's."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dist_prims
from dist_prims import DataPartitioner
from dist_prims.errors import MismatchError
from dist_prims.training.data import Batches, partition_dataset
from dist_prims.training.data.partition import deal

fractions: st.SearchStrategy[Any] = st.lists(st.integers(0, 20), min_size=1, max_size=7).filter(any)
fractions = fractions.map(lambda raw: [each / sum(raw) for each in raw])

GOLDEN_LABELS = [[7, 2, 0, 3], [1, 6, 4, 5]]
GOLDEN_WEIGHTS = [[7, 4, 3], [2, 1, 6, 0, 5]]


def parts_of(parts: DataPartitioner) -> list[list[int]]:
    return [parts.use(part).indices.tolist() for part in range(len(parts))]


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=7), data=st.data())
def test_turns_are_spread_evenly(counts: list[int], data: st.DataObject) -> None:
    owners = deal(counts)
    assert np.bincount(owners, minlength=len(counts)).tolist() == counts
    low = data.draw(st.integers(0, len(owners)))
    high = data.draw(st.integers(low, len(owners)))
    for part, count in enumerate(counts):
        share = count / max(len(owners), 1)
        assert abs((owners[low:high] == part).sum() - (high - low) * share) <= 1 + len(counts) * share + 1e-9


@settings(deadline=None)
@given(labels=st.lists(st.sampled_from("abcdef"), max_size=200), sizes=fractions, seed=st.integers(0, 2**32 - 1))
@example(labels=[], sizes=[1.0], seed=0)
@example(labels=["a"], sizes=[0.5, 0.5], seed=0)
def test_each_part_has_its_share_of_each_label(labels: list[str], sizes: list[float], seed: int) -> None:
    count = len(labels)
    parts = parts_of(DataPartitioner(range(count), sizes, seed, stratify=labels))
    assert sorted(chain(*parts)) == list(range(count))
    assert [len(part) for part in parts] == [len(part) for part in parts_of(DataPartitioner(range(count), sizes, seed))]
    for part in parts:
        share = len(part) / max(count, 1)
        for label in set(labels):
            held = sum(labels[item] == label for item in part)
            assert abs(held - labels.count(label) * share) <= 1 + len(sizes) * share + 1e-9


@settings(deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e6)), max_size=200),
    sizes=fractions,
    seed=st.integers(0, 2**32 - 1),
)
def test_each_part_has_its_share_of_the_weight(weights: list[float], sizes: list[float], seed: int) -> None:
    parts = parts_of(DataPartitioner(range(len(weights)), sizes, seed, weights=weights))
    assert sorted(chain(*parts)) == list(range(len(weights)))
    total, heaviest, free = sum(weights), max(weights, default=0), weights.count(0)
    for part, size in zip(parts, sizes, strict=True):
        held = sum(weights[item] for item in part)
        assert abs(held - size * total) <= heaviest * (1 - 1 / len(sizes)) + 1e-9 * total
        assert abs(sum(weights[item] == 0 for item in part) - size * free) <= 1 + len(sizes) * size


def test_labels_and_weights_of_every_kind() -> None:
    for labels in ([1, 0, 1, 0], np.array(["x", "y", "x", "y"]), torch.tensor([1, 0, 1, 0])):
        assert [len({item % 2 for item in p}) for p in parts_of(DataPartitioner("abcd", [2, 2], stratify=labels))] == [
            2,
            2,
        ]
    assert [len(p) for p in parts_of(DataPartitioner("abcd", [1, 3], weights=[3, 3, 3, 3]))] == [1, 3]
    shuffled = parts_of(DataPartitioner(range(100), [0.5, 0.5], stratify=[0] * 50 + [1] * 50))[0]
    assert shuffled != sorted(shuffled)
    assert len({item < 50 for item in shuffled[:10]}) == 2  # a part is not in the order of the labels


def test_parts_by_label_and_weight_are_always_the_same() -> None:
    assert parts_of(DataPartitioner(range(8), [0.5, 0.5], seed=1, stratify=[0, 1] * 4)) == GOLDEN_LABELS
    assert parts_of(DataPartitioner(range(8), [0.5, 0.5], seed=1, weights=range(8))) == GOLDEN_WEIGHTS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stratify": [0] * 9}, r"stratify has shape \(9,\); it takes one for each of 10"),
        ({"weights": [[1]] * 10}, r"weights has shape \(10, 1\)"),
        ({"weights": [-1] + [1] * 9}, "finite numbers from 0"),
        ({"weights": [float("nan")] * 10}, "finite numbers from 0"),
        ({"weights": [1] * 10, "stratify": [1] * 10}, "both given; choose one"),
    ],
)
def test_labels_and_weights_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataPartitioner(range(10), [0.5, 0.5], **options)


@settings(deadline=None)
@given(count=st.integers(0, 120), batch=st.integers(1, 50), sizes=fractions, epochs=st.integers(1, 2))
def test_batches_of_all_ranks_are_the_batches_of_one(count: int, batch: int, sizes: list[float], epochs: int) -> None:
    parts = DataPartitioner(torch.arange(count), sizes)
    ranks = [Batches(parts, batch, rank) for rank in range(len(sizes))]
    totals = [batch] * (count // batch) + [count % batch] * (count % batch > 0)
    assert [len(rank) for rank in ranks] == [len(totals)] * len(sizes)
    for _ in range(epochs):
        seen: list[int] = []
        for total, *step in zip(totals, *ranks, strict=True):
            owned = [items if weight else items[:0] for items, weight in step]
            assert sum(map(len, owned)) == total
            assert all(len(items) >= 1 for items, _ in step)  # no rank runs without an item
            for items, (_, weight) in zip(owned, step, strict=True):
                assert weight == pytest.approx(len(items) * len(sizes) / total)
                seen += items.tolist()
        assert sorted(seen) == list(range(count))


def test_each_epoch_has_its_order_and_can_be_gone_back_to() -> None:
    batches = Batches(DataPartitioner(range(40), [0.5, 0.5]), 10, 0)
    first, second = [batch.tolist() for batch, _ in batches], [batch.tolist() for batch, _ in batches]
    assert (first != second, sorted(chain(*first))) == (True, sorted(chain(*second)))
    batches.epoch = 1
    assert [batch.tolist() for batch, _ in batches] == second
    still = Batches(DataPartitioner(range(40), [0.5, 0.5]), 10, 0, shuffle=False)
    assert [batch.tolist() for batch, _ in still] == [batch.tolist() for batch, _ in still]


class Points(torch.utils.data.Dataset[Any]):
    """Items that a linear net with a bias can be trained on."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(count, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(torch.tanh(model(x)), y)


@pytest.mark.parametrize(
    ("size", "count", "batch", "sizes"),
    [
        (1, 7, 3, None),
        (2, 11, 4, [0.9, 0.1]),
        (3, 20, 7, None),
        (3, 2, 5, None),  # a rank with no items at all
        (4, 13, 3, [10, 0, 2, 1]),  # fewer items a batch than ranks
    ],
)
def test_mean_gradients_are_those_of_one_process(size: int, count: int, batch: int, sizes: list[float] | None) -> None:
    def body() -> None:
        data, rank = Points(count), dist.get_rank()
        batches = partition_dataset(data, batch, sizes=sizes)
        model = torch.nn.Linear(3, 1).double()
        dist_prims.broadcast(model.weight.data)
        dist_prims.broadcast(model.bias.data)
        steps = 0
        for x, y, index, weight in batches:
            model.zero_grad()
            (loss_of(model, x, y) * weight).backward()
            dist_prims.average_gradients(model)
            by_rank: list[Any] = [None] * size
            dist.all_gather_object(by_rank, index.tolist() if weight else [])
            whole = [*chain(*by_rank)]
            assert len(whole) == min(batch, count - steps * batch), rank
            wanted = torch.autograd.grad(loss_of(model, data.x[whole], data.y[whole]), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)
            steps += 1
        assert steps == len(batches) == -(-count // batch)

    dist_prims.spawn(body, size, timeout=60)


def test_ranks_that_differ_all_get_an_error() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(MismatchError, match=r"Rank 0 has batch=4; rank 1 has batch=5"):
            partition_dataset(range(10), 4 + rank)
        with pytest.raises(MismatchError, match=r"Rank 0 has len\(data\)=10; rank 1 has len\(data\)=11"):
            partition_dataset(range(10 + rank), 4)
        with pytest.raises(MismatchError, match="Rank 0 has one of shuffle, sizes and stratify"):
            partition_dataset(range(10), 4, stratify=[0] * 9 + [rank])
        with pytest.raises(ValueError, match=r"rank [01]: batch=0 must be at least 1"):
            partition_dataset(range(10), 0)
        with pytest.raises(ValueError, match="has 3 shares for 2 ranks"):
            partition_dataset(range(10), 4, sizes=[0.4, 0.3, 0.3])
        dist_prims.barrier()  # no rank still waits

    dist_prims.spawn(body, 2, timeout=60)


def test_a_sub_group_and_fields_of_every_kind() -> None:
    def body() -> None:
        group = dist.new_group([0, 2])
        if dist.get_rank() in (0, 2):
            batches = partition_dataset(["a", "b", "c", "d"], 4, group=group)
            ((texts, weight),) = list(batches)
            assert (len(texts), weight) == (2, 1.0)
            ((fields, _),) = list(partition_dataset([{"x": 1}] * 2, 4, group=group))
            assert fields["x"].tolist() == [1]
        else:
            with pytest.raises(ValueError, match="rank 1 is not a member"):
                partition_dataset(range(4), 4, group=group)

    dist_prims.spawn(body, 3, timeout=60)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_batches_in_a_group_of_nccl() -> None:
    def body() -> None:
        assert len(partition_dataset(range(10), 4)) == 3

    dist_prims.spawn(body, 1, backend="nccl", timeout=60, start_method="spawn")
