"""Backward in two parts, inputs first and weights later, gives what backward at once gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dist_prims.training.pipeline.split_backward import Later, split_backward

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(3, 5), (4, 3)),
    (lambda: nn.Linear(3, 5, bias=False), (2, 4, 3)),
    (lambda: nn.Linear(3, 5), (3,)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 2, padding="same"), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding="valid", padding_mode="reflect"), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=False), (4, 7, 8)),
    (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 3, 4, 3)),
    (lambda: nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.LayerNorm(3), nn.Linear(3, 2)), (0, 3)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), (4, 3)),
    (lambda: nn.MultiheadAttention(4, 2, batch_first=True), (2, 3, 4)),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), (4, 3, 4)),
    (lambda: nn.Linear(3, 5, bias=False), (3,)),
    (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, stride=2, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, groups=2, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(4, 6, 1, padding=1, bias=False), (2, 4, 7, 8)),
    (lambda: nn.Conv1d(4, 6, 1, bias=False).double(), (2, 4, 7)),
    (lambda: nn.Linear(3, 5, dtype=torch.complex64), (4, 3)),
]


@pytest.mark.parametrize("case", range(len(LAYERS)))
@pytest.mark.parametrize("of_input", [True, False])
def test_a_split_backward_gives_the_whole_one(case: int, of_input: bool) -> None:
    make, shape = LAYERS[case]
    torch.manual_seed(0)
    one = make()
    other = make()
    other.load_state_dict(one.state_dict())
    x = torch.randn(shape, requires_grad=of_input, dtype=next(one.parameters()).dtype)
    y = x.detach().clone().requires_grad_(of_input)
    later = Later()
    for _ in range(2):  # gradients add up
        first = one(x, x, x)[0] if isinstance(one, nn.MultiheadAttention) else one(x)
        with split_backward(later):
            second = other(y, y, y)[0] if isinstance(other, nn.MultiheadAttention) else other(y)
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        first.abs().square().sum().backward()
        second.abs().square().sum().backward()
        later.drain()
        for mine, its in zip(other.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
        if of_input:
            torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.parametrize("watched", ["hook", "after", "by no hook"])
def test_every_hook_of_a_weight_sees_each_gradient(watched: str) -> None:
    """A product of matrices is added to ``.grad`` as it is computed, but not where a hook would miss it."""
    layer = nn.Conv2d(2, 3, 1, bias=False)
    seen: list[torch.Tensor] = []
    if watched == "hook":
        layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    elif watched == "after":
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    node = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(layer.weight.grad))
    for _ in range(3):
        later = Later()
        with split_backward(later):
            found = layer(torch.ones(1, 2, 3, 3))
        found.sum().backward()
        later.drain()
    assert layer.weight.grad.flatten().tolist() == [27.0] * 6
    assert len(seen) == {"hook": 6, "after": 6, "by no hook": 1}[watched]  # the first is always autograd's


def test_a_split_backward_leaves_the_weights_for_later() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[3].weight = model[1].weight  # tied
    model[1].bias.requires_grad_(False)  # autograd's then
    whole = [each.detach().clone() for each in _whole_gradients(model)]
    seen: list[str] = []
    embedding = model.get_parameter("0.weight")
    embedding.register_hook(lambda grad: seen.append("hook"))
    embedding.register_post_accumulate_grad_hook(lambda weight: seen.append("after"))
    later = Later()
    with split_backward(later):
        loss = model(torch.tensor([[1, 2], [2, 4]])).square().sum()
    loss.backward()
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    assert seen == []
    later.drain()
    assert seen == ["hook", "after"]
    found = [each.grad for each in model.parameters() if each.grad is not None]
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_that_layers_share_shows_its_whole_gradient_once(bias: bool) -> None:
    """Each use was shown by itself, which DistributedDataParallel takes for a second backward."""
    one, other = nn.Linear(3, 3, bias=bias), nn.Linear(3, 3, bias=bias)
    other.weight, other.bias = one.weight, one.bias
    shared = list(one.parameters())
    seen: list[torch.Tensor] = []
    for parameter in shared:
        parameter.register_hook(lambda grad: seen.append(grad.clone()))
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    x = torch.randn(4, 3)
    other(one(x).relu()).square().sum().backward()
    whole = [seen.pop(0) for _ in range(len(seen))]
    for parameter in shared:
        parameter.grad = None
    later = Later()
    with split_backward(later):
        loss = other(one(x).relu()).square().sum()
    loss.backward()
    assert seen == []
    later.drain()
    assert len(seen) == len(whole) == 2 * len(shared)
    torch.testing.assert_close(sorted(seen, key=torch.Tensor.dim), sorted(whole, key=torch.Tensor.dim))


def _whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.tensor([[1, 2], [2, 4]])).square().sum().backward()
    found = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return found


def test_a_split_backward_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    x = torch.randint(5, (4, 2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
    plain.float().square().sum().backward()
    wanted = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    later = Later()
    with torch.autocast("cpu", torch.bfloat16), split_backward(later):
        split = model(x)
    assert split.dtype == torch.bfloat16
    assert torch.equal(split, plain)
    split.float().square().sum().backward()
    later.drain()
    for each, its in zip(model.parameters(), wanted, strict=True):
        assert each.grad is not None
        assert each.grad.dtype == torch.float32
        torch.testing.assert_close(each.grad, its, rtol=0.02, atol=0.02)


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))
        self.outer = nn.Linear(3, 3)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + checkpoint(self.inner, x, **self.options))


class Transformed(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.vmap(self.inner)(x))


class Differentiated(Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.outer(x).square().sum(), x, create_graph=self.options["twice"])[0]


SAVED_SELECTIVELY = partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Checkpointed(use_reentrant=False),
        lambda: Checkpointed(use_reentrant=True),
        lambda: Checkpointed(use_reentrant=False, context_fn=SAVED_SELECTIVELY),
        Transformed,
    ],
)
def test_what_cannot_be_split_is_left_to_autograd(make: Callable[[], Any]) -> None:
    """A checkpointed layer was computed again without the split, and saved other tensors than at first."""
    torch.manual_seed(0)
    model, x, later = make(), torch.randn(4, 3, requires_grad=True), Later()
    model(x).square().sum().backward()
    wanted = [x.grad, *(each.grad for each in model.parameters())]
    for each in (x, *model.parameters()):
        each.grad = None
    with split_backward(later):
        loss = model(x).square().sum()
    loss.backward()
    assert model.outer.weight.grad is None  # what is outside is still put off
    assert model.inner[0].weight.grad is not None
    later.drain()
    torch.testing.assert_close([x.grad, *(each.grad for each in model.parameters())], wanted)


@pytest.mark.parametrize("twice", [False, True])
def test_a_forward_that_differentiates_is_refused(twice: bool) -> None:
    """It added gradients that the caller had not asked for, and lost the gradients of second derivatives."""
    model = Differentiated(twice=twice)
    with split_backward(Later()), pytest.raises(RuntimeError, match="choose a plan that does not split it, such as"):
        model(torch.randn(4, 3))


def test_a_second_derivative_is_refused() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    with split_backward(Later()):
        y = layer(x).square().sum()
    with pytest.raises(RuntimeError, match="for a second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
