"""Traces of ranks: what is recorded, how a trace ends, and what stays of it when a process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import ROOT, clean, run

import dist_prims
from dist_prims.schedules import Step, algorithm
from dist_prims.tracing import format as fmt
from dist_prims.tracing import recorder
from dist_prims.tracing.analysis import analyse
from dist_prims.tracing.reader import Trace, read
from dist_prims.tracing.report import report

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("dist_prims")
assert dist.get_backend() == "dist_prims"
for _ in range(5):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.eq(dist.get_world_size()).all()
dist.destroy_process_group()
"""


def counts(trace: Trace, rank: int) -> dict[str, int]:
    kinds, numbers = trace.ranks[rank].events["kind"].tolist(), fmt.KINDS
    return {name: kinds.count(kind) for kind, name in numbers.items() if kind in kinds}


def on_ranks(fn: Any, ranks: int, *args: Any, backend: str = "dist_prims") -> list[Any]:
    return dist_prims.spawn(fn, ranks, args, backend=backend, timeout=60)


def several_calls(folder: str) -> None:
    with dist_prims.trace(folder):
        dist.all_reduce(torch.ones(3, dtype=torch.float64))
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        while not work.is_completed():  # a wait would execute the call on this thread, if the queue's has not begun
            time.sleep(0.001)
        work.wait()
        dist.broadcast(torch.ones(5), 1)
        dist_prims.all_reduce(torch.ones(30), algorithm="ring")
        dist.barrier()
    dist.all_reduce(torch.ones(3))  # after the trace


def test_every_rank_records_every_collective(tmp_path: Path) -> None:
    on_ranks(several_calls, 3, str(tmp_path))
    trace = read(tmp_path)
    assert sorted(trace.ranks) == [0, 1, 2]
    calls = trace.calls()
    assert [(call.what, call.algorithm, call.nbytes, call.root) for call in calls] == [
        ("all_reduce", "", 24, -1),
        ("all_reduce", "", 400_000, -1),
        ("broadcast", "", 20, 1),
        ("all_reduce", "ring", 120, -1),
        ("barrier", "", 0, -1),
    ]
    for call in calls:
        assert sorted(call.parts) == [0, 1, 2]
        assert max(part.begin for part in call.parts.values()) <= min(part.end for part in call.parts.values())
    for rank, process in trace.ranks.items():
        found = counts(trace, rank)
        assert (found["step"], found["send"], found["receive"]) == (4, 4, 4)  # of the ring
        assert (found["collective"], found["queued"]) == (5, 1)
        assert found["reduce"] >= 2 + 2
        assert process.ended
        assert (process.dropped, process.unfinished) == (0, 0)
        first, asynchronous, *others = process.events["thread"][process.events["kind"] == fmt.COLLECTIVE].tolist()
        assert {*others} == {first} != {asynchronous}


def many_chunks(folder: str) -> None:
    count = 3 * 4000 + 1  # pieces of 1 and 2 elements

    @algorithm("all_reduce", name="many_chunks", chunks=lambda size: 4000 * size)
    def exchange(size: int) -> Iterator[Step]:
        """Each of two ranks adds one half of the data, and sends it to the other."""
        ranks = np.arange(size)
        for reduces in (True, False):
            half = 1 - ranks if reduces else ranks
            chunks = half[:, None] * 4000 + np.arange(4000)
            yield Step(np.repeat(ranks, 4000), np.repeat(1 - ranks, 4000), chunks.ravel(), reduces)

    group = dist.new_group(backend="dist_prims", pg_options=dist_prims.BackendOptions(all_reduce="many_chunks"))
    tensor = torch.arange(count) * (dist.get_rank() + 1)
    with dist_prims.trace(folder):
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.arange(count) * 3)


def test_adjacent_chunks_are_written_together(tmp_path: Path) -> None:
    """A past bug: the time of a step in C++ grew with the square of the chunks of a message, 46 ms for 4,000."""
    on_ranks(many_chunks, 2, str(tmp_path))
    trace = read(tmp_path)
    for rank in range(2):
        found = counts(trace, rank)
        assert (found["reduce"], found["send"], found["receive"]) == (1, 2, 2)
        assert found.get("copy", 0) <= 1  # a receive that was posted ahead


def failing(folder: str) -> None:
    with dist_prims.trace(folder):
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() == 0:
            raise KeyError("of the program")


