"""The buckets of GradientAverager: their order, their memory, and what a compressor makes of them."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averaging import spawn

from dist_prims.training.compression import TopK
from dist_prims.training.gradients import Bucket, GradientAverager
from dist_prims.training.gradients.bucket_layout import fill_buckets


class Doubling:
    """Not compression: it shows that a mean is asked for, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.resets = 0

    def start(self, bucket: Bucket, group: dist.ProcessGroup | None) -> Callable[[], None]:
        assert all(view.data_ptr() >= bucket.flat.data_ptr() for view in bucket.views)
        assert sum(view.numel() for view in bucket.views) == bucket.flat.numel()
        self.seen.append((bucket.index, bucket.flat.numel()))
        work = dist.all_reduce(bucket.flat, group=group, async_op=True)

        def end() -> None:
            work.wait()
            bucket.flat.mul_(2 / dist.get_world_size(group))

        return end

    def reset(self) -> None:
        self.resets += 1


@pytest.mark.parametrize("by_size", [True, False])
def test_a_compressor(by_size: bool) -> None:
    def body() -> None:
        model, compressor = torch.nn.Linear(3, 1), Doubling()
        averager = GradientAverager(model, compress=compressor, bucket_mb=1e-6)
        resets = compressor.resets
        with averager.join(by_size):
            for step in range(2 + dist.get_rank()):
                model.zero_grad()
                model(torch.ones(1, 3) * (dist.get_rank() + 1)).sum().backward()
                wanted = 3.0 if step < 2 else (2.0 if by_size else 4.0)
                assert torch.equal(model.weight.grad, torch.full((1, 3), wanted))
        assert [index for index, _ in compressor.seen] == [0, 1] * 3
        assert compressor.resets <= resets + 1  # the buckets found their order, and kept it

    spawn(body, 2)


def test_buckets_follow_the_order_of_gradients_and_give_old_memory_back() -> None:
    def body() -> None:
        first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        model = torch.nn.ModuleList([second, first])  # listed against the order of use
        averager = GradientAverager(model, bucket_mb=0.01)
        for _ in range(2):
            model[0](model[1](torch.ones(1, 64))).sum().backward()
        numbers = [number for members in averager._averaging.sender.layout.members for number in members]
        assert {*numbers[:2]} == {0, 1}  # the gradients of `second` come first
        old = [weakref.ref(bucket.flat) for bucket in averager._averaging.sender.layout.buckets]
        for step in range(3):
            model.zero_grad()
            model[0](model[1](torch.ones(1, 64))).sum().backward()
            assert all(ref() is not None for ref in old), step  # not built again
        for parameter in model.parameters():
            assert any(parameter.grad is view for b in averager._averaging.sender.layout.buckets for view in b.views)

    spawn(body, 2)


class Backwards(torch.nn.ModuleList):
    """Uses its layers against the order in which they are listed, so that buckets are rebuilt after a step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_memory_beside_the_gradients_is_at_most_a_bucket() -> None:
    """Counted in the allocations of torch, in a step that rebuilds the buckets and in one that does not."""

    def body() -> None:
        model = Backwards(torch.nn.Linear(256, 256) for _ in range(16))
        alone, bucket_mb, x = copy.deepcopy(model), 0.6, torch.ones(2, 256)

        def train(of: torch.nn.Module, averager: GradientAverager | None = None) -> Any:
            members = []
            for _ in range(3):
                time.sleep(0.1)  # gloo's thread lets go of what it has sent a moment after it has told that it is done
                of.zero_grad()
                of(x).sum().backward()
                members.append(averager and averager._averaging.sender.layout.members)
            return members

        # What an averager sends when it is made is sometimes freed by gloo's thread, and that is not recorded.
        averager = GradientAverager(model, bucket_mb=bucket_mb)
        without, _ = peak(lambda: train(alone))  # the gradients are in it
        most, members = peak(lambda: train(model, averager))
        assert members[0] != members[1] == members[2]
        assert most <= without + bucket_mb * 2**20

    spawn(body, 2, "gloo")


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that torch has allocated at most at once during a call, and what that returned."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        found = call()
    most = now = 0
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, found


def test_a_compressor_has_one_averager() -> None:
    """What TopK had lost of one model's gradients was added to those of the other, without a word."""

    def body() -> None:
        first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        shared = TopK(0.5)
        averager = GradientAverager(first, compress=shared)
        first(torch.tensor([[3.0, 2.0]])).sum().backward()
        assert first.weight.grad.tolist() == [[3.0, 0.0]]  # the 2 is kept
        for _ in range(2):
            with pytest.raises(ValueError, match=r"another averager uses this TopK; give each averager its own"):
                GradientAverager(second, compress=shared)
        averager.remove()
        GradientAverager(second, compress=shared)
        averager.remove()  # once more: it is not the owner any longer
        with pytest.raises(ValueError, match="another averager"):
            GradientAverager(first, compress=shared)
        second(torch.zeros(1, 2)).sum().backward()
        assert second.weight.grad.tolist() == [[0.0, 0.0]]
        GradientAverager(torch.nn.Linear(2, 1), compress="topk")  # a name makes a new one each time
        GradientAverager(torch.nn.Linear(2, 1), compress="topk")

    spawn(body, 2)


def test_a_plan_has_every_parameter_once_and_keeps_to_its_limit() -> None:
    parameters = [torch.ones(n, dtype=[torch.float32, torch.float64][n % 2]) for n in (3, 0, 5, 70, 1, 2, 4, 4)]
    for limit in (1, 16, 40, 10_000):
        for order in (range(8), [7, 3, 1, 0, 2, 6, 5, 4]):
            members = fill_buckets(parameters, order, limit)
            assert sorted(number for numbers in members for number in numbers) == [*range(8)]
            ends = []
            for numbers in members:
                assert len({parameters[number].dtype for number in numbers}) == 1
                large = [number for number in numbers if parameters[number].nbytes]
                assert sum(parameters[number].nbytes for number in large) <= limit or len(large) == 1
                ends.append(max([*order].index(number) for number in numbers))
            assert ends == sorted(ends)
