"""ResNets under torchvision's names, the same on several devices, and batch norm under micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_prims.datasets import digits
from dist_prims.models.resnet import BasicBlock, ResNet, resnet18, resnet34, resnet50, resnet101, resnet152
from dist_prims.models.two_device_resnet import ModelParallelResNet50, PipelineParallelResNet50
from dist_prims.training.pipeline import RunningStatistics

# What is published of each: how many parameters, how many blocks, whether they are bottlenecks.
NETS = {
    resnet18: (11_689_512, (2, 2, 2, 2), False),
    resnet34: (21_797_672, (3, 4, 6, 3), False),
    resnet50: (25_557_032, (3, 4, 6, 3), True),
    resnet101: (44_549_160, (3, 4, 23, 3), True),
    resnet152: (60_192_808, (3, 8, 36, 3), True),
}


def torchvisions(depths: tuple[int, ...], bottleneck: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a checkpoint of torchvision, in its order."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    before = 64
    for layer, depth in enumerate(depths):
        width = 64 << layer
        after = 4 * width if bottleneck else width
        for block in range(depth):
            name = f"layer{layer + 1}.{block}"
            kernels = [(width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)]
            for number, kernel in enumerate(
                kernels if bottleneck else [(width, before, 3, 3), (width, width, 3, 3)], 1
            ):
                yield f"{name}.conv{number}.weight", kernel
                yield from norm(f"{name}.bn{number}", kernel[0])
            if before != after or (block == 0 and layer > 0):
                yield f"{name}.downsample.0.weight", (after, before, 1, 1)
                yield from norm(f"{name}.downsample.1", after)
            before = after
    yield "fc.weight", (1000, before)
    yield "fc.bias", (1000,)


def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{part}", (width,)
    yield f"{name}.num_batches_tracked", ()


@pytest.mark.parametrize("make", NETS)
def test_names_shapes_and_counts_are_torchvisions(make: Callable[..., ResNet]) -> None:
    count, depths, bottleneck = NETS[make]
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    found = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    assert found == list(torchvisions(depths, bottleneck))


def test_first_values_are_torchvisions() -> None:
    torch.manual_seed(0)
    model = resnet18()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4:  # Kaiming's for a ReLU, by what goes out
            gain, fan_out = math.sqrt(2), parameter.shape[0] * parameter[0, 0].numel()
            assert parameter.std().item() == pytest.approx(gain / math.sqrt(fan_out), rel=0.03), name
        elif name.startswith("fc"):
            assert parameter.abs().max().item() == pytest.approx(1 / math.sqrt(512), rel=0.01)
        else:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
    torch.manual_seed(0)
    again = resnet18()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "options"), [(resnet18, {}), (resnet50, {"small_images": True, "in_channels": 1, "num_classes": 10})]
)
def test_layers_one_after_the_other_are_the_model(make: Callable[..., ResNet], options: dict[str, int]) -> None:
    model = make(**options)
    twin = copy.deepcopy(model)
    channels, size = (1, 8) if options else (3, 40)
    for training in (True, False):
        model.train(training), twin.train(training)
        x = image = torch.randn(3, channels, size, size)
        for name, layer in twin.layers():
            assert model.get_submodule(name) is not None
            x = layer(x)
        assert torch.equal(x, model(image))
        assert x.shape == (3, options.get("num_classes", 1000))
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name  # running statistics, too


@pytest.mark.slow
def test_it_learns_digits() -> None:
    torch.manual_seed(0)
    images, labels = (tensor[:32] for tensor in digits().tensors)
    model = ResNet(BasicBlock, (1, 1, 1, 1), 10, in_channels=1, small_images=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


# Twins


def both(twin: ResNet, training: bool, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a twin and of the single model of the same values; their gradients are compared here."""
    twin.train(training).double()  # or 50 layers would make much of the last bit
    with torch.device("meta"):  # the values are copied below
        single = resnet50(num_classes=7).train(training).double()
    single.to_empty(device="cpu").load_state_dict(twin.state_dict())
    x = torch.randn(count, 3, 8, 8, dtype=torch.float64)
    outputs = twin(x), single(x)
    for output in outputs:
        output.square().mean().backward()
    for (name, a), b in zip(twin.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, msg=name)
    return outputs


@pytest.mark.slow
def test_a_model_on_several_devices_is_the_model() -> None:
    a, b = both(ModelParallelResNet50(["cpu"] * 3, num_classes=7), training=True)
    assert torch.equal(a, b)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split_size", [2, 9])
def test_a_batch_in_parts_gives_what_the_batch_gives(split_size: int) -> None:
    a, b = both(PipelineParallelResNet50(split_size, ["cpu", "cpu"], num_classes=7), training=False)
    torch.testing.assert_close(a, b)


