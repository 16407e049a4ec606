"""Storms of failures: no hang, no wrong sum, nothing left. `tests/helpers/storm.py` is the program."""

from __future__ import annotations

import pytest

from tests.helpers.storm import storm


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("seed", "hosts"), [(1, 1), (2, 3)])
def test_a_short_storm(seed: int, hosts: int) -> None:
    found = storm(20, seed, hosts)
    assert found.kills + found.stops + found.joins >= 20
    assert found.repairs > 0
    assert found.steps > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("events", "seed", "hosts"), [(800, 3, 1), (200, 4, 3)])
def test_a_long_storm(events: int, seed: int, hosts: int) -> None:
    found = storm(events, seed, hosts)
    assert min(found.kills, found.stops, found.joins) > events // 10
