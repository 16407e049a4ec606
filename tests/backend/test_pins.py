"""Pinned schedules of every collective, on one host and on several: results, roots, segments, lengths and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pinning import pin
from ranks import backend_of, span
from values import COLLECTIVES, Call, bits, every_collective, noise

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
                every_collective(count, dtype=dtype)

    span(layout, body)


def silent(size: int, **_: Any) -> Iterator[Step]:
    yield from ()


def is_right_everywhere(call: Call) -> bool:
    """Whether the outputs of a call are right on all ranks."""
    call.start()
    rights: list[Any] = [None] * dist.get_world_size()
    try:
        call.check()
        dist.all_gather_object(rights, True)
    except AssertionError:
        dist.all_gather_object(rights, False)
    return all(rights)


@pytest.mark.parametrize("layout", ["a a a", "a b"])
def test_the_pinned_schedule_is_what_runs(layout: str) -> None:
    """A schedule that sends nothing, and is trusted, leaves all data where it is."""

    def body() -> None:
        for collective in PINNABLE:
            made: Any = (lambda size, root=0: silent(size)) if collective in ROOTED else (lambda size: silent(size))
            algorithm(collective, name="silent", trust=True, replicas="may differ")(made)  # never chosen by price
        pinned: dict[str, Any] = dict.fromkeys(PINNABLE, "silent:0-1K")
        group, size = dist.new_group(pg_options=BackendOptions(**pinned)), dist.get_world_size()
        for count, is_pinned in ((3, True), (5000, False)):
            for name in {*COLLECTIVES} - {"barrier", "all_to_all", "all_to_all_single"}:  # of unequal blocks
                assert is_right_everywhere(Call(name, count, root=size - 1, group=group)) != is_pinned, (name, count)
            blocks, ones = torch.zeros(size, count), torch.ones(size, count)
            dist.all_to_all(list(blocks), list(ones), group=group)
            assert torch.equal(blocks, ones) != is_pinned

    span(layout, body)


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

    span(layout, body)


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

    span(layout, body)


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
            every_collective(count, group=group)
        if (some := dist.new_group([0, 2], pg_options=options)) != dist.GroupMember.NON_GROUP_MEMBER:
            every_collective(1000, dtype=torch.float32, group=some)
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

    span(layout, body)


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
