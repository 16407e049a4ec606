"""Storms of failures: no hang, no wrong sum, no second group, no healthy rank blamed, nothing left.

`tests/helpers/storm.py` is the program, which makes storms of any length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from netns import cluster, needs_hosts
from storm import LINK_KINDS, PROCESS_KINDS, Outcome, storm

PROGRAM = Path(__file__).parents[1] / "helpers" / "storm.py"


def expect(found: Outcome, events: int, of_each_kind: int, kinds: Iterable[str] = PROCESS_KINDS) -> None:
    assert found.events() >= events
    assert min(found.done[kind] for kind in kinds) >= of_each_kind, found
    assert found.repairs > 0
    assert found.steps > 0


@pytest.mark.timeout(300)
def test_a_group_survives_kills_stops_and_joins() -> None:
    expect(storm(8, 1, hosts=1), 8, 1)


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_survives_that_hosts_are_cut_off() -> None:
    expect_storm_over_links(8, 5, [*PROCESS_KINDS, "cut"], timeout=250)


@pytest.mark.long(minutes=1)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("events", "seed", "hosts"), [(100, 3, 1), (50, 4, 3)])
def test_a_group_survives_many_kills_stops_and_joins(events: int, seed: int, hosts: int) -> None:
    expect(storm(events, seed, hosts), events, events // 20)


@needs_hosts
@pytest.mark.long(minutes=8)
@pytest.mark.timeout(1000)
def test_a_group_leaves_out_hosts_that_fail_and_blames_no_other(random_seed: int) -> None:
    found = expect_storm_over_links(200, random_seed, [*PROCESS_KINDS, *LINK_KINDS], timeout=900)
    assert found.left_out > 0  # processes on a host that cannot be reached


def expect_storm_over_links(events: int, seed: int, kinds: Sequence[str], timeout: int) -> Outcome:
    """Three hosts, so that a majority is left when one is cut off."""
    options = f"--events {events} --seed {seed} --hosts 3 --kinds"
    command = [sys.executable, str(PROGRAM), *options.split(), *kinds]
    with cluster(3, 1, command, how="login", timeout=timeout) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    found = Outcome(**json.loads(done.stdout))
    expect(found, events, max(1, events // 20), kinds)
    return found
