"""Pinned schedules of every collective, on one host and on several: results, roots, segments, lengths and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pinning import pin, run
from ranks import backend_of
from values import bits, equal, noise

import dist_prims
from dist_prims.backend.options import PINNABLE
from dist_prims.errors import MismatchError
from dist_prims.launch import RankFailedError
from dist_prims.schedules import ScheduleError, Step, algorithm, algorithms, build, unregister
from dist_prims.schedules.contract import ROOTED

BackendOptions = dist_prims.BackendOptions
# Some layouts of hosts have no schedule that is hierarchical: hosts of 3 and 1 ranks, and one rank on each.
LAYOUTS = [
    *("a", "a a a", "a b a b"),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in ("a a", "a a a a", "a a a a a a a", "a a a b", "a a b b", "a b c")
    ),
]


def possible(collective: str, size: int, hosts: tuple[int, ...]) -> Iterator[str]:
    """The algorithms for so many ranks: some are for powers of two, or for hosts with equally many ranks."""
    for name in algorithms(collective):
        shape = {"hosts": hosts} if name == "hierarchical" and len(hosts) > 1 else {}
        try:
            build(collective, name, size, **shape)
        except ValueError:
            continue
        yield name


def every_collective(count: int, dtype: torch.dtype, group: Any = None) -> None:
    """All collectives on small whole numbers, which every dtype adds exactly."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def mine(of: int) -> torch.Tensor:
        return (torch.arange(count) % 5 + of).to(dtype)

    def blank() -> torch.Tensor:
        return torch.full((count,), 99).to(dtype)

    total = sum(mine(peer).double() for peer in range(size)).to(dtype)  # type: ignore[union-attr]
    tensor = mine(rank)
    dist.all_reduce(tensor, group=group)
    equal(tensor, total, ("all_reduce", count, dtype))
    blocks = [blank() for _ in range(size)]
    dist.all_gather(blocks, mine(rank), group=group)
    equal(torch.cat(blocks), torch.cat([mine(peer) for peer in range(size)]), ("all_gather", count, dtype))
    output = blank()
    dist.reduce_scatter(output, [mine(rank) for _ in range(size)], group=group)
    equal(output, total, ("reduce_scatter", count, dtype))
    blocks = [blank() for _ in range(size)]
    dist.all_to_all(blocks, [mine(rank * size + peer) for peer in range(size)], group=group)
    equal(torch.cat(blocks), torch.cat([mine(peer * size + rank) for peer in range(size)]), ("all_to_all", count))
    for root in range(size):
        what, is_root = (count, dtype, root), rank == root
        tensor = mine(rank)
        dist.broadcast(tensor, group=group, group_src=root)
        equal(tensor, mine(root), ("broadcast", *what))
        tensor = mine(rank)
        dist.reduce(tensor, group=group, group_dst=root)
        equal(tensor, total if is_root else mine(rank), ("reduce", *what))
        parts = [blank() for _ in range(size)] if is_root else None
        dist.gather(mine(rank), parts, group=group, group_dst=root)
        if parts:
            equal(torch.cat(parts), torch.cat([mine(peer) for peer in range(size)]), ("gather", *what))
        output = blank()
        given = [mine(peer + root) for peer in range(size)] if is_root else None
        dist.scatter(output, given, group=group, group_src=root)
        equal(output, mine(rank + root), ("scatter", *what))
    dist.barrier(group=group)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_algorithm_of_every_collective(layout: str) -> None:
    """Each is pinned once, uncut or in segments; one group runs all of them."""
    names = layout.split()
    size, hosts = len(names), tuple(names.count(each) for each in dict.fromkeys(names))
    known = {collective: list(possible(collective, size, hosts)) for collective in PINNABLE}
    rounds = max(map(len, known.values()))
    cases = itertools.cycle(itertools.product((0, 1, 5, 1031), (torch.float32, torch.bfloat16, torch.int32)))

    def body() -> None:
        for number in range(rounds):
            segments = "" if number % 2 else f" x{number + 2}"
            chosen = {each: known[each][number % len(known[each])] for each in PINNABLE}
            pin(**{collective: name + segments for collective, name in chosen.items()})
            for collective, name in chosen.items():
                found = backend_of().algorithm(64, collective, size - 1 if collective in ROOTED else -1)
                assert found.startswith(name), (found, name)
                assert found.endswith(segments) or "~" in found, (found, segments)
            for count, dtype in itertools.islice(cases, 2):
                every_collective(count, dtype)

    run(layout, body)


def silent(size: int, **_: Any) -> Iterator[Step]:
    yield from ()


