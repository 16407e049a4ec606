"""Every reduction of every type along every path of the library, against exact numbers (``reductions.py``).

And means of half types, whose sums leave the range of the type.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import span
from reductions import ALL, HALF, NOTHING, Collectives, Op, all_reduce_algorithms, check, shared
from values import bits, noise

import dist_prims
from dist_prims.collectives.flat import cut, split_evenly
from dist_prims.collectives.reduction import fold
from dist_prims.errors import MismatchError
from dist_prims.schedules import algorithms, build, lookup
from dist_prims.schedules.order import order

LIMIT = 110.0  # seconds; a quiet machine takes a tenth of it


def group_of(options: Any) -> Any:
    return dist.new_group(backend="dist_prims", pg_options=options)


@pytest.mark.parametrize(
    ("size", "one_shot"),
    [
        *((2, True), (3, False)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, True), (2, False), (4, True), (4, False))),
    ],
)
def test_on_one_host(size: int, one_shot: bool) -> None:
    """In one shot every rank folds everything. In two each folds a part: of its slots, or of memory that all share."""

    def body() -> None:
        options = dist_prims.BackendOptions(one_shot_bytes=1 << 20 if one_shot else 0, slot_bytes=1 << 16)
        collectives = Collectives(group_of(options), every_factor=size == 4)
        collectives.check(0, 32 * size)
        if not one_shot:
            check(collectives.shared_all_reduce, collectives.group, 32 * size, view_as_real=True)

    dist_prims.spawn(body, size, backend="dist_prims", timeout=LIMIT)


def test_by_a_pinned_schedule() -> None:
    def body() -> None:
        for name in ("ring", "recursive_doubling", "double_tree"):
            collectives = Collectives(group_of(dist_prims.BackendOptions(all_reduce=name)))
            check(collectives.all_reduce, collectives.group, 32, view_as_real=True)
        check(collectives.strided_all_reduce, collectives.group, 32, view_as_real=True)
        check(collectives.direct_all_reduce, collectives.group, 32)
        check(collectives.coalesced_all_reduce, collectives.group, 32)

    dist_prims.spawn(body, 4, backend="dist_prims", timeout=LIMIT)


@pytest.mark.parametrize(
    "layout", ["a b", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a b a", "a b b c"))]
)
def test_across_hosts(layout: str) -> None:
    """As a part of the agreement, up to 1 KB, and by a plan."""

    def body() -> None:
        collectives = Collectives()
        collectives.check(0, 12 * collectives.size)
        check(collectives.all_reduce, None, 1200, view_as_real=True)

    span(layout, body, timeout=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_in_python(size: int) -> None:
    def body() -> None:
        rank = dist.get_rank()

        def all_reduce(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
            dist_prims.all_reduce(tensor, op, algorithm=name, segment_bytes=8)
            return tensor, ALL

        def out_of_place(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
            output, before = tensor.new_empty(len(tensor)), tensor.clone()
            dist_prims.all_reduce(tensor, op, output=output)
            assert bits(tensor) == bits(before)
            return output, ALL

        def reduce(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
            before = tensor.clone()
            dist_prims.reduce(tensor, 1, op)
            assert rank == 1 or bits(tensor) == bits(before)
            return (tensor, ALL) if rank == 1 else (tensor[:0], NOTHING)

        def reduce_scatter(tensor: torch.Tensor, op: Any) -> tuple[torch.Tensor, slice]:
            output = tensor.new_empty(len(tensor) // size)
            dist_prims.reduce_scatter(output, tensor, op)
            return output, slice(rank * len(output), (rank + 1) * len(output))

        for name in ("ring", "direct"):  # noqa: B007 - all_reduce reads it
            check(all_reduce, None, 4 * size, every_factor=size == 4)
        for collective in (out_of_place, reduce, reduce_scatter):
            check(collective, None, 4 * size)
        check(out_of_place, None, 0)

    dist_prims.spawn(body, size, backend="gloo", timeout=LIMIT)


def large(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """So near to the end of the type that the sum of two with one sign is beyond it; the first ones are at the end."""
    generator = torch.Generator().manual_seed(rank)
    found = (0.5 + torch.rand(count, generator=generator).double() / 2) * torch.finfo(dtype).max
    found[: count // 3] = torch.finfo(dtype).max
    found[count // 2 :: 2] *= -1
    return found.to(dtype)


def small(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Below the normal range."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator).double() * 8 * torch.finfo(dtype).smallest_normal / 16).to(dtype)


KINDS = {"noise": noise, "large": large, "small": small}


def mean_step(sums: Sequence[torch.Tensor], terms: Sequence[int], ranks: int) -> torch.Tensor:
    out = torch.empty_like(sums[0])
    fold(Op.AVG, out, sums, terms, ranks)
    return out


def differs(name: str) -> bool:
    """Whether ranks may end with different bits."""
    return lookup("all_reduce", name).replicas != "same"


def expected(name: str, given: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What ``order()`` says of a mean."""
    schedule = build("all_reduce", name, len(given))
    pieces = [cut(each, split_evenly(len(each), schedule.chunks)) for each in given]
    orders = [order(schedule, chunk, rank if differs(name) else None) for chunk in range(schedule.chunks)]
    return torch.cat([each.mean([piece[c] for piece in pieces], mean_step) for c, each in enumerate(orders)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [3, 4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 5, 7))])