def test_resnets_on_several_devices_refuse_wrong_sizes() -> None:
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"sizes=\[11, 11\] must be 2 numbers, one a device, 23 together"),
    ):
        ModelParallelResNet50(["cpu", "cpu"], sizes=[11, 11])
    with pytest.raises(ValueError, match="split_size=0 must be 1 or more"):
        PipelineParallelResNet50(0, ["cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_resnet_on_two_devices_is_the_model() -> None:
    devices = ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]
    twin = PipelineParallelResNet50(2, devices, num_classes=7)
    a, b = both(twin, training=False)
    torch.testing.assert_close(a.cpu(), b)


# Batch norm under micro-batches

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}


def an_image(count: int, dims: int, seed: int = 0) -> torch.Tensor:
    """``count`` images of 3 channels and ``dims`` - 1 directions, far from zero: what sums of squares would lose."""
    values = torch.randn(count, 3, *[2] * (dims - 1), generator=torch.Generator().manual_seed(seed))
    return values * 2 + 300


def rounding_of_variance(x: torch.Tensor) -> torch.Tensor:
    """How far the variance of each channel may move when means are rounded to float32.

    A mean that is off by ``eps * |mean|`` moves the squared distances by that times twice the deviation. A limit
    relative to the variance would be wrong: four values may happen to lie close to each other.
    """
    channels = x.double().transpose(0, 1).flatten(1)
    return 4 * torch.finfo(x.dtype).eps * channels.square().mean(1).sqrt() * channels.std(1)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    dims=st.sampled_from([1, 2, 3, 4]),
    sizes=st.lists(st.integers(2, 7), min_size=1, max_size=6),
    momentum=st.sampled_from([0.1, 0.7, 1.0, None]),
    affine=st.booleans(),
    batches=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@example(dims=1, sizes=[2, 2], momentum=1.0, affine=False, batches=1, seed=1952)  # one variance is 0.0097
def test_running_statistics_are_those_of_the_whole_batch(
    dims: int, sizes: list[int], momentum: float | None, affine: bool, batches: int, seed: int
) -> None:
    whole: Any = NORMS[dims](3, momentum=momentum, affine=affine)
    collecting = copy.deepcopy(whole)
    statistics = RunningStatistics([collecting])
    images = [an_image(sum(sizes), dims, seed + number) for number in range(batches)]
    for x in images:
        whole(x)
        for part in x.split(sizes):
            fresh = NORMS[dims](3, affine=affine)
            with statistics.collected():
                assert torch.equal(collecting(part), fresh(part))  # each by its own statistics, as ever
        statistics.commit()
    torch.testing.assert_close(collecting.running_mean, whole.running_mean, rtol=1e-6, atol=1e-6)
    limit = torch.stack([rounding_of_variance(x) for x in images]).amax(0)
    assert ((collecting.running_var - whole.running_var).abs() <= limit).all(), (collecting.running_var, limit)
    assert torch.equal(collecting.num_batches_tracked, whole.num_batches_tracked)
    statistics.commit()  # nothing more to count
    assert torch.equal(collecting.num_batches_tracked, whole.num_batches_tracked)


def test_in_double_precision_they_are_equal_to_the_last_digits() -> None:
    whole = nn.BatchNorm2d(3).double()
    collecting = copy.deepcopy(whole)
    statistics = RunningStatistics([collecting])
    x = an_image(9, 3).double()
    whole(x)
    for part in x.split([2, 3, 4]):
        with statistics.collected():
            collecting(part)
    statistics.commit()
    torch.testing.assert_close(collecting.running_var, whole.running_var, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_forward_that_checkpointing_repeats_is_counted_once(momentum: float | None) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Linear(4, 1))
    repeating = copy.deepcopy(plain)
    statistics = RunningStatistics([repeating])
    for part in torch.randn(8, 3).split(4):
        plain(part).sum().backward()
        with statistics.collected():
            loss = checkpoint(repeating, part, use_reentrant=False).sum()
        with statistics.collected(is_recompute=True):
            loss.backward()
        statistics.commit()
    for (name, a), b in zip(plain.state_dict().items(), repeating.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for a, b in zip(plain.parameters(), repeating.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("again", [False, True])
def test_after_an_error_a_norm_is_as_before(again: bool) -> None:
    norm = nn.BatchNorm1d(1, momentum=0.3)
    counter, statistics = norm.num_batches_tracked, RunningStatistics([norm])
    with pytest.raises(ValueError, match="expected 2D or 3D input"), statistics.collected(is_recompute=again):
        norm(torch.randn(2))
    assert (norm.momentum, norm.num_batches_tracked is counter, counter.item()) == (0.3, True, 0)
    norm(torch.randn(2, 1))
    assert counter == 1
