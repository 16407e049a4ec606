"""Clocks of hosts: the offset is measured, the traces are aligned, and nothing waits for a rank without a trace."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from launching import ROOT, clean, free_port
from netns import needs_hosts, on_hosts

from dist_prims.tracing import clock, recorder
from dist_prims.tracing import format as fmt
from dist_prims.tracing.reader import Trace, aligned, read, read_file
from dist_prims.tracing.report import report

SHIFT = 5000  # seconds between the clocks of two time namespaces

PROGRAM = """
import time, torch, torch.distributed as dist
dist.init_process_group("dist_prims")
for _ in range(20):
    dist.all_reduce(torch.ones(100_000))
    time.sleep(0.05)
dist.barrier()
"""


def in_time_namespace(*command: str) -> list[str]:
    return ["unshare", "--time", "--monotonic", str(SHIFT), "--fork", *command]


def may_unshare() -> bool:
    try:
        return subprocess.run(in_time_namespace("true"), capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        return False


def check_causality(trace: Trace) -> None:
    """No message ends before it was posted, but for the error of the clocks."""
    checked = 0
    for call in trace.calls():
        for local, part in call.parts.items():
            events = part.process.events[part.inner]
            for event in events[events["kind"] == fmt.RECEIVE]:
                sender = call.parts[int(event["peer"])]
                posts = sender.process.events[sender.inner]
                same = (posts["kind"] == fmt.SEND) & (posts["peer"] == local) & (posts["step"] == event["step"])
                error = part.process.error + sender.process.error
                assert posts["begin"][same].min() <= event["end"] + error
                checked += 1
    assert checked > 0


@pytest.mark.slow
@pytest.mark.skipif(not may_unshare(), reason="no time namespace may be made here")
def test_ranks_of_two_time_namespaces(tmp_path: Path) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    command, processes = [sys.executable, "-c", PROGRAM], []
    for rank, name in enumerate("ab"):
        facts = {"RANK": str(rank), "DIST_PRIMS_HOST_ID": name, "DIST_PRIMS_TRACE": str(tmp_path / "traces")}
        whole, environment = in_time_namespace(*command) if rank else command, clean(**job, **facts)
        processes.append(subprocess.Popen(whole, env=environment, cwd=ROOT, stderr=subprocess.PIPE))
    for process in processes:
        errors = process.communicate(timeout=100)[1]
        assert process.returncode == 0, errors.decode()
    raw = [read_file(path) for path in (tmp_path / "traces").glob("*.trace")]
    apart = abs(int(raw[0].events["begin"][0]) - int(raw[1].events["begin"][0])) / 1e9
    assert abs(apart - SHIFT) < 100
    trace = read(tmp_path / "traces")
    assert trace.ranks[0].shift == 0
    assert abs(trace.ranks[1].shift / 1e9 + SHIFT) < 0.05  # one machine: the true offset is known
    assert 0 < trace.ranks[1].error < 0.05e9
    assert abs(trace.ranks[1].shift + SHIFT * 10**9) <= trace.ranks[1].error
    assert len(trace.ranks[1].clocks) >= 2  # rank 0 may end first, so the last one may be missing
    check_causality(trace)
    text = report(trace)
    assert "the reference" in text
    assert "±" in text


@pytest.mark.slow
@needs_hosts
def test_hosts_of_one_clock_need_no_measurement(tmp_path: Path) -> None:
    done = on_hosts(2, 2, PROGRAM, env={"DIST_PRIMS_TRACE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path)
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert "one monotonic clock" in report(trace)
    check_causality(trace)


def test_offsets_are_interpolated(tmp_path: Path) -> None:
    processes: dict[int, Any] = {}
    for rank, (name, shift) in enumerate((("a", 0), ("b", -70))):
        recording = recorder.begin(tmp_path / name, 1000)
        for at in (1000, 2000, 3000):
            recording.event(fmt.ACTION, at * 10**9, at * 10**9 + 5)
        if shift:
            for number, (at, offset) in enumerate(((1000, -70_000), (3000, -90_000))):
                facts = {"at": at * 10**9, "offset": offset, "error": 10 + number, "reference": "clock a"}
                recording.text(fmt.CLOCK, number, json.dumps(facts))
        recorder.end(recording)
        processes[rank] = read_file(recording.path)
        processes[rank].facts["clock"] = f"clock {name}"
    found = aligned(processes)
    np.testing.assert_array_equal(found[0].events["begin"], processes[0].events["begin"])
    difference = found[1].events["begin"] - processes[1].events["begin"]
    assert difference.tolist() == [-70_000, -80_000, -90_000]
    assert found[1].error == 11


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_clock_server_that_does_not_answer_delays_nothing(
    is_announced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    recording = recorder.begin(tmp_path, 1000)
    if is_announced:
        facts = {"domain": "of another host", "addresses": ["127.0.0.1"], "port": 9, "token": "00" * 16}
        store.set(f"trace clock/{recording.number}", json.dumps(facts))
    monkeypatch.setattr(clock, "_group", (lambda: store, 1))
    clock.attach(recording)
    time.sleep(0.3)
    began = time.monotonic()
    recorder.end(recording)
    assert time.monotonic() - began < 30
    assert read_file(recording.path).clocks == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".trace"]


def test_requests_without_the_token_are_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    server = clock.ClockServer(store, "key")
    facts = json.loads(store.get("key"))
    recording = recorder.begin(tmp_path, 1000)
    monkeypatch.setattr(recorder, "clock_domain", lambda: "of another host")
    store.set("wrong", json.dumps({**facts, "token": "00" * 16}))
    clients = [clock.ClockClient(recording, store, key) for key in ("key", "wrong")]
    deadline = time.monotonic() + 30
    while clients[0]._count == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for client in clients:
        client.close()
    assert clients[1]._count == 0
    recorder.end(recording)
    points = read_file(recording.path).clocks
    assert points
    assert all(abs(point["offset"]) <= point["error"] for point in points)  # it is one clock
    server.close()
    assert not server._thread.is_alive()
