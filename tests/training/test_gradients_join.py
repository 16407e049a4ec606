"""join() of averagers when ranks disagree, and over groups of which the order of collectives matters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from averaging import spawn

from dist_prims.errors import MismatchError
from dist_prims.training.gradients import GradientAverager

LIMIT = 20  # seconds; a rank that waited for another one would exceed it


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(1, 1, bias=False)


def step(*layers: torch.nn.Linear) -> float:
    for each in layers:
        each.zero_grad()
    sum(each(torch.ones(1, 1)).sum() for each in layers).backward()
    return float(layers[0].weight.grad)


def run(
    body: Callable[[GradientAverager, GradientAverager, torch.nn.Linear, torch.nn.Linear], None],
    words: str,
    overlap: bool = False,
) -> None:
    """``body`` on 2 ranks with two averagers and their layers; each returns the text of its error, with its rank."""

    def each() -> str:
        one, two = layer(), layer()
        a, b = (GradientAverager(each, overlap=overlap) for each in (one, two))
        with pytest.raises(MismatchError) as caught:
            body(a, b, one, two)
        if not overlap:  # nothing was sent, so training can go on
            with a.join(), b.join():
                assert step(one) == 1.0
        return str(caught.value)

    for rank, text in enumerate(spawn(each, 2, timeout=LIMIT)):
        assert text.startswith(f"rank {rank}: GradientAverager.join: ranks disagree. {words}"), text


@pytest.mark.parametrize("overlap", [True, False])
def test_no_rank_waits_for_one_that_has_raised_a_disagreement(overlap: bool) -> None:
    """The end of a backward ended the next averager too, which waited for a rank that had raised."""

    def body(a: GradientAverager, b: GradientAverager, one: torch.nn.Linear, two: torch.nn.Linear) -> None:
        later = max((a, b), key=lambda each: each.name)
        with a.join(), b.join(), pytest.raises(MismatchError):
            step(one, two) if dist.get_rank() == 0 else step(one if later is a else two)

    run(body, "Rank 0 averages the gradients of averager ", overlap)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_error_that_ends_an_inner_join_on_one_rank(steps: int) -> None:
    """The rank that had left the inner join() raised IndexError, and the other rank waited for it."""

    def body(a: GradientAverager, b: GradientAverager, one: torch.nn.Linear, two: torch.nn.Linear) -> None:
        with a.join(), suppress(KeyError), b.join():
            if dist.get_rank() == 1:
                raise KeyError
            for _ in range(steps):
                step(two)

    words = "averages the gradients of averager 1 (0: that of the outermost join())" if steps else "has no more steps"
    run(
        body, f"Rank 0 {words}, within 2 join(); rank 1 has no more steps, within 1 join(). An error has ended an inner"
    )


def test_an_error_that_ends_an_inner_join_on_all_ranks() -> None:
    def body() -> float:
        one, two = layer(), layer()
        a, b = GradientAverager(one), GradientAverager(two)
        with a.join():
            with suppress(KeyError), b.join():
                raise KeyError
            return step(one)

    assert spawn(body, 2, timeout=LIMIT) == [1.0, 1.0]


@pytest.mark.parametrize("steps", [0, 1])
def test_an_inner_join_while_another_rank_is_not_there(steps: int) -> None:
    """One rank waited in the check of the inner join(), the other one in the step of the outer one."""

    def body(a: GradientAverager, b: GradientAverager, one: torch.nn.Linear, two: torch.nn.Linear) -> None:
        with a.join():
            if dist.get_rank() == 0:
                b.join().__enter__()
            for _ in range(steps):
                step(one)

    words = "averages the gradients of averager 0 (0: that of the outermost join())" if steps else "has no more steps"
    run(
        body,
        "Rank 0 enters join() of averager 1 (0: that of the outermost join()), within 1 join(); "
        f"rank 1 {words}, within 1 join(). Enter all of them before the first step",
    )


@pytest.mark.parametrize("complete", [True, False])
def test_a_group_that_torch_does_not_know(complete: bool) -> None:
    """Its averager has no group of its own, and a rank with a batch sent its buckets before the announcement, where a
    rank that was done expected the announcement first."""

    def body() -> list[float]:
        group = unknown_group()
        model = layer()
        averager = GradientAverager(model, group=group)
        found = []
        with averager.join():
            for _ in range(1 + dist.get_rank()):
                with averager.once() if complete else nullcontext(lambda parameters: None) as completes:
                    step(model)
                    completes(model.parameters())
                found.append(float(model.weight.grad))
        averager.remove()
        return found

    def unknown_group() -> dist.ProcessGroup:
        rank, store = dist.get_rank(), dist.PrefixStore("unknown", dist.distributed_c10d._get_default_store())
        group, limit = dist.ProcessGroup(store, rank, 2), timedelta(seconds=LIMIT / 4)
        gloo = dist.ProcessGroupGloo(store, rank, 2, limit)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    assert spawn(body, 2, timeout=LIMIT) == [[1.0], [1.0, 0.5]]


def test_buckets_on_a_gpu_are_sent_after_the_announcement() -> None:
    """NCCL guarantees progress only if all ranks launch collectives in one order, whatever the groups are."""

    def body() -> list[int]:
        model = torch.nn.Sequential(layer(), layer())
        averager = GradientAverager(model, bucket_mb=1e-6)
        sent = []
        for device in ("cpu", "cuda"):
            averager._device = torch.device(device)  # of the gradients, which are on the CPU in this test
            with averager.join():
                middle = model[0](torch.ones(1, 1))
                middle.register_hook(lambda _: sent.append(averager._averaging.sender.sent))
                model[1](middle).sum().backward()
        return sent

    assert spawn(body, 2, timeout=LIMIT) == [[1, 0]] * 2
