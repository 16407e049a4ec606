"""Gradient averaging and data partitioning, and the digits that they are shown on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dist_prims
from dist_prims import DataPartitioner
from dist_prims.datasets import digits
from dist_prims.launch import RankFailedError


class Branches(torch.nn.Module):
    """A net of several dtypes, with a branch for each rank, a frozen part and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(3, 3)
        self.fine = torch.nn.Linear(3, 3).double()
        self.branch = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.frozen(self.shared(x)) + self.fine(x.double()).float()
        return self.branch[branch](x).square().mean()


def gradients(rank: int) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(0)
    model = Branches()
    model(torch.arange(6.0).view(2, 3) + rank, rank % 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("size", "bucket_mb"), [(1, 25), (2, 1e-5), (3, 25), (4, 1e-5)])
def test_gradients_become_their_mean(size: int, bucket_mb: float) -> None:
    def body() -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = Branches()
        model(torch.arange(6.0).view(2, 3) + rank, rank % 2).backward()
        dist_prims.average_gradients(model, bucket_mb=bucket_mb)
        by_rank = [gradients(each) for each in range(size)]
        for name, parameter in model.named_parameters():
            there = [each[name] for each in by_rank if each[name] is not None]
            if not there:
                assert parameter.grad is None, name
            else:  # where a rank has none, it counts as zero
                torch.testing.assert_close(parameter.grad, torch.stack(there).sum(0) / size, msg=name)

    dist_prims.spawn(body, size, timeout=60)


def test_gradients_of_every_layout() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        scalar, empty = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.ones(0))
        model = torch.nn.ParameterList([weight, scalar, empty])
        rank = dist.get_rank()
        weight.grad = torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last) * (rank + 1)
        scalar.grad, empty.grad = torch.tensor(float(rank)), torch.ones(0)
        kept = weight.grad
        dist_prims.average_gradients(model, algorithm="ring")
        assert torch.equal(weight.grad, torch.arange(96.0).view(2, 3, 4, 4) * 1.5)
        assert weight.grad is kept  # optimisers and views of it see the mean
        assert scalar.grad.item() == 0.5

    dist_prims.spawn(body, 2, timeout=60)


def test_sparse_gradients_are_refused_on_every_rank() -> None:
    def body() -> None:
        embedding = torch.nn.Embedding(10, 2, sparse=dist.get_rank() == 1)
        model = torch.nn.Sequential(embedding, torch.nn.Linear(2, 1))
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match=r"parameter '0\.weight' has a sparse gradient"):
            dist_prims.average_gradients(model)
        dist_prims.barrier()  # no rank still waits

    dist_prims.spawn(body, 2, timeout=60)


def test_a_model_without_gradients() -> None:
    dist_prims.spawn(lambda: dist_prims.average_gradients(torch.nn.ReLU()), 2, timeout=60)
    with pytest.raises(RankFailedError, match="bucket_mb=0 must be positive"):
        dist_prims.spawn(lambda: dist_prims.average_gradients(torch.nn.ReLU(), bucket_mb=0), 1, timeout=60)


fractions = st.lists(st.floats(0.001, 1), min_size=1, max_size=9).map(lambda raw: [each / sum(raw) for each in raw])


@settings(deadline=None)
@given(count=st.integers(0, 500), sizes=fractions, seed=st.integers(0, 2**32 - 1))
def test_every_item_is_in_one_part(count: int, sizes: list[float], seed: int) -> None:
    parts = DataPartitioner(range(count), sizes, seed)
    items = [item for part in range(len(sizes)) for item in parts.use(part)]
    assert sorted(items) == list(range(count))
    for part, size in enumerate(sizes):
        assert abs(len(parts.use(part)) - size * count) <= 1


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=9))
@example(counts=[0, 0])  # parts of nothing: a division by zero, once
def test_sizes_as_counts(counts: list[int]) -> None:
    parts = DataPartitioner(range(sum(counts)), counts)
    assert [len(parts.use(part)) for part in range(len(counts))] == counts


def test_parts_are_the_same_everywhere_and_always() -> None:
    assert DataPartitioner(range(8), [0.5, 0.5], seed=1).use(0).indices.tolist() == [7, 2, 1, 6]
    assert DataPartitioner(range(8), [0.5, 0.5], seed=2).use(0).indices.tolist() != [7, 2, 1, 6]


def test_items_are_fetched_when_asked_for() -> None:
    class Costly:
        fetched: list[int] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> int:
            self.fetched.append(index)
            return index

    part = DataPartitioner(Costly(), [0.5, 0.5]).use(1)
    assert (len(part), Costly.fetched) == (500_000, [])
    assert [part[3]] == Costly.fetched
    with pytest.raises(IndexError):
        part[500_000]
    loaded = next(iter(torch.utils.data.DataLoader(part, batch_size=4)))  # type: ignore[arg-type]
    assert len(loaded) == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([0.5, 0.4], "add up to 0.9; fractions: they must make 1"),
        ([5, 4], "add up to 9; whole numbers are counts: they must make 10"),
        ([], "one or more numbers"),
        ([1.5, -0.5], "one or more numbers from 0"),
    ],
)
def test_sizes_that_lose_items_are_refused(sizes: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataPartitioner(range(10), sizes)


def test_a_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no part 2; there are 2"):
        DataPartitioner(range(10), [0.5, 0.5]).use(2)


def test_digits_are_all_there_with_their_licence() -> None:
    images, labels = digits().tensors
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert round(float(images.double().sum()) * 16) == 561718
    text = (Path(dist_prims.__file__).parent / "datasets/digits.txt").read_text()
    assert "Creative Commons Attribution 4.0" in text
