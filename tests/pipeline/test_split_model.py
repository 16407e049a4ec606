"""Models cut into stages: where, by which costs, with values that skip layers."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.models.resnet import resnet18
from dist_prims.training.pipeline.chain import Chain, Pop, Stage, Stash, layers
from dist_prims.training.pipeline.profile import LayerCost, profile, stage_costs
from dist_prims.training.pipeline.split_model import balance, split

# Where to cut


def worst(costs: list[int], sizes: list[int]) -> int:
    ends = list(itertools.accumulate(sizes))
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))


@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
@example(costs=[0, 0, 0], data=None)
@example(costs=[5], data=None)
def test_no_cut_is_better(costs: list[int], data: Any) -> None:
    stages = data.draw(st.integers(1, len(costs))) if data else 1
    sizes = balance(costs, stages)
    assert len(sizes) == stages
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = ([b - a for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts)
    assert worst(costs, sizes) == min(worst(costs, other) for other in every)


@pytest.mark.parametrize(
    ("costs", "stages", "words"),
    [
        ([1, 2], 3, "stages=3 of 2 layers"),
        ([1, 2], 0, "stages=0 of 2 layers"),
        ([], 1, "stages=1 of 0 layers"),
        ([1, -1], 1, "must be finite numbers from 0"),
        ([1, float("nan")], 2, "must be finite numbers from 0"),
    ],
)
def test_what_cannot_be_cut(costs: list[float], stages: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance(costs, stages)


# Stages do what the model does


class Twice(nn.Module):
    """Joins two values, and has something to learn about it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return x + self.weight * kept


class UNet(nn.Module):
    """Its layers say what skips; its forward says the same in Python, as the oracle."""

    def __init__(self) -> None:
        super().__init__()
        up = nn.Upsample(scale_factor=2)
        self.net = Chain(
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
            Stash("fine"),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            Stash("coarse"),
            nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Tanh()),
            nn.Sequential(up, Pop("coarse", Twice())),
            nn.Conv2d(8, 4, 3, padding=1),
            up,
            Pop("fine", lambda x, fine: torch.cat([x, fine], 1)),
            nn.Conv2d(8, 1, 1),
            Pop("coarse", lambda x, coarse: x + coarse.mean(1, keepdim=True).sum()),
        )

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("net", self.net)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Any = self.net
        fine = part[0](x)
        coarse = part[4](part[3](part[2](fine)))
        x = part[7][1].combine(part[7][0](part[6](coarse)), coarse)
        x = torch.cat([part[9](part[8](x)), fine], 1)
        return part[11](x) + coarse.mean(1, keepdim=True).sum()


def through(stages: list[Stage], x: Any, gradient_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """As a pipeline runs them: what passes from stage to stage is cut from autograd, and gradients are handed back."""
    graph = []
    values: tuple[Any, ...] = x if isinstance(x, tuple) else (x,)
    for stage in stages:
        inputs = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        outputs = stage(*inputs)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        graph.append((inputs, values))
    gradients: list[torch.Tensor | None] = [gradient_of(values[0])]
    for inputs, outputs in reversed(graph):
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        gradients = [value.grad for value in inputs]
    return values[0]


def assert_same(model: nn.Module, stages: int, x: Any, **how: Any) -> list[Stage]:
    twin = copy.deepcopy(model)
    expected = model(x)
    expected.square().sum().backward()
    parts = split(twin, stages, **how)
    output = through(parts, x, lambda out: 2 * out.detach())
    assert torch.equal(output, expected)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6, msg=name)
    for (name, buffer), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert [key for part in parts for key in part.state_dict()] == list(model.state_dict())
    ours = {id(parameter) for part in parts for parameter in part.parameters()}
    assert ours == {id(parameter) for parameter in twin.parameters()}  # shared, not copied
    return parts