@pytest.mark.parametrize("layout", ["a a a", "a b"])
def test_the_pinned_schedule_is_what_runs(layout: str) -> None:
    """A schedule that sends nothing, and is trusted, leaves all data where it is."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        last = size - 1
        for collective in PINNABLE:
            more = {"root": 0} if collective in ROOTED else {}
            made: Any = (lambda size, root=0: silent(size)) if more else (lambda size: silent(size))
            algorithm(collective, name="silent", trust=True, replicas="may differ")(made)  # never chosen by price
        pinned: dict[str, Any] = dict.fromkeys(PINNABLE, "silent:0-1K")
        group = dist.new_group(pg_options=BackendOptions(**pinned))
        for count in (3, 5000):  # pinned and not
            is_pinned = count == 3

            def unless_pinned(found: torch.Tensor, expected: torch.Tensor, what: str, pinned: bool = is_pinned) -> None:
                assert torch.equal(found, expected) != pinned, what

            tensor = torch.ones(count)
            dist.all_reduce(tensor, group=group)
            unless_pinned(tensor, torch.full((count,), float(size)), "all_reduce")
            blocks, ones = torch.zeros(size, count), torch.ones(size, count)
            dist.all_gather(list(blocks), ones[0], group=group)
            unless_pinned(blocks, ones, "all_gather")
            blocks = torch.zeros(size, count)
            dist.all_to_all(list(blocks), list(ones), group=group)
            unless_pinned(blocks, ones, "all_to_all")
            output = torch.zeros(count)
            dist.reduce_scatter(output, list(ones), group=group)
            unless_pinned(output, torch.full((count,), float(size)), "reduce_scatter")
            tensor = torch.full((count,), float(rank == last))
            dist.broadcast(tensor, last, group=group)
            if rank != last:
                unless_pinned(tensor, ones[0], "broadcast")
            tensor = torch.ones(count)
            dist.reduce(tensor, last, group=group)
            blocks = torch.zeros(size, count)
            dist.gather(ones[0], list(blocks) if rank == last else None, last, group=group)
            if rank == last:
                unless_pinned(tensor, torch.full((count,), float(size)), "reduce")
                unless_pinned(blocks, ones, "gather")
            output = torch.zeros(count)
            dist.scatter(output, list(ones) if rank == last else None, last, group=group)
            if rank != last:
                unless_pinned(output, ones[0], "scatter")

    run(layout, body)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["a a a a", "a a b b"])
def test_segments_do_not_change_the_bits(layout: str) -> None:
    """Of algorithms that add every element in the same order, wherever it lies in the data."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        found: list[list[Any]] = []
        for segments in ("", " x2", " x7", " x130"):
            pin(
                all_reduce="recursive_doubling" + segments,
                reduce="binomial" + segments,
                reduce_scatter="ring" + segments,
            )
            results = []
            for count, dtype in ((5, torch.float32), (4099, torch.float32), (4099, torch.bfloat16)):
                tensor = noise(rank, dtype, count)
                dist.all_reduce(tensor)
                results.append(bits(tensor))
                tensor = noise(rank, dtype, count)
                dist.reduce(tensor, 1)
                results.append(bits(tensor))
                output = torch.empty(count, dtype=dtype)
                dist.reduce_scatter(output, [noise(rank + peer, dtype, count) for peer in range(size)])
                results.append(bits(output))
            found.append(results)
        assert all(each == found[0] for each in found)

    run(layout, body)


@pytest.mark.parametrize("layout", ["a a", "a b"])
def test_ranks_that_pin_different_schedules_are_named(layout: str) -> None:
    pins = {
        "all_reduce": ("ring", "swing"),
        "reduce_scatter": ("ring x2", "ring x3"),
        "all_gather": ("ring x3", ""),
        "broadcast": ("chain(chunks=2)", "chain(chunks=3)"),
        "reduce": ("chain", "binomial"),
        "gather": ("binomial", "direct"),
        "scatter": ("", "binomial x2"),
        "all_to_all": ("bruck:1K-max", "pairwise"),
        "barrier": ("dissemination", ""),
    }
    assert set(pins) == set(PINNABLE)

    def body() -> None:
        rank, two = dist.get_rank(), lambda: [torch.ones(512) for _ in range(2)]
        pinned: dict[str, Any] = {each: names[rank] for each, names in pins.items()}
        group = dist.new_group(pg_options=BackendOptions(**pinned))
        root: dict[str, Any] = {"group": group}
        calls = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(512), **root),
            "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(512), two(), **root),
            "all_gather": lambda: dist.all_gather(two(), torch.ones(512), **root),
            "broadcast": lambda: dist.broadcast(torch.ones(512), 1, **root),
            "reduce": lambda: dist.reduce(torch.ones(512), 1, **root),
            "gather": lambda: dist.gather(torch.ones(512), two() if rank else None, 1, **root),
            "scatter": lambda: dist.scatter(torch.ones(512), two() if rank else None, 1, **root),
            "all_to_all": lambda: dist.all_to_all(two(), two(), **root),
            "barrier": lambda: dist.barrier(**root),
        }
        for collective, call in calls.items():
            with pytest.raises(MismatchError) as caught:
                call()
            for name in filter(None, pins[collective]):
                algorithm, _, parameter = name.partition("(")
                assert f"by {algorithm}" in str(caught.value), (collective, caught.value)
                assert parameter in str(caught.value)

    run(layout, body)


