"""Every registered algorithm keeps its promise, at every size and root."""

import numpy as np
import pytest

from dist_prims.schedules import COLLECTIVES, ScheduleError, Step, algorithm, algorithms, build, unregister

REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 16, 33])
def test_every_algorithm_verifies(collective: str, name: str, size: int) -> None:
    build(collective, name, size).verify()


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