UNET_LAYERS = 16


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [1, 2, 3, UNET_LAYERS])
def test_values_that_skip_layers_cross_every_cut(stages: int) -> None:
    torch.manual_seed(0)
    model, x = UNet(), torch.randn(2, 1, 8, 8)
    cuts = list(itertools.combinations(range(1, UNET_LAYERS), stages - 1))
    for cut in cuts[:: max(1, len(cuts) // 20)]:
        sizes = [b - a for a, b in itertools.pairwise([0, *cut, UNET_LAYERS])]
        model.zero_grad()
        assert_same(model, stages, x, by=sizes)


def test_stages_carry_what_later_ones_need_and_no_more() -> None:
    model = UNet()
    stages = split(model, UNET_LAYERS, by=[1] * UNET_LAYERS)
    both = ("fine", "coarse")
    expected = [()] * 3 + [("fine",)] * 4 + [both] * 7 + [("coarse",)] * 2  # what each takes
    assert [stage.names[0] for stage in stages if stage.takes == ("coarse",)] == ["net.11", "net.12"]
    assert [stage.takes for stage in stages] == expected
    assert [stage.gives for stage in stages] == [*expected[1:], ()]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_deep_resnet_is_cut_anywhere() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=5, in_channels=1, small_images=True)
    count = len(layers(model))
    for cut in [*itertools.combinations(range(1, count), 2)][::17]:
        model.zero_grad()
        sizes = [b - a for a, b in itertools.pairwise([0, *cut, count])]
        assert_same(model, 3, torch.randn(2, 1, 16, 16), by=sizes)


class Pair(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x, x.flip(0)) if isinstance(x, torch.Tensor) else x[0] * x[1]


def test_tuples_between_layers() -> None:
    model = Chain(nn.Linear(2, 2), Stash("a"), Pair(), Pair(), Pop("a"))
    for by in ([3, 2], [4, 1], [1, 4], [2, 3]):
        parts = assert_same(model, 2, torch.randn(4, 2), by=by)
        model.zero_grad()
    (first, second) = parts
    assert torch.equal(second((*first(torch.ones(2, 2)),)), model(torch.ones(2, 2)))  # one tuple is as good as several
    with pytest.raises(TypeError, match=r"stage 1 of 2 \(2 to 4\) takes a value and the kept \['a'\]; it got 1 values"):
        second(torch.ones(2))


def test_integers_and_no_gradients_pass() -> None:
    model = Chain(nn.Identity(), nn.Embedding(5, 3), nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1))
    parts = assert_same(model, 4, torch.tensor([[1, 4], [0, 1]]), by=[1, 1, 1, 1])
    assert [part.training for part in parts] == [True] * 4
    assert [part.training for part in split(model.eval(), 2, by=[2, 2])] == [False] * 2


def test_nested_sequentials_are_cut_finely_but_hooked_ones_and_own_forwards_stay_whole() -> None:
    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    hooked = nn.Sequential(nn.ReLU(), nn.Tanh())
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.Sequential())
    model = nn.Sequential(inner, Own(nn.ReLU()), hooked, resnet18(2, in_channels=1))
    names = [name for name, _ in layers(model)]
    assert names[:5] == ["0.0", "0.1.0", "1", "2", "3.conv1"]
    assert_same(nn.Sequential(*list(model)[:3]), 4, torch.randn(2, 2), by=[1, 1, 1, 1])


def test_a_replaced_module_takes_effect_and_stages_are_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stage = split(model, 2, by=[1, 1])[1]
    stage._modules["1"] = nn.Tanh()
    assert torch.equal(stage(torch.ones(2)), torch.ones(2).tanh())
    again = pickle.loads(pickle.dumps(copy.deepcopy(stage.eval())))
    assert torch.equal(again(torch.ones(2)), torch.ones(2).tanh())
    assert "1 of 2, takes=(), gives=()" in repr(again)


def test_what_arrives_is_not_overwritten() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(2, 1))
    for by in ([1, 3], [2, 2]):
        _, second = split(model, 2, by=by)
        arrived = torch.tensor([[-1.0, 1.0]])
        second(arrived)
        assert arrived.tolist() == [[-1, 1]]
        model.zero_grad()
        assert_same(model, 2, torch.randn(3, 2), by=by)


