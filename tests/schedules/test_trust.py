"""Algorithms that the package does not know are proved before they run, wherever they are chosen.

Once a ring without its second half that a program had registered was the cheapest all_reduce by price, and a plain
``dist_prims.all_reduce`` returned a partial sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.collectives import proof_before_use
from dist_prims.collectives.algorithm_choice import cheapest
from dist_prims.errors import CommTimeoutError
from dist_prims.schedules import Schedule, ScheduleError, Step, algorithm, build, trust, unregister

COUNT = 1 << 18  # elements: large enough for the native collectives to follow a pinned schedule


def half_a_ring(size: int) -> Iterator[Step]:
    rank = np.arange(size)
    for step in range(size - 1):
        yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size, reduce=True)


def star(size: int) -> Iterator[Step]:
    """Right, and dear: it is chosen only by name."""
    if size > 1:
        yield Step(src=range(1, size), dst=0, chunk=0, reduce=True)
        yield Step(src=0, dst=range(1, size), chunk=0)


def register_both() -> None:
    algorithm("all_reduce", name="forgetful")(half_a_ring)
    algorithm("all_reduce", name="star", chunks=1)(star)


@pytest.fixture
def registered() -> Iterator[None]:
    register_both()
    yield
    unregister("all_reduce", "forgetful")
    unregister("all_reduce", "star")


def refused(call: Callable[[], Any], group: Any = None) -> bool:
    """Whether the call raises the error of a wrong schedule, which tells what to do."""
    try:
        call()
    except ScheduleError as error:
        message = str(error)
        assert message.startswith(f"rank {dist.get_rank(group)}: all_reduce 'forgetful'")
        assert "is missing" in message
        assert "unregister it" in message
        return True
    return False


def summed(call: Callable[[torch.Tensor], Any]) -> bool:
    tensor = torch.arange(COUNT) + dist.get_rank()
    call(tensor)
    size = dist.get_world_size()
    return torch.equal(tensor, size * torch.arange(COUNT) + size * (size - 1) // 2)


@pytest.mark.usefixtures("registered")
def test_the_choice_by_price_would_take_the_wrong_algorithm() -> None:
    """Or the tests below show nothing."""
    assert cheapest("all_reduce", 3, 4 * COUNT) == "forgetful"


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_the_collectives_of_python_prove_what_they_run(backend: str) -> None:
    def rank_main() -> None:
        register_both()
        tensor = torch.ones(COUNT)
        if backend == "gloo":  # the other one has collectives of its own
            assert refused(lambda: dist_prims.all_reduce(tensor, algorithm="cheapest"))
        assert refused(lambda: dist_prims.all_reduce(tensor, algorithm="forgetful"))  # by name
        os.environ["DIST_PRIMS_ALL_REDUCE"] = "forgetful:1K-max"
        # by size: a group of the backend dist_prims pins the algorithm when it is made
        assert refused(dist.new_group if backend == "dist_prims" else lambda: dist_prims.all_reduce(tensor))
        assert refused(lambda: dist_prims.all_reduce(tensor, algorithm="forgetful", async_op=True).wait())
        assert tensor.eq(1).all(), "data was touched"
        os.environ["DIST_PRIMS_ALL_REDUCE"] = "star"
        assert summed(dist_prims.all_reduce)  # the group goes on
        sub = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            assert refused(lambda: dist_prims.all_reduce(tensor, group=sub, algorithm="forgetful"), sub)

    dist_prims.spawn(rank_main, 3, backend=backend, timeout=120)


def test_one_rank_proves() -> None:
    def rank_main() -> int:
        register_both()
        count = 0
        verify = Schedule.verify

        def counted(schedule: Schedule) -> None:
            nonlocal count
            count += 1
            verify(schedule)

        Schedule.verify = counted  # type: ignore[method-assign]
        for _ in range(3):
            assert summed(lambda tensor: dist_prims.all_reduce(tensor, algorithm="star"))
        dist_prims.all_reduce(torch.ones(COUNT), algorithm="ring")
        return count

    assert dist_prims.spawn(rank_main, 3, backend="gloo", timeout=120) == [1, 0, 0]


def test_pinned_schedules_are_proved_when_the_group_is_made() -> None:
    def rank_main() -> None:
        register_both()
        assert refused(lambda: dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="forgetful")))
        group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="star:1M-max"))
        assert summed(lambda tensor: dist.all_reduce(tensor, group=group))

    dist_prims.spawn(rank_main, 3, backend="dist_prims", timeout=120)


def test_a_wrong_algorithm_is_not_followed_across_hosts() -> None:
    """Also where it is a part of the hierarchical one."""

    def rank_main() -> None:
        register_both()
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ["DIST_PRIMS_HOST_ID"] = "ab"[rank // 2]
        dist_prims.init("dist_prims", timeout=60)
        tensor = torch.ones(COUNT)
        with pytest.raises(
            ScheduleError, match=f"rank {rank}: all_reduce '(forgetful|hierarchical)' for 4 ranks is wrong"
        ):
            dist.all_reduce(tensor)
        parts = {"hosts": (2, 2), "outer": "forgetful"}
        with pytest.raises(ScheduleError, match=f"rank {rank}: all_reduce 'hierarchical' for 4 ranks is wrong"):
            dist_prims.all_reduce(tensor, algorithm="hierarchical", **parts)
        assert tensor.eq(1).all(), "data was touched"
        unregister("all_reduce", "forgetful")
        assert summed(dist.all_reduce)

    dist_prims.spawn(rank_main, 4, timeout=120)


def test_ranks_whose_steps_differ_are_told() -> None:
    def rank_main() -> None:
        if dist.get_rank() == 0:
            algorithm("all_reduce", name="mine", chunks=1)(star)
        else:
            algorithm("all_reduce", name="mine")(half_a_ring)
        group = dist.new_group(timeout=timedelta(seconds=4))
        error = CommTimeoutError if dist.get_rank() else dist_prims.errors.CommError
        with pytest.raises((error, RuntimeError)) as caught:
            dist_prims.all_reduce(torch.ones(8), algorithm="mine", group=group)
        if dist.get_rank():
            assert "register the same steps under this name" in str(caught.value)

    dist_prims.spawn(rank_main, 2, backend="gloo", timeout=120)


def test_above_the_limit_only_trusted_algorithms_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 2 ranks in place of 512."""
    for module in (trust, proof_before_use):
        monkeypatch.setattr(module, "MOST_RANKS", 2)
    group = proof_before_use.Proofs(None, 0)
    try:
        register_both()
        group.require(build("all_reduce", "ring", 3), timedelta(seconds=1))
        with pytest.raises(ScheduleError, match=r"all_reduce 'star' for 3 ranks is not proved: above 2 ranks"):
            group.require(build("all_reduce", "star", 3), timedelta(seconds=1))
        assert cheapest("all_reduce", 3, 4 * COUNT) != "forgetful"
        algorithm("all_reduce", name="star", chunks=1, trust=True)(star)
        group.require(build("all_reduce", "star", 3), timedelta(seconds=1))
    finally:
        unregister("all_reduce", "forgetful")
        unregister("all_reduce", "star")


def test_an_algorithm_registered_again_is_another_one() -> None:
    """A cell of a notebook that is edited and run again: neither steps nor verdict of the former are used."""

    def rank_main() -> None:
        algorithm("all_reduce", name="mine")(half_a_ring)
        tensor = torch.ones(COUNT)
        with pytest.raises(ScheduleError):
            dist_prims.all_reduce(tensor, algorithm="mine")
        algorithm("all_reduce", name="mine", chunks=1)(star)
        assert summed(lambda tensor: dist_prims.all_reduce(tensor, algorithm="mine"))

    dist_prims.spawn(rank_main, 2, backend="gloo", timeout=120)