def test_an_exception_ends_the_trace(tmp_path: Path) -> None:
    with pytest.raises(dist_prims.RankFailedError, match="of the program"):
        on_ranks(failing, 2, str(tmp_path))
    process = read(tmp_path).ranks[0]
    assert process.ended
    assert len(process.events) >= 3


def mismatched(folder: str) -> None:
    algorithm = "ring" if dist.get_backend() == "gloo" else None
    with dist_prims.trace(folder), pytest.raises(dist_prims.MismatchError):
        dist_prims.all_reduce(torch.ones(2 + dist.get_rank()), algorithm=algorithm)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_a_failed_call_is_marked(backend: str, tmp_path: Path) -> None:
    on_ranks(mismatched, 2, str(tmp_path), backend=backend)
    (call,) = read(tmp_path).calls()
    assert [part.failed for part in call.parts.values()] == [True, True]


def killed(folder: str) -> None:
    if os.fork() == 0:  # a process outside of the group, so that no rank fails
        with dist_prims.trace(folder, events=1000):
            recorder.active.event(fmt.ACTION, 1, 2, name="an action")
            os.kill(os.getpid(), signal.SIGKILL)
    os.wait()


def test_the_file_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    killed(str(tmp_path))
    (process,) = read(tmp_path).ranks.values()
    assert not process.ended
    assert [process.name_of(number) for number in range(len(process.events))] == ["an action"]


def nested(outer: str, inner: str) -> None:
    with dist_prims.trace(outer):
        dist.all_reduce(torch.ones(1))
        with dist_prims.trace(inner):
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3))


def test_the_innermost_trace_records(tmp_path: Path) -> None:
    on_ranks(nested, 2, str(tmp_path / "outer"), str(tmp_path / "inner"))
    assert [call.nbytes for call in read(tmp_path / "outer").calls()] == [4, 12]
    assert [call.nbytes for call in read(tmp_path / "inner").calls()] == [8]


def twice(folder: str) -> None:
    for count in (1, 2):
        with dist_prims.trace(folder):
            dist.all_reduce(torch.ones(count))


def test_the_last_run_in_a_folder_is_read(tmp_path: Path) -> None:
    on_ranks(several_calls, 3, str(tmp_path))
    on_ranks(twice, 2, str(tmp_path))
    (tmp_path / "other.trace").write_bytes(b"of another program")
    trace = read(tmp_path)
    assert [call.nbytes for call in trace.calls()] == [8]
    assert sorted(trace.ranks) == [0, 1]
    assert len(trace.ignored) == 3 + 2 + 1
    assert "other.trace: not a trace" in trace.ignored


def many(folder: str) -> None:
    with dist_prims.trace(folder, events=40):
        for _ in range(20):
            dist.all_reduce(torch.ones(2))


def test_a_full_file_counts_what_it_drops(tmp_path: Path) -> None:
    on_ranks(many, 2, str(tmp_path))
    for process in read(tmp_path).ranks.values():
        assert len(process.events) < 40
        assert process.dropped >= 60 - 40
    assert all(path.stat().st_size < 4096 + 100 * fmt.SLOT for path in tmp_path.glob("*.trace"))


def with_subgroups(folder: str) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 2])]
    with dist_prims.trace(folder):
        late = dist.new_group([0, 1, 2])
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.all_reduce(torch.ones(rank * 0 + 1), group=group)
        dist.all_reduce(torch.ones(7), group=late)


def test_groups_are_distinguished(tmp_path: Path) -> None:
    on_ranks(with_subgroups, 3, str(tmp_path))
    trace = read(tmp_path)
    found = sorted((call.group.ranks, sorted(call.parts), call.nbytes) for call in trace.calls() if call.nbytes)
    assert found == [((0, 1, 2), [0, 1, 2], 28), ((0, 2), [0, 1], 4), ((1, 2), [0, 1], 4)]


