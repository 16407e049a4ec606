"""What once was wrong in losses over a split vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.parallel.vocabulary import linear_cross_entropy, split_cross_entropy
from dist_prims.parallel.vocabulary.columns import Targets


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_hidden_may_lie_in_memory_by_columns(backend: str) -> None:
    """Its gradient is sent in parts of rows, which have gaps where it lies as hidden does."""

    def body() -> None:
        torch.manual_seed(0)
        hidden, weight, targets = torch.randn(4, 6), torch.randn(10, 4), torch.randint(10, (6,))
        whole, part = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        F.cross_entropy(whole.t() @ weight.t(), targets).backward()
        linear_cross_entropy(part.t(), weight.chunk(2)[dist.get_rank()], targets, chunk=4).backward()
        torch.testing.assert_close(part.grad, whole.grad)

    dist_prims.spawn(body, 2, timeout=60, backend=backend)


def test_without_gradients_nothing_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf needs a gradient even in no_grad, if one asks within a forward; and there ranks may differ in that."""

    def body() -> None:
        sums: list[Any] = []
        monkeypatch.setattr(dist, "all_reduce", lambda *given, **named: sums.append(given))
        hidden, weight = torch.ones(4, 3), torch.ones(5, 3, requires_grad=True)
        hidden.requires_grad_(dist.get_rank() == 0)
        with torch.no_grad():
            loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3]))
        assert not sums
        torch.testing.assert_close(loss, torch.tensor(10.0).log())

    dist_prims.spawn(body, 2, timeout=60)


def test_other_targets_have_another_checksum() -> None:
    found = [Targets.of(torch.tensor(each), -100).checksum for each in itertools.product(range(5), repeat=4)]
    assert len(set(found)) == len(found)

    def body() -> None:
        with pytest.raises(MismatchError, match=r"targets from 0 to 1,.* targets from 0 to 3,"):
            split_cross_entropy(torch.zeros(2, 4), torch.tensor([[0, 1], [3, 0]][dist.get_rank()]))
        far = torch.tensor([[0, 1], [0, 9]][dist.get_rank()])
        with pytest.raises(MismatchError, match="targets from 0 to 9"):  # on both: no rank waits for rows
            split_cross_entropy(torch.zeros(2, 4), far)

    dist_prims.spawn(body, 2, timeout=60)


def test_autocast_leaves_float64() -> None:
    hidden, weight = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    targets = torch.tensor([0, 1, 2])

    def body() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets)
        torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), targets))

    dist_prims.spawn(body, 1, timeout=60)


@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_an_argument_that_is_not_a_tensor_is_an_error_on_all_ranks(name: str) -> None:
    def body() -> None:
        given: dict[str, Any] = {"hidden": torch.ones(2, 3), "weight": torch.ones(4, 3)}
        given[name] = None if dist.get_rank() else given[name]
        with pytest.raises(ValueError if dist.get_rank() else MismatchError, match=f"{name} is NoneType"):
            linear_cross_entropy(targets=torch.tensor([0, 1]), **given)
        with pytest.raises(ValueError if dist.get_rank() else MismatchError, match="logits are NoneType"):
            split_cross_entropy(None if dist.get_rank() else torch.ones(2, 3), torch.tensor([0, 1]))

    dist_prims.spawn(body, 2, timeout=60)


def test_the_graph_of_a_loss_keeps_no_group() -> None:
    """A group that lives as long as a loss may end after Python, and abort the process."""

    def body() -> None:
        loss = split_cross_entropy(torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1]), reduction="none")
        node = loss.grad_fn
        while not hasattr(node, "share"):
            node = node.next_functions[0][0]
        held = [each for part in vars(node).values() for each in (part, *getattr(part, "__dict__", {}).values())]
        assert node.share in held
        assert not any(isinstance(each, dist.ProcessGroup) for each in held)

    dist_prims.spawn(body, 1, timeout=60)