def test_means_of_half_types_along_every_schedule(size: int) -> None:
    """They are finite, near to the exact ones, and have the bits that the schedule's order gives, in C++ and Python."""
    count = 203
    cases = [(dtype, *each) for dtype in HALF for each in KINDS.items()]
    if size in (3, 4):
        cases = cases[::2]  # noise and small numbers of one type, large ones of the other

    def body() -> dict[Any, list[int]]:
        rank, found = dist.get_rank(), {}
        gloo = dist.new_group(backend="gloo")
        for name in all_reduce_algorithms(size):
            group = group_of(dist_prims.BackendOptions(all_reduce=name))
            for dtype, kind, make in cases:
                given = [make(each, dtype, count) for each in range(size)]
                native, python = given[rank].clone(), given[rank].clone()
                dist.all_reduce(native, Op.AVG, group)
                dist_prims.all_reduce(python, Op.AVG, gloo, algorithm=name)
                want, what = expected(name, given, rank), (name, dtype, kind)
                assert bits(native) == bits(want), what
                assert bits(python) == bits(want), what
                exact = torch.stack([each.double() for each in given]).mean(0)
                largest = torch.stack([each.double().abs() for each in given]).max(0).values
                step = torch.finfo(dtype).eps * largest.clamp(min=torch.finfo(dtype).smallest_normal)
                assert ((native.double() - exact).abs() <= size * step).all(), what
                if not differs(name):
                    found[what] = bits(native)
            dist.destroy_process_group(group)
        return found

    first, *others = dist_prims.spawn(body, size, backend="dist_prims", timeout=LIMIT)
    assert all(each == first for each in others)


def test_the_order_of_a_mean_in_numpy() -> None:
    for size in (2, 3, 5, 7):
        for name in ("ring", "direct", "double_tree"):
            for make in KINDS.values():
                given = [make(rank, torch.float16, 3).numpy() for rank in range(size)]
                tensors = [torch.from_numpy(each) for each in given]
                plan = order(build("all_reduce", name, size), 0)
                assert plan.mean(given).tobytes() == plan.mean(tensors, mean_step).numpy().tobytes()
                wide = [each.astype(np.float32) for each in given]
                assert plan.mean(wide).tobytes() == (plan.evaluate(wide) / np.float32(size)).tobytes()


