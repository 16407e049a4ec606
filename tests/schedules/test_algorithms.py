"""Every registered algorithm keeps its promise and its card, at every size and root."""

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from dist_prims.schedules import COLLECTIVES, ScheduleError, Step, algorithm, algorithms, build, lookup, unregister
from dist_prims.schedules.contract import ROOTED
from dist_prims.schedules.cost import busiest_sender

REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
OUTER = ["ring", "bidirectional_ring", "swing", "direct", "two_shot", "tree", "double_tree", "recursive_doubling"]
OUTER += ["halving_doubling"]


@pytest.mark.parametrize("sizes", [range(1, 34), pytest.param([64, 100, 127, 128], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_every_size_verifies_and_costs_what_its_card_says(collective: str, name: str, sizes: Sequence[int]) -> None:
    card = lookup(collective, name).card
    assert card is not None
    for size in sizes:
        schedule = build(collective, name, size)
        schedule.verify()
        assert card.evaluate("steps", size) == len(schedule.steps), size
        assert card.evaluate("sent", size) == busiest_sender(schedule), size


@pytest.mark.parametrize(("collective", "name"), [each for each in REGISTRY if each[0] in ROOTED])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_every_root_verifies(collective: str, name: str, size: int) -> None:
    for root in range(size):
        build(collective, name, size, root=root).verify()


@pytest.mark.parametrize("hosts", [(1,), (3, 1), (2, 3, 4), (1, 1, 5), (2, 2, 2)])
@pytest.mark.parametrize("inner", ["ring", "direct", "pat"])
@pytest.mark.parametrize("outer", OUTER)
def test_hierarchies_of_any_hosts(hosts: tuple[int, ...], inner: str, outer: str) -> None:
    build("all_reduce", "hierarchical", sum(hosts), hosts=hosts, inner=inner, outer=outer).verify()


@pytest.mark.parametrize("name", algorithms("all_reduce"))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_reduce_adds(name: str, size: int) -> None:
    schedule = build("all_reduce", name, size)
    data = np.random.default_rng(size).integers(-1000, 1000, (size, schedule.chunks, 2))
    for result in schedule.simulate(list(data)):
        np.testing.assert_array_equal(result, data.sum(0))


def test_a_lost_contribution_is_named() -> None:
    @algorithm("all_reduce", name="forgetful", chunks=1)
    def forgetful(size):  # type: ignore[no-untyped-def]
        yield Step(src=1, dst=0, chunk=0, reduce=True)
        yield Step(src=0, dst=[1, 2], chunk=0)

    try:
        with pytest.raises(ScheduleError, match="rank 0, chunk 0: r2 is missing"):
            build("all_reduce", "forgetful", 3).verify()
    finally:
        unregister("all_reduce", "forgetful")


CHOICES = """
from dist_prims.schedules import COLLECTIVES, algorithms
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology
for collective in COLLECTIVES:
    print(collective, algorithms(collective))
    for nbytes in (8, 1 << 16, 1 << 24):
        for hosts in ((2,), (3,), (8,), (1, 1), (1, 1, 1, 1), (2, 2), (3, 2), (4, 4)):
            best = recommend(collective, nbytes, Topology(hosts, Level(3e-6, 2e-10), Level(5e-5, 1e-9))).candidates[0]
            print(hosts, nbytes, best.name, best.segments)
"""


def test_choices_do_not_depend_on_what_was_imported_first() -> None:
    """Of equal prices the first algorithm is chosen, and algorithms were in the order in which their modules had been
    imported. A rank that had imported some of them called another algorithm than the other ranks."""
    first = "".join(f"import dist_prims.schedules.algorithms.{name}\n" for name in ("tree", "ring", "pat"))
    printed = []
    for program in (CHOICES, first + CHOICES):
        command = [sys.executable, "-c", program]
        printed.append(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)
    assert printed[0] == printed[1]


def test_algorithms_of_a_program_come_last_in_the_order_of_their_registration() -> None:
    built_in = algorithms("barrier")
    try:
        for name in ("b", "a"):
            algorithm("barrier", name=name)(lambda size: iter(()))
        assert algorithms("barrier") == [*built_in, "b", "a"]
    finally:
        unregister("barrier", "b")
        unregister("barrier", "a")
