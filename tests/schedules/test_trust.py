"""Algorithms that the package does not know are compared and proved before they run, wherever they are chosen.

Once a ring without its second half that a program had registered was the cheapest all_reduce by price, and a plain
``dist_prims.all_reduce`` returned a partial sum. Later the proof made plain calls fail, because of an algorithm that
they did not name.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import span

import dist_prims
from dist_prims.collectives import proof_before_use
from dist_prims.collectives.algorithm_choice import cheapest
from dist_prims.errors import MismatchError
from dist_prims.schedules import Schedule, ScheduleError, Step, algorithm, algorithms, build, lookup, trust, unregister
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology

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


def only_two_ranks(size: int) -> Iterator[Step]:
    if size > 2:
        raise KeyError("two ranks")
    yield Step(src=[0, 1], dst=[1, 0], chunk=0, reduce=True)


@pytest.mark.usefixtures("registered")
def test_a_wrong_algorithm_is_left_out_of_a_choice_with_one_warning() -> None:
    assert build("all_reduce", "forgetful", 3).cost(4 * COUNT, 60e-6, 5e-10) < build("all_reduce", "ring", 3).cost(
        4 * COUNT, 60e-6, 5e-10
    ), "it would be the cheapest"
    with pytest.warns(UserWarning, match=r"all_reduce 'forgetful' for 3 ranks is not chosen .*is missing.*unregister"):
        assert cheapest("all_reduce", 3, 4 * COUNT) != "forgetful"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cheapest("all_reduce", 4, 4 * COUNT) != "forgetful"


def test_an_algorithm_is_priced_again_after_the_algorithm_that_it_uses_is_registered() -> None:
    """The price was kept. A rank that had asked for it too early chose another algorithm than a rank that had not."""

    def pipeline(size: int) -> Iterator[Step]:
        for now in range(size + 14):
            src = [rank for rank in range(size - 1) if 0 <= now - rank < 16]
            yield Step(src, [rank + 1 for rank in src], [now - rank for rank in src], reduce=True)

    algorithm("scan", name="whole", chunks=16)(lambda size: iter(build("scan", "part", size).steps))
    try:
        with pytest.warns(UserWarning, match="scan 'whole' for 8 ranks is not chosen .*unknown scan algorithm 'part'"):
            assert cheapest("scan", 8, 1 << 26) == "recursive_doubling"
        algorithm("scan", name="part", chunks=16)(pipeline)
        assert cheapest("scan", 8, 1 << 26) == "whole"
    finally:
        unregister("scan", "whole")
        if "part" in algorithms("scan"):
            unregister("scan", "part")


@pytest.mark.parametrize("is_trusted", [True, False])
def test_an_algorithm_that_raises_is_left_out_of_a_recommendation(is_trusted: bool) -> None:
    """It is considered where it works: between two hosts."""
    algorithm("all_reduce", name="pair", chunks=1, trust=is_trusted)(only_two_ranks)
    try:
        costs = Level(1e-6, 1e-10), Level(20e-6, 1e-9)
        with pytest.warns(
            UserWarning, match="all_reduce 'pair' for 4 ranks is not chosen .* raises KeyError: 'two ranks'"
        ):
            names = [each.name for each in recommend("all_reduce", 1e6, Topology((2, 2), *costs)).candidates]
        assert "pair" not in names
        assert "hierarchical inner=ring outer=pair" in names
        assert cheapest("all_reduce", 4, 4 * COUNT) != "pair"
    finally:
        unregister("all_reduce", "pair")


def test_an_algorithm_of_the_package_cannot_be_replaced_or_removed() -> None:
    """A program that registered its own "ring" changed the all_reduce of the whole process."""
    ring = lookup("all_reduce", "ring")
    with pytest.raises(ValueError, match=r"all_reduce 'ring' is an algorithm of dist_prims.*under another name"):
        algorithm("all_reduce", name="ring", chunks=1)(star)
    with pytest.raises(ValueError, match=r"all_reduce 'ring' is an algorithm of dist_prims.*can be removed"):
        unregister("all_reduce", "ring")
    with pytest.raises(ValueError, match="unknown all_reduce algorithm 'rung'; did you mean 'ring'"):
        unregister("all_reduce", "rung")
    assert lookup("all_reduce", "ring") is ring


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_the_collectives_of_python_prove_what_they_run(backend: str) -> None:
    def rank_main() -> None:
        register_both()
        tensor = torch.ones(COUNT)
        if backend == "gloo":  # the other one has collectives of its own
            assert summed(lambda tensor: dist_prims.all_reduce(tensor, algorithm="cheapest"))
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


def test_equal_steps_are_proved_once_on_each_rank() -> None:
    def rank_main() -> int:
        register_both()
        trust._problems.clear()  # of the process that forked this rank
        count = 0
        verify = Schedule.verify

        def counted(self: Schedule) -> None:
            nonlocal count
            count += 1
            verify(self)

        Schedule.verify = counted  # type: ignore[method-assign]
        for _ in range(3):
            assert summed(lambda tensor: dist_prims.all_reduce(tensor, algorithm="star"))
        dist_prims.all_reduce(torch.ones(COUNT), algorithm="ring")
        return count

    assert dist_prims.spawn(rank_main, 3, backend="gloo", timeout=120) == [1, 1, 1]


def test_pinned_schedules_are_proved_when_the_group_is_made() -> None:
    def rank_main() -> None:
        register_both()
        assert refused(lambda: dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="forgetful")))
        group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="star:1M-max"))
        assert summed(lambda tensor: dist.all_reduce(tensor, group=group))

    dist_prims.spawn(rank_main, 3, backend="dist_prims", timeout=120)


def test_a_plain_call_across_hosts_does_not_fail_by_an_algorithm_of_a_user() -> None:
    """It is neither followed nor a reason to raise, also as a part of the hierarchical one; where a call names it, the
    error says what to unregister."""

    def rank_main() -> None:
        register_both()
        algorithm("all_reduce", name="pair", chunks=1)(only_two_ranks)
        algorithm("broadcast", name="from 0", chunks=1, trust=True)(from_rank_0)
        rank, tensor = dist.get_rank(), torch.ones(COUNT)
        assert summed(dist.all_reduce)
        for root in (0, 3):
            sent = torch.full((COUNT,), rank)
            dist.broadcast(sent, root)
            assert sent.eq(root).all()
        remedy = r"unregister it \(dist_prims.schedules.unregister\('all_reduce', 'forgetful'\)\)"
        with pytest.raises(
            ScheduleError, match=f"rank {rank}: all_reduce 'hierarchical' for 4 ranks is wrong.*{remedy}"
        ):
            dist_prims.all_reduce(tensor, algorithm="hierarchical(outer=forgetful)")
        with pytest.raises(
            ScheduleError, match=f"rank {rank}: all_reduce 'pair' for 4 ranks is wrong.*raises KeyError"
        ):
            dist_prims.all_reduce(tensor, algorithm="pair")
        assert tensor.eq(1).all(), "data was touched"
        assert summed(dist.all_reduce)

    span("a a b b", rank_main)


def from_rank_0(size: int, root: int) -> Iterator[Step]:
    """The cheapest broadcast by price, and trusted, but for one root only."""
    if root != 0:
        raise ValueError("root 0 only")
    yield Step(src=0, dst=range(1, size), chunk=0)


def register_by_rank(trusted: bool) -> None:
    """Two right algorithms under one name; that of rank 1 adds in another order of chunks."""

    @algorithm("all_reduce", name="mine", chunks=2, trust=trusted)
    def mine(size: int) -> Iterator[Step]:
        order = (1, 0) if dist.get_rank() == 1 else (0, 1)
        for chunk in order:
            yield Step(src=range(1, size), dst=0, chunk=chunk, reduce=True)
        for chunk in order:
            yield Step(src=0, dst=range(1, size), chunk=chunk)


DIFFERENT_STEPS = r"rank \d: ranks disagree, no data was touched.*registered different steps under this name"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
@pytest.mark.parametrize("trusted", [True, False])
def test_ranks_that_registered_different_steps_raise(backend: str, trusted: bool) -> None:
    """A rank that missed a new registration followed the old steps, and the sums were wrong without an error."""

    def rank_main() -> None:
        tensor = torch.tensor([1.0, 10.0])
        algorithm("all_reduce", name="mine", chunks=1, trust=trusted)(star)
        dist_prims.all_reduce(tensor, algorithm="mine")
        assert tensor.tolist() == [3.0, 30.0]
        register_by_rank(trusted)
        calls: list[dict[str, Any]] = [{"algorithm": "mine"}, {"algorithm": "mine", "async_op": True}]
        for options in [*calls, {"algorithm": "hierarchical(hosts=1,1,1,outer=mine)"}]:
            with pytest.raises(MismatchError, match=DIFFERENT_STEPS):  # an asynchronous call raises in wait()
                dist_prims.all_reduce(tensor, **options).wait()
        assert tensor.tolist() == [3.0, 30.0], "data was touched"

    dist_prims.spawn(rank_main, 3, backend=backend, timeout=120)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
@pytest.mark.parametrize("trusted", [True, False])
def test_a_rank_whose_steps_raise_is_compared(backend: str, trusted: bool) -> None:
    """The other ranks do not wait for it."""

    def rank_main() -> None:
        algorithm("all_reduce", name="mine", chunks=1, trust=trusted)([star, only_two_ranks][dist.get_rank() == 1])
        with pytest.raises(MismatchError, match=DIFFERENT_STEPS):
            dist_prims.all_reduce(torch.ones(8), algorithm="mine")
        algorithm("all_reduce", name="mine", chunks=1, trust=trusted)(only_two_ranks)
        with pytest.raises((ScheduleError, KeyError), match="two ranks"):
            dist_prims.all_reduce(torch.ones(8), algorithm="mine")
        assert summed(dist_prims.all_reduce)

    dist_prims.spawn(rank_main, 3, backend=backend, timeout=120)


def test_pinned_and_priced_schedules_are_compared() -> None:
    def rank_main() -> None:
        register_by_rank(trusted=False)
        os.environ["DIST_PRIMS_ALL_REDUCE"] = "mine x2"
        group = dist.new_group()
        with pytest.raises(MismatchError, match=DIFFERENT_STEPS):
            dist.all_reduce(torch.ones(COUNT), group=group)

        @algorithm("reduce", name="cheap", chunks=1, trust=True)
        def cheap(size: int, root: int) -> Iterator[Step]:
            yield Step(src=1 + (dist.get_rank() == 1), dst=root, chunk=0, reduce=True)

        with pytest.raises(MismatchError, match=DIFFERENT_STEPS):
            dist.reduce(torch.ones(COUNT), 0)

    span("a b c", rank_main)


def test_the_steps_that_a_rank_executes_are_in_the_fingerprint() -> None:
    """A trusted algorithm with ``part`` executes the rows of ``part``."""
    fingerprints = []
    for shift in (1, 2):

        def part(size: int, rank: int, shift: int = shift) -> Iterator[Step]:
            yield Step(src=rank, dst=(rank + shift) % size, chunk=rank)

        algorithm("all_gather", name="parts", trust=True, part=part)(lambda size: iter(()))
        fingerprints.append(trust.fingerprint(build("all_gather", "parts", 3)))
        assert fingerprints[-1] == trust.fingerprint(build("all_gather", "parts", 3)), "the same on every rank"
    unregister("all_gather", "parts")
    assert fingerprints[0] != fingerprints[1]


def test_an_algorithm_registered_with_other_demands_is_proved_again() -> None:
    """The verdict was kept for the steps alone, so the remedy that the error names had no effect."""

    def each_in_its_order(size: int) -> Iterator[Step]:
        """Rank 0 adds (r0+r2)+r1, rank 1 (r1+r0)+r2, rank 2 (r2+r1)+r0."""
        ranks, both = np.arange(3), np.arange(6) % 3
        yield Step(src=both, dst=(both + 1) % 3, chunk=0, into=[0] * 3 + [1] * 3, reduce=[True] * 3 + [False] * 3)
        yield Step(src=ranks, dst=(ranks + 1) % 3, chunk=1, into=0, reduce=True)

    def register(replicas: str) -> str:
        algorithm("all_reduce", name="swapped", chunks=1, scratch=1, replicas=replicas)(each_in_its_order)
        return trust.problem_of(build("all_reduce", "swapped", 3))

    problems = [register(replicas) for replicas in ("same", "may differ", "same")]
    unregister("all_reduce", "swapped")
    assert "may differ" in problems[0]
    assert problems[1:] == ["", problems[0]]


def test_names_of_built_in_algorithms_have_no_fingerprint() -> None:
    for collective in ("all_reduce", "broadcast"):
        for name in algorithms(collective):
            assert trust.name_to_compare(build(collective, name, 4), name) == name
    long = trust.name_to_compare(build("all_reduce", "ring", 4), "x" * 60)
    assert len(long) == trust.LONGEST_NAME
    assert long != trust.name_to_compare(build("all_reduce", "ring", 4), "x" * 61)


def test_a_schedule_without_a_registered_algorithm_has_a_fingerprint() -> None:
    """``bench calibrate`` makes such schedules, and ended with "unknown all_reduce algorithm"."""
    made = dataclasses.replace(build("all_reduce", "ring", 4), algorithm="probe")
    assert trust.without_fingerprint(trust.name_to_compare(made, "probe")) == "probe"
    assert trust.name_to_compare(made, "probe") != "probe"


def test_above_the_limit_only_trusted_algorithms_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 2 ranks in place of 512."""
    for module in (trust, proof_before_use):
        monkeypatch.setattr(module, "MOST_RANKS", 2)
    require_proof = proof_before_use.require_proof
    try:
        register_both()
        require_proof(build("all_reduce", "ring", 3), 0)
        with pytest.raises(ScheduleError, match=r"all_reduce 'star' for 3 ranks is not proved: above 2 ranks"):
            require_proof(build("all_reduce", "star", 3), 0)
        assert cheapest("all_reduce", 3, 4 * COUNT) != "forgetful"
        algorithm("all_reduce", name="star", chunks=1, trust=True)(star)
        require_proof(build("all_reduce", "star", 3), 0)
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
