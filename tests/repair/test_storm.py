"""Storms of failures: no hang, no wrong sum, no second group, nothing left. `tests/helpers/storm.py` is the program.

That program makes storms of any length. Two of 400 events, one of 140 on three hosts and one of 80 with cuts took 14
minutes together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from netns import cluster, needs_hosts
from storm import Outcome, storm

PROGRAM = Path(__file__).parents[1] / "helpers" / "storm.py"


def expect(found: Outcome, events: int, of_each_kind: int, *kinds: str) -> None:
    assert found.events() >= events
    assert min(map(found.of_kind, kinds)) >= of_each_kind, found
    assert found.repairs > 0
    assert found.steps > 0


@pytest.mark.timeout(300)
def test_a_group_survives_kills_stops_and_joins() -> None:
    expect(storm(8, 1, hosts=1), 8, 1, "kill", "stop", "join")


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_survives_that_hosts_are_cut_off() -> None:
    expect(storm_with_cuts(8, 5, timeout=250), 8, 1, "kill", "stop", "cut", "join")


@pytest.mark.long(minutes=1)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("events", "seed", "hosts"), [(100, 3, 1), (50, 4, 3)])
def test_a_group_survives_many_kills_stops_and_joins(events: int, seed: int, hosts: int) -> None:
    expect(storm(events, seed, hosts), events, events // 10, "kill", "stop", "join")


@needs_hosts
@pytest.mark.long(minutes=2)
@pytest.mark.timeout(3600)
def test_a_group_leaves_out_hosts_that_are_cut_off() -> None:
    found = storm_with_cuts(40, 7, timeout=3500)
    expect(found, 40, 4, "kill", "stop", "cut", "join")
    assert found.left_out > 0  # processes on a host that was cut off


def storm_with_cuts(events: int, seed: int, timeout: int) -> Outcome:
    """Three hosts, so that a majority is left when one is cut off."""
    options = f"--events {events} --seed {seed} --hosts 3 --cuts"
    command = [sys.executable, str(PROGRAM), *options.split()]
    with cluster(3, 1, command, how="login", timeout=timeout) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    return Outcome(**json.loads(done.stdout))
