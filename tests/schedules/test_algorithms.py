"""Every registered algorithm keeps its promise and its card, at every size and root."""

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
