"""Bruck's algorithms and k-nomial trees of any radix, and Bine trees: beside their papers, and where they win."""

from __future__ import annotations

import numpy as np
import pytest

from dist_prims.schedules import build
from dist_prims.schedules.algorithms.binomial import distances
from dist_prims.schedules.recommend import recommend
from dist_prims.schedules.topology import Level, Topology
from tests.schedules.test_papers import partners

NETWORK = Level(60e-6, 8e-9)  # 1 Gbit/s
SHARED_MEMORY = Level(3e-6, 0.2e-9)
TREES = ("broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("radix", [2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 16, 17, 27, 30])
def test_each_radix_verifies_with_the_fewest_steps(size: int, radix: int) -> None:
    for collective, name in (("all_gather", "bruck"), ("all_to_all", "bruck"), *((tree, "binomial") for tree in TREES)):
        roots = {0, size // 2, size - 1} if collective in TREES else {None}
        for root in roots:
            schedule = build(collective, name, size, radix=radix, **({} if root is None else {"root": root}))
            schedule.verify()
            fewest = len(distances(size, radix))
            assert len(schedule.steps) == (max(fewest, 1) if collective == "all_to_all" else fewest)
            assert radix**fewest >= size


@pytest.mark.parametrize("radix", [1, 0, -2])
def test_a_radix_is_at_least_two(radix: int) -> None:
    for collective, name in (("all_to_all", "bruck"), ("gather", "binomial")):
        with pytest.raises(ValueError, match=f"radix={radix}; it must be at least 2"):
            build(collective, name, 4, radix=radix).verify()


@pytest.mark.parametrize("radix", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 9, 10, 27])
def test_bruck_sends_each_block_once_for_each_digit(size: int, radix: int) -> None:
    """Bruck et al. 1997, section 3: one message for each value of a digit, and a block moves once a non-zero digit."""
    schedule = build("all_to_all", "bruck", size, radix=radix)
    digits = sum(np.base_repr(way, radix).replace("0", "") != "" for way in range(size))
    assert digits == size - 1
    moves = sum(len(np.base_repr(way, radix).replace("0", "")) for way in range(size))
    assert {schedule.bytes_sent(rank, size) for rank in range(size)} == {moves}
    for distance, step in zip(distances(size, radix), partners(schedule), strict=True):
        assert {(dst - src) % size for src, dst in step} == {*range(distance, min(radix * distance, size), distance)}
    gathered = build("all_gather", "bruck", size, radix=radix)
    assert partners(gathered) == [sorted((b, a) for a, b in step) for step in partners(schedule)]
    assert {gathered.bytes_sent(rank, size) for rank in range(size)} == {size - 1}


@pytest.mark.parametrize(("size", "radix"), [(9, 3), (27, 3), (16, 4), (10, 3)])
def test_a_k_nomial_tree_multiplies_the_ranks_with_the_data(size: int, radix: int) -> None:
    for root in (0, size - 1):
        schedule = build("broadcast", "binomial", size, root=root, radix=radix)
        reached = np.cumsum([1, *map(len, partners(schedule))]).tolist()
        assert reached == [min(radix**step, size) for step in range(len(reached))]
        for step in partners(schedule):
            assert np.bincount([src for src, _ in step]).max() <= radix - 1
        sent = [src for step in partners(build("reduce", "binomial", size, root=root, radix=radix)) for src, _ in step]
        assert sorted([*sent, root]) == [*range(size)]  # each rank adds its sum to one other


@pytest.mark.parametrize("size", [2, 4, 6, 8, 12, 16, 32, 36, 64])
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_bine_counts_distances_in_base_minus_two(collective: str, size: int) -> None:
    """De Sensi et al. 2025: in step i the peer is sum((-2)^k, k < s-i) away; as few steps and bytes as a butterfly."""
    schedule = build(collective, "bine", size)
    steps = partners(schedule)[:: 1 if collective == "all_gather" else -1]
    assert len(steps) == (size - 1).bit_length()
    for left, step in enumerate(reversed(steps)):
        distance = sum((-2) ** power for power in range(left + 1))
        assert set(step) <= {(rank, (rank + (-distance if rank % 2 else distance)) % size) for rank in range(size)}
    assert {schedule.bytes_sent(rank, size) for rank in range(size)} == {size - 1}


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_bine_sends_less_between_uneven_hosts(collective: str) -> None:
    host = np.repeat(np.arange(5), (6, 8, 8, 2, 8))

    def crossing(name: str) -> int:
        steps = build(collective, name, 32).steps
        return sum(int((host[step.src] != host[step.dst]).sum()) for step in steps)

    assert crossing("bine") < 0.75 * min(crossing("pat"), crossing({"all_gather": "bruck"}.get(collective, "halving")))


@pytest.mark.parametrize(
    ("collective", "hosts", "nbytes", "best", "gain"),
    [
        ("all_to_all", (1,) * 16, 16 << 10, "bruck radix=4", 1.3),
        ("all_to_all", (1,) * 64, 64 << 10, "bruck radix=8", 1.3),
        ("all_to_all", (1,) * 9, 8 << 10, "bruck radix=3", 1.2),
        ("all_gather", (1,) * 9, 16 << 10, "bruck radix=3", 1.2),
        ("broadcast", (1,) * 9, 4 << 10, "binomial radix=3", 1.2),
        ("reduce", (1,) * 9, 4 << 10, "binomial radix=3", 1.2),
        ("gather", (3, 5), 16 << 10, "binomial radix=3", 1.2),
        ("scatter", (3, 5), 16 << 10, "binomial radix=3", 1.2),
        ("all_gather", (6, 8, 8, 2, 8), 16 << 10, "bine", 1.2),
        ("reduce_scatter", (6, 8, 8, 2, 8), 64 << 10, "bine", 1.2),
    ],
)
def test_where_each_has_the_lowest_price(
    collective: str, hosts: tuple[int, ...], nbytes: int, best: str, gain: float
) -> None:
    topology = Topology(hosts, SHARED_MEMORY, NETWORK, gamma=0.2e-9, congestion=0.2 * NETWORK.beta)
    found = sorted(recommend(collective, nbytes, topology).candidates, key=lambda candidate: candidate.seconds)
    assert found[0].name == best
    other = next(each for each in found if each.schedule.algorithm != "bine" and "radix" not in each.name)
    assert other.seconds > gain * found[0].seconds
