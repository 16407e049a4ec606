"""Conformance: every registered algorithm of every collective does, at awkward sizes and counts, what its name says.

The expected values are closed forms: rank r holds ``1000 * r + 3 * i`` at place i, and ranks 0..n-1 sum to
``1000 * n(n-1)/2 + 3 * i * n``. All cases of a group run in one spawn.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import needs_unsorted_groups
from values import COMPLEX, FLOAT8, FLOATS, INTEGERS, Op, equal, held, noise, summed

import dist_prims
from dist_prims.collectives.channel import Channel
from dist_prims.collectives.flat import cut, split_evenly
from dist_prims.collectives.queue import queue_of
from dist_prims.collectives.reduction import fold
from dist_prims.schedules import Step, algorithm, algorithms, build, lookup, unregister
from dist_prims.schedules.contract import COLLECTIVES
from dist_prims.schedules.order import order

SIZES = [1, 2, 3, 4, pytest.param(7, marks=pytest.mark.slow)]
COUNTS = [0, 1, 13, 1031]


def check_all_reduce(count: int, rank: int, size: int, **options: Any) -> None:
    tensor = held(rank, count)
    dist_prims.all_reduce(tensor, **options)
    equal(tensor, summed(size, count), ("in place", count, options))
    tensor, output = held(rank, count), torch.full((count,), -1)
    dist_prims.all_reduce(tensor, output=output, **options)
    equal(output, summed(size, count), ("out of place", count, options))
    equal(tensor, held(rank, count), ("input", count, options))


def check_reduce_scatter(count: int, rank: int, size: int, **options: Any) -> None:
    whole = held(rank, count * size)
    expected = summed(size, count * size)[rank * count : (rank + 1) * count]
    for data in (whole, list(whole.clone().split(count) if count else [whole] * size)):
        output = torch.full((count,), -1)
        dist_prims.reduce_scatter(output, data, **options)
        equal(output, expected, (count, options))
        equal(torch.cat([*data]) if isinstance(data, list) else data, held(rank, count * size), "input")
    output = whole[rank * count : (rank + 1) * count]
    dist_prims.reduce_scatter(output, whole, **options)
    equal(output, expected, ("in place", count, options))
    lengths = [(3 * r + count) % 8 for r in range(size)]  # uneven, some empty
    blocks = [held(rank, length) for length in lengths]
    output = torch.full((lengths[rank],), -1)
    dist_prims.reduce_scatter(output, blocks, **options)
    equal(output, summed(size, lengths[rank]), ("uneven", lengths, options))
    for block, length in zip(blocks, lengths, strict=True):
        equal(block, held(rank, length), ("uneven input", lengths, options))


def check_all_gather(count: int, rank: int, size: int, **options: Any) -> None:
    expected = torch.cat([held(r, count) for r in range(size)])
    mine, output = held(rank, count), torch.full((count * size,), -1)
    dist_prims.all_gather(output, mine, **options)
    equal(output, expected, (count, options))
    equal(mine, held(rank, count), "input")
    output = torch.full((count * size,), -1)
    output[rank * count : (rank + 1) * count] = mine
    dist_prims.all_gather(output, output[rank * count : (rank + 1) * count], **options)
    equal(output, expected, ("in place", count, options))
    lengths = [(3 * r + count) % 8 for r in range(size)]
    blocks = [torch.full((length,), -1) for length in lengths]
    dist_prims.all_gather(blocks, held(rank, lengths[rank]), **options)
    for r, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
        equal(block, held(r, length), ("uneven", lengths, r, options))


def roots(size: int) -> list[int]:
    """All ranks of a small group."""
    return [*range(size)] if size < 4 else [1, size - 1]


def check_broadcast(count: int, rank: int, size: int, **options: Any) -> None:
    for root in roots(size):
        tensor = held(rank, count)
        dist_prims.broadcast(tensor, src=root, **options)
        equal(tensor, held(root, count), (root, count, options))


def check_reduce(count: int, rank: int, size: int, **options: Any) -> None:
    for root in roots(size):
        tensor = held(rank, count)
        dist_prims.reduce(tensor, dst=root, **options)
        equal(tensor, summed(size, count) if rank == root else held(rank, count), (root, count, options))
        tensor, output = held(rank, count), torch.full((count,), -1)
        dist_prims.reduce(tensor, dst=root, output=output if rank == root else None, **options)
        equal(tensor, held(rank, count), ("input", root, count, options))
        if rank == root:
            equal(output, summed(size, count), ("out of place", root, count, options))


def check_gather(count: int, rank: int, size: int, **options: Any) -> None:
    for root in roots(size):
        parts = [torch.full((count,), -1) for _ in range(size)] if rank == root else None
        mine = held(rank, count)
        dist_prims.gather(mine, parts, dst=root, **options)
        equal(mine, held(rank, count), "input")
        for r, part in enumerate(parts or ()):
            equal(part, held(r, count), (root, r, count, options))


def check_scatter(count: int, rank: int, size: int, **options: Any) -> None:
    for root in roots(size):
        parts = [held(10 * r + root, count) for r in range(size)] if rank == root else None
        mine = torch.full((count,), -1)
        dist_prims.scatter(mine, parts, src=root, **options)
        equal(mine, held(10 * rank + root, count), (root, count, options))
        for r, part in enumerate(parts or ()):
            equal(part, held(10 * r + root, count), "input")


def check_all_to_all(count: int, rank: int, size: int, **options: Any) -> None:
    sent = torch.cat([held(10 * rank + peer, count) for peer in range(size)])
    kept, output = sent.clone(), torch.full((count * size,), -1)
    dist_prims.all_to_all(output, sent, **options)
    equal(output, torch.cat([held(10 * peer + rank, count) for peer in range(size)]), (count, options))
    equal(sent, kept, "input")
    if options.get("algorithm") in ("bruck", "hierarchical"):
        return
    length = lambda src, dst: (src + 2 * dst + count) % 5  # noqa: E731
    blocks = [held(10 * rank + peer, length(rank, peer)) for peer in range(size)]
    expected = [held(10 * peer + rank, length(peer, rank)) for peer in range(size)]
    received = [torch.full_like(block, -1) for block in expected]
    dist_prims.all_to_all(received, blocks, **options)
    equal(torch.cat(received), torch.cat(expected), ("lists", count, options))
    output = torch.full((sum(map(len, expected)), 2), -1)
    rows = torch.cat(blocks)[:, None].repeat(1, 2)
    dist_prims.all_to_all(output, rows, [*map(len, expected)], [*map(len, blocks)], **options)
    equal(output, torch.cat(expected)[:, None].repeat(1, 2), ("splits of rows", count, options))


def check_barrier(count: int, rank: int, size: int, **options: Any) -> None:
    assert dist_prims.barrier(**options) is None


def check_scan(count: int, rank: int, size: int, **options: Any) -> None:
    tensor = held(rank, count)
    dist_prims.scan(tensor, **options)
    equal(tensor, summed(rank + 1, count), (count, options))


def check_exclusive_scan(count: int, rank: int, size: int, **options: Any) -> None:
    tensor = held(rank, count)
    dist_prims.scan(tensor, exclusive=True, **options)
    equal(tensor, summed(rank, count) if rank else held(0, count), (count, options))


def counts_for(size: int) -> list[int]:
    """All lengths on 1, 3 and 7 ranks, and some on 2 and on 4."""
    return {2: [0, 13], 4: [1031]}.get(size, COUNTS)


CHECKS: dict[str, Callable[..., None]] = {name: globals()[f"check_{name}"] for name in COLLECTIVES}


def ways(collective: str) -> list[dict[str, Any]]:
    """Without an algorithm, by price, and by each name."""
    return [{}, *({"algorithm": name} for name in ("cheapest", *algorithms(collective)))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_on_the_backend(size: int) -> None:
    """Most are C++ there. The same calls as asynchronous ones, which end in copies where the tensors have gaps."""

    def body() -> None:
        for collective in COLLECTIVES:
            for how, count in itertools.product(ways(collective), counts_for(size)):
                CHECKS[collective](count, dist.get_rank(), size, **how)
        for how in ways("all_reduce"):
            tensor, output = held(dist.get_rank(), 26)[::2], torch.zeros(26, dtype=torch.int64)[::2]
            expected: Any = sum(held(r, 26)[::2] for r in range(size))
            works = [
                dist_prims.all_reduce(tensor, output=output, async_op=True, **how),
                dist_prims.all_reduce(tensor, async_op=True, **how),
            ]
            for work in works:
                assert work.wait()
                assert work.is_completed()
            equal(tensor, expected, how)
            equal(output, expected, how)

    dist_prims.spawn(body, size, backend="dist_prims", timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_whole_and_in_segments(size: int) -> None:
    def body() -> None:
        for collective, check in CHECKS.items():
            for how, count in itertools.product(ways(collective), counts_for(size)):
                check(count, dist.get_rank(), size, **how)
            for name, (segment_bytes, count) in itertools.product(algorithms(collective), ((1, 13), (64, 40))):
                check(count, dist.get_rank(), size, algorithm=name, segment_bytes=segment_bytes)

    dist_prims.spawn(body, size, backend="gloo", timeout=100)


def test_hierarchies_of_any_inner_and_outer_algorithm_add() -> None:
    """Three pairs of an inner and an outer algorithm for each division into hosts, so that all nine pairs occur."""

    def body() -> None:
        for number, hosts in enumerate(["1,3", "2,2", "2,1,1", "3,1"]):
            for at, inner in enumerate(["ring", "direct", "pat"]):
                outer = ["ring", "swing", "recursive_doubling"][(at + number) % 3]
                for count in (1, 13, 1031):
                    name = f"hierarchical(hosts={hosts},inner={inner},outer={outer})"
                    check_all_reduce(count, dist.get_rank(), 4, algorithm=name)

    dist_prims.spawn(body, 4, backend="gloo", timeout=60)


def test_every_type_moves() -> None:
    """By two algorithms of each collective, the next two for the next type."""
    size = 3

    def body() -> None:
        rank = dist.get_rank()
        for number, dtype in enumerate([*INTEGERS, *FLOATS, *COMPLEX, torch.bool, *FLOAT8]):
            two_of = lambda collective, n=number: (algorithms(collective) * 2)[n % len(algorithms(collective)) :][:2]  # noqa: E731
            hold = lambda r, dtype=dtype: ((torch.arange(12) + r) % 2).to(dtype)  # noqa: E731
            same = lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # noqa: E731
            for name in two_of("broadcast"):
                tensor = hold(rank)
                dist_prims.broadcast(tensor, src=1, algorithm=name)
                assert same(tensor, hold(1)), (dtype, name)
            for name in two_of("all_gather"):
                blocks = [torch.zeros(12, dtype=dtype) for _ in range(size)]
                dist_prims.all_gather(blocks, hold(rank), algorithm=name)
                assert all(same(block, hold(r)) for r, block in enumerate(blocks)), (dtype, name)
            for name in two_of("all_to_all"):
                output = torch.zeros(12, dtype=dtype)
                dist_prims.all_to_all(output, hold(rank), algorithm=name)
                piece = 12 // size
                expected = torch.cat([hold(r)[rank * piece : (rank + 1) * piece] for r in range(size)])
                assert same(output, expected), (dtype, name)

    dist_prims.spawn(body, size, backend="gloo", timeout=60)


BACKENDS = ["gloo", "dist_prims"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_every_shape(backend: str) -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        scalar = torch.tensor(rank + 1)
        dist_prims.all_reduce(scalar)
        equal(scalar, torch.tensor(6), "a scalar")

        base = torch.full((6, 5), -7)
        column = base[::2, 1]  # every other row of one column
        column.fill_(rank)
        dist_prims.all_reduce(column)
        expected = torch.full((6, 5), -7)
        expected[::2, 1] = 3
        equal(base, expected, "only the strided elements change")

        transposed = held(rank, 12).view(3, 4).t()
        output = torch.zeros(3, 4, dtype=torch.int64).t()
        dist_prims.all_reduce(transposed, output=output)
        equal(output, summed(size, 12).view(3, 4).t(), "strided output")
        equal(transposed, held(rank, 12).view(3, 4).t(), "strided input")

        strided = torch.zeros(2 * size, dtype=torch.int64)[::2]
        dist_prims.all_gather(strided, torch.tensor([rank]))
        equal(strided, torch.arange(size), "strided output of all_gather")
        for turn in (dist_prims.broadcast, dist_prims.reduce):
            wide = torch.full((4, 2), rank + 1)
            turn(wide[:, 0], 1)
            changed = 2 if turn is dist_prims.broadcast else 6 if rank == 1 else rank + 1
            equal(wide, torch.tensor([[changed, rank + 1]] * 4), turn.__name__)

        leaf = torch.full((5,), float(rank), requires_grad=True)
        dist_prims.all_reduce(leaf)
        assert leaf.tolist() == [3.0] * 5
        assert (leaf.requires_grad, leaf.is_leaf) == (True, True)

        with torch.inference_mode():
            inferred = torch.full((3, 2), rank).t()
        dist_prims.all_reduce(inferred, algorithm="ring")
        equal(inferred, torch.full((2, 3), 3), "made in inference mode, written outside of it")
        # An expanded output is refused before anything is sent; it failed at the end.
        with pytest.raises(ValueError, match="several elements of the tensor lie in one place"):
            dist_prims.all_reduce(torch.ones(1).expand(4), algorithm="ring")

        number = torch.tensor([1 + 2j * rank, 3 - 1j * rank])
        conjugate = number.conj()
        assert conjugate.is_conj()  # a view with a flag, not the bytes that it stands for
        dist_prims.all_reduce(conjugate)
        equal(conjugate.resolve_conj(), torch.tensor([3 - 6j, 9 + 3j]), "conjugate view")
        gathered = torch.zeros(2 * size, dtype=number.dtype)
        dist_prims.all_gather(gathered, torch.tensor([1j * rank, 1]).conj())
        equal(gathered, torch.tensor([[-1j * r, 1] for r in range(size)]).flatten(), "conjugate input")

    dist_prims.spawn(body, 3, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_some_ranks(backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        even, odd = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
        mine, members = (even, [0, 2, 4]) if rank % 2 == 0 else (odd, [1, 3])
        for name in algorithms("all_reduce"):  # both groups at once
            tensor = held(rank, 13)
            dist_prims.all_reduce(tensor, group=mine, algorithm=name)
            expected: Any = sum(held(r, 13) for r in members)
            equal(tensor, expected, (members, name))
        for root in members:
            tensor = held(rank, 13)
            dist_prims.broadcast(tensor, src=root, group=mine)
            equal(tensor, held(root, 13), (members, "root is a rank of the default group"))
        tensor = held(rank, 13)
        dist_prims.all_reduce(tensor)
        equal(tensor, summed(5, 13), "and the default group")

    dist_prims.spawn(body, 5, backend=backend, timeout=60)


@needs_unsorted_groups
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_whose_ranks_are_not_sorted(backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        backwards = dist.new_group([3, 1, 0], sort_ranks=False) if rank in (0, 1, 3) else None
        if backwards is not None:
            output = torch.zeros(3, dtype=torch.int64)
            dist_prims.all_gather(output, torch.tensor([rank]), group=backwards)
            assert output.tolist() == dist.get_process_group_ranks(backwards)
            tensor = held(rank, 13)
            dist_prims.broadcast(tensor, src=3, group=backwards)
            equal(tensor, held(3, 13), "root is a rank of the default group")

    dist_prims.spawn(body, 4, backend=backend, timeout=60)


HALVES = [torch.float32, torch.float16, torch.bfloat16]
REDUCING = ["all_reduce", "reduce_scatter", "reduce", "scan"]


def reduced(collective: str, name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    if collective == "reduce_scatter":
        output = torch.empty(len(tensor) // size, dtype=tensor.dtype)
        dist_prims.reduce_scatter(output, tensor, algorithm=name)
        return output
    getattr(dist_prims, collective)(tensor, algorithm=name)
    return tensor


def add(addends: Any) -> torch.Tensor:
    out = torch.empty_like(addends[0])
    fold(Op.SUM, out, addends)
    return out


def predicted(collective: str, name: str, dtype: torch.dtype, size: int, count: int, rank: int) -> torch.Tensor:
    """What ``order`` says that a rank ends with."""
    schedule = build(collective, name, size)
    pieces = [cut(noise(r, dtype, count), split_evenly(count, schedule.chunks)) for r in range(size)]
    differs = collective == "scan" or lookup(collective, name).replicas != "same"
    chunks = schedule.contract.end(rank).chunk.tolist()
    sums = [order(schedule, c, rank if differs else None).evaluate([piece[c] for piece in pieces], add) for c in chunks]
    return torch.cat(sums) if sums else noise(rank, dtype, count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        *(("gloo", 3), ("dist_prims", 4)),
        *(pytest.param("gloo", n, marks=pytest.mark.slow) for n in (2, 4, 7)),
        pytest.param("dist_prims", 3, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_the_order(backend: str, size: int) -> None:
    cases = [(c, n, d) for c in REDUCING for n in algorithms(c) for d in HALVES]
    counts = {case: 2 * build(*case[:2], size).chunks + (1 if case[0] != "reduce_scatter" else 0) for case in cases}

    def body() -> list[torch.Tensor]:
        rank = dist.get_rank()
        return [reduced(c, n, noise(rank, d, counts[c, n, d]), size).view(torch.uint8) for c, n, d in cases]

    for rank, results in enumerate(dist_prims.spawn(body, size, backend=backend, timeout=60)):
        for case, result in zip(cases, results, strict=True):
            expected = predicted(*case, size, counts[case], rank).view(torch.uint8)
            assert torch.equal(result, expected), (case, rank)


def test_an_algorithm_of_your_own() -> None:
    def body() -> None:
        rank = dist.get_rank()

        @algorithm("all_reduce", name="mine", chunks=1)
        def collect_and_tell(size: int) -> Any:
            yield Step(src=range(1, size), dst=0, chunk=0, reduce=True)
            yield Step(src=0, dst=range(1, size), chunk=0)

        check_all_reduce(13, rank, 3, algorithm="mine")

        @algorithm("all_reduce", name="mine", chunks=1)  # edited and run again, as in a notebook
        def one_after_the_other(size: int) -> Any:
            for peer in range(1, size):
                yield Step(src=peer, dst=0, chunk=0, reduce=True)
            yield Step(src=0, dst=range(1, size), chunk=0)

        tensor = torch.tensor([1.0, 2.0**-24, 2.0**-24][rank])
        dist_prims.all_reduce(tensor, algorithm="mine")
        assert tensor == 1.0  # (r0+r1)+r2
        tensor = torch.ones(100000)
        dist_prims.all_reduce(tensor)  # the choice by cost is among what comes with a card
        assert tensor.eq(3).all()
        unregister("all_reduce", "mine")

    dist_prims.spawn(body, 3, backend="gloo", timeout=60)


def a_scan_in_chunks(size: int) -> Any:
    """Rank r - 1 sends chunk after chunk to rank r: a pipeline."""
    for now in range(size + 1):
        src = [r for r in range(size - 1) if 0 <= now - r < 3]
        yield Step(src, [r + 1 for r in src], [now - r for r in src], reduce=True)


def an_all_to_all_in_halves(size: int) -> Any:
    """Every block in two messages, first the first halves; each rank's own block stays on it."""
    src, dst = (rank.ravel() for rank in np.divmod(np.arange(size * size), size))
    for half in range(2):
        yield Step(src, dst, 2 * dst + half, into=2 * size + 2 * src + half)