class Hides(nn.Module):
    """Its layers do not name all of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(1))

    def layers(self) -> list[tuple[str, nn.Module]]:
        return [("body", self.body)]


def normed_twice() -> nn.Sequential:
    norm = nn.BatchNorm1d(2, affine=False)
    return nn.Sequential(norm, nn.Linear(2, 2), norm)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


LINEAR = nn.Linear(2, 2)
SAMPLE = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("model", "stages", "how", "words"),
    [
        (nn.Sequential(LINEAR), 2, {"by": [1, 1]}, "stages=2 of 1 layers; each stage takes one layer or more"),
        (nn.Sequential(LINEAR), 0, {"by": []}, "stages=0 of 1 layers"),
        (nn.Sequential(LINEAR, nn.ReLU()), 2, {"by": [1, 2]}, r"by=\[1, 2\] must name, for each of 2 stages"),
        (nn.Sequential(LINEAR, nn.ReLU()), 2, {"by": [2, 0]}, "one layer or more, 2 together"),
        (nn.Sequential(LINEAR, nn.ReLU()), 1, {"by": [1, 1]}, "for each of 1 stages"),
        (nn.Sequential(LINEAR), 1, {"by": "flops", "sample": SAMPLE}, "by='flops'; choose 'time', 'memory', or a list"),
        (nn.Sequential(LINEAR), 1, {}, "by='time' measures the model; give it a micro-batch as sample="),
        (Hides(), 2, {"by": [1, 1]}, r"\['scale'\] of the model's state_dict are in none of its layers"),
        (tied(), 2, {"by": [2, 1]}, "0.weight in stage 0 and 2.weight in stage 1 are the same tensor, which would get"),
        (normed_twice(), 2, {"by": [2, 1]}, "0.running_mean in stage 0 and 2.running_mean in stage 1 are the same"),
        (Chain(Pop("a")), 1, {"by": [1]}, "0 pops 'a', which no layer before it stashes"),
        (Chain(Stash("a")), 1, {"by": [1]}, r"\['a'\] are stashed and never popped"),
        (Chain(Stash("a"), Stash("a"), Pop("a")), 1, {"by": [3]}, "1 stashes 'a' a second time"),
        (Chain(Stash("a"), nn.ReLU(inplace=True), Pop("a")), 1, {"by": [3]}, "stashes as 'a' is overwritten by ReLU"),
    ],
)
def test_what_cannot_be_split(model: nn.Module, stages: int, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(model, stages, **how)


def test_modules_that_are_not_a_chain_are_refused() -> None:
    with pytest.raises(TypeError, match="a Linear does not define the order of its layers"):
        split(LINEAR, 1, by=[1])
    with pytest.raises(RuntimeError, match=r"Stash\('a'\) works in a Chain"):
        nn.Sequential(Stash("a"), Pop("a"))(SAMPLE)
    with pytest.raises(RuntimeError, match=r"Pop\('a'\) works in a Chain"):
        nn.Sequential(Pop("a"))(SAMPLE)
    with pytest.raises(TypeError, match="ends with a dict; between stages pass a tensor"):
        Stage([("a", Gives({}))], number=0, count=2)(SAMPLE)
    with pytest.raises(TypeError, match="keeps a tensor; here passes a tuple"):
        Chain(Pair(), Stash("a"), Pop("a"))(SAMPLE)
    with pytest.raises(ValueError, match="two layers are named 'a'"):
        Stage([("a", nn.ReLU()), ("a", nn.ReLU())])
    with pytest.raises(ValueError, match=r"'a\.b' lies within another layer, 'a'"):
        Stage([("a", nn.ReLU()), ("a.b", nn.ReLU())])


class Gives(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> Any:
        return self.value


class Positions(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def test_stages_share_what_training_does_not_change() -> None:
    """Buffers and frozen parameters were refused for the gradient that trained ones would lose half of."""
    table = torch.arange(2.0)
    frozen, normed = tied(), normed_twice().eval()
    frozen[0].weight.requires_grad_(False)
    for model in (nn.Sequential(Positions(table), nn.Linear(2, 2), Positions(table)), frozen, normed):
        stages = split(model, 2, by=[2, 1])
        x = torch.randn(3, 2)
        assert torch.equal(stages[1](stages[0](x)), model(x))


def test_shared_weights_within_a_stage_and_shared_activations_are_fine() -> None:
    assert_same(tied(), 1, SAMPLE, by=[3])
    relu = nn.ReLU()
    assert_same(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu), 2, SAMPLE, by=[2, 2])


# Costs


def test_costs_of_what_is_known() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32), nn.Linear(32, 4).requires_grad_(False))
    costs = profile(model, torch.randn(16, 64), runs=2)
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert [cost.parameter_bytes for cost in costs] == [4 * (64 * 256 + 256), 0, 4 * (256 * 32 + 32), 4 * (32 * 4 + 4)]
    # The first keeps its input, the ReLU its output, which is the next one's input; a frozen layer keeps nothing.
    assert [cost.activation_bytes for cost in costs] == [4 * 16 * 64, 4 * 16 * 256, 0, 0]
    assert costs[0].memory == 2 * costs[0].parameter_bytes + 4 * 16 * 64
    assert all(cost.forward > 0 for cost in costs)
    assert [cost.input_grad > 0 for cost in costs] == [False, True, True, True]
    assert costs[0].weight_grad > 0
    assert (costs[1].weight_grad, costs[3].weight_grad) == (0, 0)
    assert costs[1].seconds == costs[1].forward + costs[1].input_grad


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


def test_profiling_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), nn.BatchNorm1d(4))
    model.append(Counts())
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    profile(model, torch.ones(8, 4) * torch.arange(8.0).view(8, 1), runs=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match="runs=0"):
        profile(model, torch.randn(8, 4), runs=0)


def test_skips_tuples_and_integers_are_profiled() -> None:
    model = UNet()
    assert len(profile(model, torch.randn(2, 1, 8, 8), runs=1)) == UNET_LAYERS
    costs = profile(Chain(nn.Embedding(5, 3), Pair(), Pair()), torch.tensor([1, 2]), runs=1)
    assert (costs[0].input_grad, costs[0].weight_grad > 0) == (0, True)
    assert len(profile(Chain(Pair()), (torch.ones(2), torch.ones(2)), runs=1)) == 1


def test_costs_of_stages() -> None:
    costs = [LayerCost(str(n), n, 10 * n, 100 * n, 2, 1) for n in range(1, 5)]
    first, second = stage_costs(costs, [1, 3])
    assert first == costs[0]
    assert second == LayerCost("2..4", 9, 90, 900, 6, 3)
    for wrong in ([1, 2], [4, 0], []):
        with pytest.raises(ValueError, match="4 layers together"):
            stage_costs(costs, wrong)


def test_memory_balances_memory() -> None:
    wide, small = nn.Linear(512, 512), nn.Linear(512, 2)
    model = nn.Sequential(wide, nn.ReLU(), small, nn.ReLU(), nn.Linear(2, 2))
    assert [stage.names for stage in split(model, 2, "memory", torch.ones(1, 512))] == [("0",), ("1", "2", "3", "4")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    model = resnet18(num_classes=3).to(device)
    first, second = split(model, 2, by="time", sample=torch.randn(2, 3, 64, 64))
    x = torch.randn(2, 3, 64, 64, device=device)
    torch.testing.assert_close(second(first(x)), model(x))


@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (3, "dist_prims")])
def test_all_ranks_cut_alike(size: int, backend: str) -> None:
    def body() -> list[tuple[str, ...]]:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
        return [stage.names for stage in split(model, 4, by="time", sample=torch.ones(8, 32))]

    cuts = dist_prims.spawn(body, size, timeout=60, backend=backend)
    assert cuts == [cuts[0]] * size


def test_a_sample_that_does_not_fit_reaches_all_ranks() -> None:
    def body() -> None:
        with pytest.raises((RuntimeError, MismatchError), match="shapes cannot be multiplied"):
            split(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 2, by="time", sample=torch.ones(2, 7))
        dist_prims.barrier()  # no rank still waits

    dist_prims.spawn(body, 3, timeout=60)