@pytest.mark.parametrize("size", [2, 5])
def test_means_of_half_types_are_rounded_once_on_one_host(size: int) -> None:
    """Small or large, in shared memory or not: added in float32 in the order of ranks, divided there, then rounded."""

    def body() -> None:
        rank = dist.get_rank()
        for dtype, make in ((dtype, make) for dtype in HALF for make in KINDS.values()):
            for count in (7, 60_001):
                given = [make(each, dtype, count) for each in range(size)]
                total = given[0].double()
                for each in given[1:]:  # as float32 adds, but that the sum of bfloat16 may be larger
                    total = (total / 8 + each.double() / 8).float().double() * 8
                want = (total / size).float().to(dtype)
                for tensor in (given[rank].clone(), shared(given[rank])):
                    dist.all_reduce(tensor, Op.AVG)
                    assert bits(tensor) == bits(want), (dtype, make, count)

    dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("layout", ["a b", "a b a c b"])
def test_means_of_half_types_across_hosts(layout: str) -> None:
    size = len(layout.split())

    def body() -> list[list[int]]:
        found = []
        for dtype, make in ((dtype, make) for dtype in HALF for make in KINDS.values()):
            for count in (100, 3001):
                given = [make(each, dtype, count) for each in range(size)]
                tensor = given[dist.get_rank()].clone()
                dist.all_reduce(tensor, Op.AVG)
                exact = torch.stack([each.double() for each in given]).mean(0)
                largest = torch.stack([each.double().abs() for each in given]).max(0).values
                step = torch.finfo(dtype).eps * largest.clamp(min=torch.finfo(dtype).smallest_normal)
                assert ((tensor.double() - exact).abs() <= size * step).all(), (dtype, make, count)
                found.append(bits(tensor))
        return found

    first, *others = span(layout, body)
    assert all(each == first for each in others)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_means_of_the_largest_number_are_finite_whatever_the_schedule(collective: str) -> None:
    """Here without ranks, up to 65 of them: no step gives more for less, so other means are finite as well."""
    largest = {dtype: torch.full((1,), torch.finfo(dtype).max, dtype=dtype) for dtype in HALF}
    for name in algorithms(collective):
        for size in (2, 3, 7, 17, 32, 65):
            try:
                schedule = build(collective, name, size)
            except ValueError:
                continue  # of powers of two only
            rank = 0
            chunk = schedule.contract.end(rank).chunk[0]
            for value in largest.values():
                assert order(schedule, int(chunk), rank).mean([value] * size, mean_step).isfinite().all(), (name, size)


def test_factors_that_are_refused_say_why() -> None:
    def body() -> None:
        whole, real = torch.ones(3, dtype=torch.int8), torch.ones(3)
        for reduce in (dist.all_reduce, dist_prims.all_reduce):
            for factor, tensor, words in (
                (0.5, whole, r"cannot multiply (torch\.)?int8 by 0.5, which that type does not hold; convert"),
                (128.0, whole, r"cannot multiply (torch\.)?int8 by 128"),
                (torch.tensor(1j), real, "give a .*real number"),
            ):
                with pytest.raises(ValueError, match=words):
                    reduce(tensor, dist._make_nccl_premul_sum(factor))
        with pytest.raises(ValueError, match="PREMUL_SUM has no factor"):
            dist_prims.all_reduce(real, Op.PREMUL_SUM)
        with pytest.raises(ValueError, match="AVG cannot reduce bool"):
            dist.all_reduce(torch.ones(3).bool(), Op.AVG)
        with pytest.raises(ValueError, match="AVG and PREMUL_SUM are not supported by scan"):
            dist_prims.scan(real, Op.AVG)
        dist.all_reduce(real)
        assert real.tolist() == [2.0] * 3

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_each_rank_has_a_factor_of_its_own_but_all_must_have_one(backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        reduces: list[Any] = [functools.partial(dist_prims.all_reduce, algorithm=name) for name in ("cheapest", "ring")]
        reduces += [dist.all_reduce, dist_prims.all_reduce] if backend == "dist_prims" else []
        for reduce in reduces:
            tensor = torch.ones(3)
            reduce(tensor, dist._make_nccl_premul_sum(rank + 2.0))
            assert tensor.tolist() == [5.0] * 3
            with pytest.raises(MismatchError, match=r"all_reduce.*PREMUL_SUM"):
                reduce(torch.ones(3), dist._make_nccl_premul_sum(2.0) if rank else Op.SUM)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)