def two_threads(folder: str) -> None:
    groups = [dist.new_group() for _ in range(2)]

    def work(group: dist.ProcessGroup) -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(2), group=group)

    with dist_prims.trace(folder):
        threads = [threading.Thread(target=work, args=[group]) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_threads_keep_their_groups_apart(tmp_path: Path) -> None:
    on_ranks(two_threads, 2, str(tmp_path))
    trace = read(tmp_path)
    calls = trace.calls()
    assert len(calls) == 100
    assert all(sorted(call.parts) == [0, 1] for call in calls)
    for process in trace.ranks.values():
        events = process.events[process.events["group"] > 0]
        pairs = {(int(event["group"]), int(event["thread"])) for event in events}
        assert len(pairs) == 2  # each group on its own thread


def forking(folder: str) -> None:
    with dist_prims.trace(folder):
        if (child := os.fork()) == 0:
            quiet = recorder.active is None
            os._exit(0 if quiet else 1)
        assert os.waitpid(child, 0)[1] == 0
        dist.all_reduce(torch.ones(2))


def test_a_forked_child_leaves_the_trace_alone(tmp_path: Path) -> None:
    on_ranks(forking, 2, str(tmp_path))
    assert len([*tmp_path.iterdir()]) == 2
    assert [sorted(call.parts) for call in read(tmp_path).calls()] == [[0, 1]]


@pytest.mark.slow
def test_an_unchanged_program_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, str(tmp_path / "program.py")], clean(DIST_PRIMS_TRACE=str(tmp_path / "traces")), 100)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "traces")
    assert [sorted(call.parts) for call in trace.calls()] == [[0, 1]] * 5
    assert all(process.ended for process in trace.ranks.values())
    assert len([*(tmp_path / "traces").iterdir()]) == 2  # none of torchrun itself


def one_call() -> None:
    dist_prims.all_reduce(torch.ones(2), algorithm="ring" if dist.get_backend() == "gloo" else None)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_spawned_ranks_end_the_trace_of_the_environment(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_PRIMS_TRACE", str(tmp_path))
    on_ranks(one_call, 2, backend=backend)
    trace = read(tmp_path)
    assert [sorted(call.parts) for call in trace.calls()] == [[0, 1]]
    assert all(process.ended for process in trace.ranks.values())


def test_a_folder_that_cannot_be_written_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIST_PRIMS_TRACE", str(tmp_path / "file"))
    on_ranks(one_call, 2)
    assert "nothing is traced" in capfd.readouterr().err


def test_a_trace_of_the_environment_that_cannot_be_finished_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """``spawn`` raised for a rank whose function had returned, because the rank could not finish its trace."""
    monkeypatch.setenv("DIST_PRIMS_TRACE", str(tmp_path / "traces"))

    def remove_folder() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(tmp_path / "traces")
        dist.barrier()

    on_ranks(remove_folder, 2)
    assert capfd.readouterr().err.count("is not finished: [Errno 2]") == 2


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist or is not a folder"):
        read(tmp_path / "missing")
    with pytest.raises(ValueError, match="set DIST_PRIMS_TRACE"):
        read(tmp_path)
    with pytest.raises(ValueError, match="events=0"), dist_prims.trace(tmp_path, events=0):
        pass


@pytest.mark.slow
def test_damaged_files_are_ignored_or_read_in_part(tmp_path: Path) -> None:
    with dist_prims.trace(tmp_path, events=1000):
        recorder.active.event(fmt.ACTION, 1, 2, name="an action")
    (path,) = tmp_path.glob("*.trace")
    whole = path.read_bytes()
    for length in range(0, len(whole), 16):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="has no trace"):
            read(tmp_path)
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # any other error fails the test
            analyse(read(tmp_path))
            report(read(tmp_path))


def test_format_and_header_file_agree() -> None:
    header = (ROOT / "csrc/common/trace.h").read_text()
    kinds = {int(number): name.lower() for name, number in re.findall(r"\bk(\w+) = (\d+),", header)}
    assert {number: name for number, name in kinds.items() if number > fmt.TEXT_SLOT} == {
        number: name for number, name in fmt.KINDS.items() if number <= fmt.COPY
    }
    types = (ROOT / "csrc/common/types.h").read_text()
    names = re.findall(r"k(\w+),", types.partition("enum class Collective")[2].partition("}")[0])
    assert [re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in names] == [*fmt.COLLECTIVES[: len(names)]]


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    on_ranks(several_calls, 2, str(tmp_path))
    code = (
        "import sys; from dist_prims.cli import main; "
        f"status = main(['trace', 'report', {str(tmp_path)!r}, '--json', {str(tmp_path / 'analysis.json')!r}]); "
        f"status |= main(['trace', 'chrome', {str(tmp_path)!r}, '-o', {str(tmp_path / 'chrome.json')!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "slowest rank" in done.stdout
    assert "one monotonic clock" in done.stdout
    assert len(json.loads((tmp_path / "analysis.json").read_text())["calls"]) == 5
    assert json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