@pytest.mark.parametrize("size", [1, 3])
def test_scans_and_all_to_alls_in_several_chunks(size: int) -> None:
    """Once only the first chunk of a scan was promised, and only one chunk of a block."""

    def rank_main() -> None:
        algorithm("scan", name="in chunks", chunks=3)(a_scan_in_chunks)
        algorithm("all_to_all", name="in halves", chunks=lambda size: 2 * size)(an_all_to_all_in_halves)
        for count in COUNTS:
            check_scan(count, dist.get_rank(), size, algorithm="in chunks")
            tensor = held(dist.get_rank(), count * size)
            output = torch.full_like(tensor, -1)
            dist_prims.all_to_all(output, tensor, algorithm="in halves")
            expected = [held(r, count * size).reshape(size, count)[dist.get_rank()] for r in range(size)]
            equal(output, torch.cat(expected), ("all_to_all in halves", count))

    dist_prims.spawn(rank_main, size, backend="gloo", timeout=120)


def tags_of_calls(first: int) -> list[int]:
    """The tags of the data of 6 calls, the first of which has this number."""
    tags = set()
    start = Channel.start

    def noted(self: Channel, sends: Any, receives: Any) -> Any:
        tags.add(self._tag)
        return start(self, sends, receives)

    Channel.start = noted  # type: ignore[method-assign]
    queue = queue_of(dist.group.WORLD)
    queue._called = queue._done = first
    for count in range(1, 7):
        tensor = held(dist.get_rank(), count)
        work = dist_prims.all_reduce(tensor, algorithm="ring", async_op=count % 2 == 0)
        if work is not None:
            work.wait()
        equal(tensor, summed(dist.get_world_size(), count), count)
    return sorted(tags)


@pytest.mark.parametrize("first", [2**12 - 3, 2**32 - 3])
def test_tags_of_calls_wrap(first: int) -> None:
    """Every MPI supports tags up to 32,767."""
    for tags in dist_prims.spawn(tags_of_calls, 3, (first,), backend="gloo", timeout=60):
        assert len(tags) == 1 + 6  # the agreement has one
        assert tags[-1] <= 32_767
        assert tags[1] == tags[0] + 1, "the first tag of data is used again"


def test_the_cheapest_algorithm_is_the_same_on_a_rank_that_has_imported_others_first() -> None:
    """The calls of such a rank raised MismatchError, because it chose ring where the other rank chose bine."""
    program = """
import dist_prims, torch, torch.distributed
def body():
    if torch.distributed.get_rank() == 1:
        from dist_prims.schedules.algorithms import ring
    gathered = torch.zeros(2)
    dist_prims.all_gather(gathered, torch.ones(1), algorithm="cheapest")
    dist_prims.all_reduce(tensor := torch.ones(1 << 22), algorithm="cheapest")
    return gathered.tolist(), tensor.eq(2).all().item()
print(dist_prims.spawn(body, 2, backend="gloo", timeout=60))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == str([([1.0, 1.0], True)] * 2), done.stderr
