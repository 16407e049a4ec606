"""Storms of failures: no hang, no wrong sum, no second group, nothing left. `tests/helpers/storm.py` is the program.

That program makes storms of any length. Two of 400 events, one of 140 on three hosts and one of 80 with cuts took 14
minutes together.
"""

from __future__ import annotations

import json
import sys

import pytest
from netns import cluster, needs_hosts

from tests.helpers.storm import Outcome, storm


@pytest.mark.timeout(300)
def test_a_short_storm() -> None:
    found = storm(20, seed=1, hosts=1)
    assert found.events() >= 20
    assert min(found.kills, found.stops, found.joins) >= 2
    assert found.repairs > 0
    assert found.steps > 0


@needs_hosts
@pytest.mark.timeout(300)
def test_a_short_storm_with_cuts() -> None:
    found = storm_with_cuts(8, 5, timeout=250)
    assert found.events() >= 8
    assert min(found.kills, found.stops, found.cuts, found.joins) >= 1
    assert found.repairs > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("events", "seed", "hosts"), [(100, 3, 1), (50, 4, 3)])
def test_a_long_storm(events: int, seed: int, hosts: int) -> None:
    found = storm(events, seed, hosts)
    assert min(found.kills, found.stops, found.joins) >= events // 10


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_long_storm_with_cuts() -> None:
    found = storm_with_cuts(40, 7, timeout=3500)
    assert min(found.kills, found.stops, found.cuts, found.joins) >= 4
    assert found.left_out > 0  # processes on a host that was cut off


def storm_with_cuts(events: int, seed: int, timeout: int) -> Outcome:
    """Three hosts, so that a majority is left when one is cut off."""
    options = f"--events {events} --seed {seed} --hosts 3 --cuts"
    command = [sys.executable, "-m", "tests.helpers.storm", *options.split()]
    with cluster(3, 1, command, how="login", timeout=timeout) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))
