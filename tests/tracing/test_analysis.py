"""The analysis of traces: which rank waited for which, steps, predictions, the critical path, and Chrome's events."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.schedules import build
from dist_prims.schedules.cost import seconds
from dist_prims.schedules.topology import Topology
from dist_prims.tracing.analysis import analyse
from dist_prims.tracing.chrome import write_chrome
from dist_prims.tracing.reader import read
from dist_prims.tracing.report import report

LATE = 1.0  # seconds; a rank that has announced its call must begin it before then


def one_rank_is_late(folder: str, algorithm: str | None) -> None:
    rank, deadline = dist.get_rank(), time.monotonic() + 60
    with dist_prims.trace(folder):
        if rank == 1:
            while len([*Path(folder).glob("*.begun")]) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(LATE)
        else:
            Path(folder, f"{rank}.begun").touch()
        dist_prims.all_reduce(torch.ones(6000), algorithm=algorithm)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_the_late_rank_is_found(tmp_path: Path, algorithm: str | None) -> None:
    dist_prims.spawn(one_rank_is_late, 3, (str(tmp_path), algorithm), backend="dist_prims", timeout=60)
    trace = read(tmp_path)
    found = analyse(trace)
    (call,) = found["calls"]
    assert call["last_to_come"] == 1
    assert (call["predicted"] is None) == (algorithm is None), "a call without a schedule has no prediction"
    assert call["arrival"] < call["end"] - call["begin"]
    awaited = {peer: sum(rank["waits"].get(str(peer), 0) for rank in found["ranks"]) for peer in range(3)}
    assert max(awaited, key=awaited.__getitem__) == 1
    waits = {rank["rank"]: sum(rank["waits"].values()) for rank in found["ranks"]}
    assert min(waits, key=waits.__getitem__) == 1
    assert "slowest rank 1" in report(trace)
    path = call["critical_path"]
    assert path[0]["rank"] == 1  # the call has waited for its begin
    assert path[-1]["end"] == call["end"]
    for piece, following in itertools.pairwise(path):
        assert piece["begin"] < piece["end"]
        assert piece["end"] <= following["begin"] + 1e-4
    json.dumps(found)


def rings(folder: str, algorithm: str, count: int) -> None:
    with dist_prims.trace(folder):
        dist_prims.all_reduce(torch.ones(count), algorithm=algorithm)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "recursive_doubling", "tree"])
def test_steps_are_predicted_by_the_cost_model(tmp_path: Path, algorithm: str) -> None:
    dist_prims.spawn(rings, 3, (str(tmp_path), algorithm, 3000), backend="dist_prims", timeout=60)
    trace = read(tmp_path)
    (call,) = analyse(trace)["calls"]
    (traced,) = trace.calls()
    schedule = build("all_reduce", algorithm, 3)
    assert [step["step"] for step in call["steps"]] == [*range(len(schedule.steps))]
    expected = seconds(schedule, 12_000, Topology.measured((3,), traced.group.facts["levels"]))
    assert call["predicted"] == pytest.approx(float(expected))
    assert sum(step["predicted"] for step in call["steps"]) == pytest.approx(float(expected))
    measured = sum(step["seconds"] for step in call["steps"])
    assert 0 < measured <= call["seconds"] + 1e-9


def mixed(folder: str) -> None:
    with dist_prims.trace(folder):
        works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        dist_prims.all_reduce(torch.ones(6000), algorithm="ring")


def test_events_for_chrome_are_nested(tmp_path: Path) -> None:
    dist_prims.spawn(mixed, 2, (str(tmp_path),), backend="dist_prims", timeout=60)
    count = write_chrome(read(tmp_path), tmp_path / "chrome.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert len(events) == count
    assert {event["pid"] for event in events} == {0, 1}
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert {"all_reduce (ring)", "step 0, segment 0", "send to rank 1"} <= {event["name"] for event in events}
    rows: dict[tuple[int, int], list[float]] = {}
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: (each["ts"], -each["dur"])):
        open_ends = rows.setdefault((event["pid"], event["tid"]), [])
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 0.0011, event
        open_ends.append(event["ts"] + event["dur"])
