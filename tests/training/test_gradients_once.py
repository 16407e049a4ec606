"""GradientAverager.once(), and buckets that stay ahead though steps take other branches."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from averaging import BACKENDS, batch, net, spawn
from torch import nn

from dist_prims.training.gradients import GradientAverager


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_backwards_are_averaged_once(backend: str) -> None:
    def body() -> None:
        model, other = net(), net()
        averager, twin = GradientAverager(model), GradientAverager(other)
        for step in range(3):
            with averager.once(), averager.once():  # the inner one does nothing
                for part in range(3):
                    model(batch(3 * step + part)).square().mean().backward()
            with twin.no_sync():
                for part in range(2):
                    other(batch(3 * step + part)).square().mean().backward()
            other(batch(3 * step + 2)).square().mean().backward()
            for own, wanted in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(own.grad, wanted.grad)

    spawn(body, 2, backend)


def test_what_is_complete_is_sent_and_gets_no_more() -> None:
    def body() -> None:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        averager = GradientAverager(model, bucket_mb=1e-5)
        sending = averager._averaging.sender
        x, stranger = torch.ones(1, 2), nn.Parameter(torch.ones(1))
        with averager.once() as complete:
            (model[1](x).sum() * (1 + dist.get_rank())).backward()
            assert sending.sent == 0
            complete([stranger, *model[1].parameters()])
            assert sending.sent == 1
            (model[0](x).sum() * (1 + dist.get_rank())).backward()
            assert sending.sent == 1
        for weight in model.parameters():
            assert torch.equal(weight.grad, torch.full((2, 2), 1.5))
        words = r"parameter '1\.weight' has got a gradient after complete\(\) was called"
        with averager.once() as complete:
            for layer in model:
                layer(x).sum().backward()
            complete(model[1].parameters())
            with pytest.raises(RuntimeError, match=words):
                model[1](x).sum().backward()

    spawn(body, 2)


def test_an_error_before_anything_is_complete_does_no_harm() -> None:
    def body() -> None:
        model = nn.Linear(2, 1, bias=False)
        averager = GradientAverager(model)
        with suppress(ArithmeticError), averager.once():
            (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
            raise ArithmeticError
        assert model.weight.grad.tolist() == [[1.0 + dist.get_rank()] * 2]
        model.zero_grad()
        (model(torch.ones(1, 2)).sum() * (1 + dist.get_rank())).backward()
        assert model.weight.grad.tolist() == [[1.5, 1.5]]

    spawn(body, 2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.body(x))


@pytest.mark.parametrize("late", [False, True])
def test_what_some_steps_do_not_use_holds_up_nothing(late: bool) -> None:
    """The first bucket held an expert, and all others waited behind it until the end of each step without it. ``late``:
    ranks read what the others said in their next step, as with a GPU."""

    def body() -> list[list[int]]:
        torch.manual_seed(0)
        model = Experts()
        averager = GradientAverager(model, bucket_mb=6e-5)  # a layer each
        averager._averaging.reads_late = late
        sending = averager._averaging.sender
        ahead = []
        model.get_parameter("body.0.weight").register_hook(lambda _: ahead.append(sending.sent))
        for step in range(5):
            model.zero_grad()
            model(torch.ones(1, 4), (step + dist.get_rank()) % 4).sum().backward()
        assert ahead[-1] == 2  # all of the body but the layer that the hook sees
        assert sending.layout.members[:3] == [[2], [1], [0]]
        return sending.layout.members

    first, second = spawn(body, 2)
    assert first == second