def test_options_the_environment_and_groups_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option of the group counts before the environment, and a split group inherits the options."""
    monkeypatch.setenv("DIST_PRIMS_ALL_GATHER", "bruck:1K-max")
    monkeypatch.setenv("DIST_PRIMS_SCATTER", "binomial")

    def body() -> None:
        rank, world = dist.get_rank(), dist.group.WORLD
        options = BackendOptions("ring", scatter="direct x2", all_to_all="pairwise:0-4K;bruck:4K-max")
        group = dist.new_group(pg_options=options)
        half = group.split_group([2, 1], group_name="half") if rank in (1, 2) else None
        for each, is_given in ((world, False), (group, True), (half, True)):
            if each is None:
                continue
            name = backend_of(each).algorithm
            assert [name(size, "all_gather") for size in (1023, 1024)] == ["", "bruck"]
            assert name(8, "scatter", 0) == ("direct x2" if is_given else "binomial")
            assert name(8) == ("ring" if is_given else "")
            assert [name(size, "all_to_all") for size in (8, 4096)] == (["pairwise", "bruck"] if is_given else ["", ""])
            total = torch.ones(300)
            dist.all_reduce(total, group=each)
            assert total.eq(each.size()).all()
        for count in (5, 1000):
            every_collective(count, torch.int64, group)
        if (some := dist.new_group([0, 2], pg_options=options)) != dist.GroupMember.NON_GROUP_MEMBER:
            every_collective(1000, torch.float32, some)
        tensor = torch.zeros(6)
        dist_prims.all_gather(tensor, torch.full((2,), float(rank)))
        assert tensor.tolist() == [0, 0, 1, 1, 2, 2]

    dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)


def forgets_the_last_rank(size: int, root: int = 0) -> Iterator[Step]:
    """Right for root 0 only."""
    for peer in range(size):
        if peer != root and (root == 0 or peer != size - 1):
            yield Step(src=root, dst=peer, chunk=0)


@pytest.mark.parametrize("layout", ["a a a", "a b b"])
def test_schedules_are_proved_for_each_root(layout: str) -> None:
    def body() -> None:
        algorithm("broadcast", name="forgets", chunks=1)(forgets_the_last_rank)
        group = dist.new_group(pg_options=BackendOptions(broadcast="forgets"))
        tensor = torch.full((3,), float(dist.get_rank()))
        dist.broadcast(tensor, 0, group=group)
        assert tensor.tolist() == [0.0] * 3
        with pytest.raises(ScheduleError, match="broadcast 'forgets' for 3 ranks is wrong"):
            dist.broadcast(tensor, 1, group=group)
        dist.broadcast(tensor, 0, group=group)
        unregister("broadcast", "forgets")

    run(layout, body)


@pytest.mark.parametrize(
    ("collective", "text", "message"),
    [
        ("all_gather", "rnig", "unknown all_gather algorithm 'rnig'; did you mean 'ring'"),
        ("all_gather", "binomial", "unknown all_gather algorithm 'binomial'"),
        ("broadcast", "chain:1M", "BackendOptions(broadcast=...): '1M' is not a range; write e.g. chain:16K-1M"),
        ("broadcast", "chain:4K-1K", "the range '4K-1K' is empty"),
        ("broadcast", "chain:4Q-5Q", "'4Q' is not a size"),
        ("reduce", "chain x0", "x0 is not between 1 and 1024 segments"),
        ("reduce", "chain(8)", "(8) are no parameters; write e.g. tree(degree=4)"),
        ("reduce", "(chunks=8)", "is no algorithm; write e.g. ring, ring x4 or tree(degree=4) x4"),
        ("barrier", "dissemination:1K-max", "a barrier has no data"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(collective: str, text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=collective) as caught:
        BackendOptions(**{collective: text})
    assert message in str(caught.value)


def test_an_option_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="unknown option 'all_gahter'; did you mean 'all_gather'"):
        BackendOptions(all_gahter="ring")
    with pytest.raises(TypeError, match="unknown option 'scan'"):
        BackendOptions(scan="recursive_doubling")


def powers_of_two(size: int) -> Iterator[Step]:
    if size & (size - 1):
        raise ValueError(f"all_gather powers_of_two is not for {size} ranks")
    yield from build("all_gather", "ring", size).steps


def test_an_algorithm_that_is_not_for_the_group_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        algorithm("all_gather", name="powers_of_two")(powers_of_two)
        for collective, text, message in (
            ("all_gather", "powers_of_two", "all_gather powers_of_two is not for 3 ranks"),
            ("broadcast", "chain(depth=3)", "broadcast chain takes no parameter 'depth'; it takes: chunks"),
            ("broadcast", "hierarchical(inner=rnig)", "unknown all_gather algorithm 'rnig'; did you mean 'ring'"),
        ):
            with pytest.raises(ValueError, match=collective) as caught:
                dist.new_group(pg_options=BackendOptions(**{collective: text}))  # type: ignore[arg-type]
            assert message in str(caught.value)

    dist_prims.spawn(body, 3, backend="dist_prims", timeout=60)
    monkeypatch.setenv("DIST_PRIMS_SCATTER", "binomal")
    with pytest.raises(RankFailedError, match="unknown scatter algorithm 'binomal'; did you mean 'binomial'"):
        dist_prims.spawn(dist.barrier, 1, backend="dist_prims", timeout=60)
