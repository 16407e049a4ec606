"""Traces of what runs in Python: schedules over any group, pipelines, gradient buckets."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.tracing import format as fmt
from dist_prims.tracing import recorder
from dist_prims.tracing.analysis import analyse
from dist_prims.tracing.reader import ProcessTrace, read
from dist_prims.tracing.report import report

LEVELS = {"inner": {"alpha": 1e-5, "beta": 1e-9}, "outer": {"alpha": 1e-4, "beta": 1e-8}, "gamma": 1e-10}


def kinds(process: ProcessTrace) -> list[str]:
    return [fmt.KINDS[kind] for kind in process.events["kind"].tolist()]


def over_gloo(folder: str) -> None:
    halves = dist.new_group([0, 1])
    with dist_prims.trace(folder):
        dist_prims.all_reduce(torch.ones(30), algorithm="ring")
        work = dist_prims.broadcast(torch.ones(30), src=1, algorithm="binomial", async_op=True)
        work.wait()
        if dist.get_rank() < 2:
            dist_prims.all_reduce(torch.ones(8), algorithm="ring", segment_bytes=8, group=halves)


def test_schedules_in_python(tmp_path: Path) -> None:
    dist_prims.spawn(over_gloo, 3, (str(tmp_path),), backend="gloo", timeout=60)
    trace = read(tmp_path)
    found = [(call.what, call.algorithm, call.nbytes, call.root, sorted(call.parts)) for call in trace.calls()]
    assert sorted(found) == [
        ("all_reduce", "ring", 32, -1, [0, 1]),
        ("all_reduce", "ring", 120, -1, [0, 1, 2]),
        ("broadcast", "binomial", 120, 1, [0, 1, 2]),
    ]
    names = kinds(trace.ranks[2])
    assert (names.count("collective"), names.count("agree")) == (2, 2)
    events = trace.ranks[2].events
    steps = events[events["kind"] == fmt.SEND]["step"].tolist()
    assert steps.count(-1) >= 2  # the agreements
    assert [step for step in steps if step >= 0][:4] == [0, 1, 2, 3]
    assert names.count("reduce") == 2
    calls = analyse(trace, LEVELS)["calls"]
    assert all(call["predicted"] > 0 and call["steps"] for call in calls)
    assert "ring" in report(trace)


def many_calls(folder: str) -> None:
    with dist_prims.trace(folder, events=400):
        for _ in range(150):
            dist_prims.all_reduce(torch.ones(30), algorithm="ring")


def test_events_of_python_are_bounded(tmp_path: Path) -> None:
    dist_prims.spawn(many_calls, 2, (str(tmp_path),), backend="gloo", timeout=60)
    for process in read(tmp_path).ranks.values():
        assert len(process.events) == 1024
        assert process.dropped > 0


def pipeline_step(folder: str) -> None:
    stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    pipeline = dist_prims.Pipeline(stages, "1f1b", loss=torch.nn.functional.mse_loss, num_microbatches=3)
    with dist_prims.trace(folder):
        pipeline.step(torch.ones(6, 4), torch.ones(6, 4))


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_actions_and_messages_of_a_pipeline(tmp_path: Path, backend: str) -> None:
    dist_prims.spawn(pipeline_step, 2, (str(tmp_path),), backend=backend, timeout=60)
    trace = read(tmp_path)
    for rank, process in trace.ranks.items():
        is_python = ~process.is_cpp
        actions = [process.name_of(n) for n, kind in enumerate(kinds(process)) if kind == "action"]
        assert sorted(actions) == sorted(
            f"{kind}(stage {rank}, micro-batch {n})" for kind in ("F", "BW") for n in range(3)
        )
        events = process.events[is_python]
        sent, received = (int((events["kind"] == kind).sum()) for kind in (fmt.SEND, fmt.RECEIVE))
        assert min(sent, received) >= 3
        groups = {process.group_of(n).key[1] for n in range(len(process.events)) if is_python[n]}
        assert groups == {"pipeline"}
    by_rank = [rank["actions"] for rank in analyse(trace)["ranks"]]
    assert [each["count"] for each in by_rank] == [6, 6]
    assert all(0 < each["seconds"] <= each["span"] for each in by_rank)
    assert "bubble" in report(trace)


def averaged_backward(folder: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    averager = dist_prims.GradientAverager(model, bucket_mb=0.05)
    model(torch.ones(2, 100)).sum().backward()
    with dist_prims.trace(folder):
        model(torch.ones(2, 100)).sum().backward()
    averager.remove()


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_buckets_of_gradients(tmp_path: Path, backend: str) -> None:
    dist_prims.spawn(averaged_backward, 2, (str(tmp_path),), backend=backend, timeout=60)
    for process in read(tmp_path).ranks.values():
        found = [n for n, kind in enumerate(kinds(process)) if kind == "bucket"]
        names = [process.name_of(n) for n in found]
        assert names == [f"bucket {n}" for n in range(len(found))]
        assert len(found) >= 2
        assert int(process.events["bytes"][found].sum()) == 4 * 4 * (100 * 100 + 100)


def groups_at_the_end_of_their_numbers(folder: str) -> list[int]:
    recorder._group_numbers = itertools.count(2**32 - 2)
    found = []
    with dist_prims.trace(folder):
        for count in range(1, 5):
            group = dist.new_group()
            dist_prims.all_reduce(torch.ones(count), algorithm="ring", group=group)
            found.append(recorder.group_number(group, "python", dict))
    return found


def test_numbers_of_groups_wrap(tmp_path: Path) -> None:
    """A number has 32 bits in the file, and 0 is none."""
    found = dist_prims.spawn(groups_at_the_end_of_their_numbers, 2, (str(tmp_path),), backend="gloo", timeout=60)
    assert found == [[2**32 - 2, 2**32 - 1, 1, 2]] * 2
    calls = read(tmp_path).calls()
    assert sorted((call.nbytes, sorted(call.parts)) for call in calls) == [(4 * each, [0, 1]) for each in range(1, 5)]
