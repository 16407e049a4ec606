"""What faults get from the backend, with real processes: an error that names the rank, soon, and no harm."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import spawn, store
from torch.utils.data import DataLoader, Dataset

import dist_prims
from dist_prims.cli import main
from dist_prims.errors import CommTimeoutError, PeerDiedError, PeerLeftError
from dist_prims.launch import RankFailedError
from dist_prims.rendezvous.deadline import until


def all_reduce(tensor: torch.Tensor, seconds: float) -> None:
    """With a timeout of its own."""
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(seconds=seconds), False
    dist.group.WORLD.allreduce([tensor], options).wait()


def test_more_ranks_than_cores() -> None:
    def body() -> None:
        for _ in range(20):
            tensor = torch.ones(10_000)
            dist.all_reduce(tensor)
            dist.barrier()
            assert tensor[0] == dist.get_world_size()

    spawn(body, 4 * len(os.sched_getaffinity(0)) + 1, timeout=100)


def test_killing_all_ranks_leaves_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("dist_prims", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        dist.all_reduce(dist_prims.empty(1_000_000).fill_(1))
        (tmp_path / f"ready{rank}").touch()
        while True:
            dist.all_reduce(torch.ones(100_000))

    before = names_of_groups()
    ranks = [multiprocessing.get_context("fork").Process(target=body, args=(rank,)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        ready = [tmp_path / "ready0", tmp_path / "ready1"]
        until(lambda: all(each.exists() for each in ready), time.monotonic() + 60, "the first calls of the ranks")
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(20)
    left = names_of_groups() - before
    deadline = time.monotonic() + 60
    while left := left & names_of_groups():  # the names of tests that run at the same time vanish
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def names_of_groups() -> set[str]:
    """The names of files, shared memory and abstract Unix sockets that may be of groups on this host."""
    files = [name for name in os.listdir("/dev/shm") + os.listdir("/tmp") if "dist_prims" in name or "gloo" in name]
    return {*files, *re.findall(r"@(dist_prims-\w+)", Path("/proc/net/unix").read_text())}


class Rows(Dataset[torch.Tensor]):
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor[index] + 1


def test_workers_of_a_data_loader_harm_nothing() -> None:
    """They are forked from a rank while its group works, and end before it."""

    def body() -> None:
        rows, total = Rows(torch.arange(8.0)), torch.ones(50_000)
        for _ in range(3):
            work = dist.all_reduce(total, async_op=True)
            seen = torch.cat(list(DataLoader(rows, batch_size=2, num_workers=2)))
            work.wait()
            assert seen.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert (total == 8).all()
        assert rows.tensor.tolist() == list(range(8))

    spawn(body, 2)


def test_a_child_that_crashes_is_not_taken_for_its_rank() -> None:
    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 0 and os.fork() == 0:
            faulthandler.disable()
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # its stacks are not of interest
            os.kill(os.getpid(), signal.SIGSEGV)
        for _ in range(50):
            dist.all_reduce(torch.ones(1000))

    spawn(body, 2)


def test_dev_shm_is_not_needed() -> None:
    """/dev/shm of 1 MB, or none: the memory has no name."""
    if os.geteuid() != 0:
        pytest.skip("to mount over /dev/shm takes root")

    def body() -> float:
        dist.all_reduce(dist_prims.empty(4_000_000).fill_(1))
        tensor = torch.ones(4_000_000)
        dist.all_reduce(tensor)
        return tensor.sum().item()

    def in_namespace() -> str:
        new_mount_namespace = 0x20000
        if ctypes.CDLL(None).unshare(new_mount_namespace):
            return "no mount namespace"
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        for shm in ("size=1m", "size=4k,mode=0,ro"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", shm, "none", "/dev/shm"], check=True)
            assert spawn(body, 2) == [8000000.0] * 2, shm
        return ""

    (reason,) = dist_prims.spawn(in_namespace, 1, init=False, timeout=100)
    if reason:
        pytest.skip(reason)


@pytest.mark.slow
def test_torchrun_restarts(tmp_path: Path) -> None:
    restarts = 2
    (tmp_path / "program.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('dist_prims')\n"
        "turn = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "tensor = torch.ones(100_000)\n"
        "dist.all_reduce(tensor)\n"
        f"if turn < {restarts} and dist.get_rank() == turn % 2:\n"
        "    os.kill(os.getpid(), 9)\n"
        "dist.all_reduce(tensor)\n"
        "print(f'end of turn {turn} {tensor[0].item()}\\n', end='', flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"end of turn {restarts} 4.0") == 2


def test_the_record_of_a_failure_names_the_rank_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIST_PRIMS_DUMP", str(tmp_path))

    def body() -> None:
        dist.all_reduce(torch.ones(3))
        dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else None
        if dist.get_rank() == 1:
            dist.recv(torch.ones(2), 0)
            store().set("begins 1", "")
            store().wait(["raised 0", "raised 2"])
            with pytest.raises(CommTimeoutError):
                dist.all_gather_into_tensor(torch.ones(9), torch.ones(3))
        else:
            store().set(f"begins {dist.get_rank()}", "")
            # So the second of the two calls comes before the first gives up, and the failure after the message.
            store().wait(["begins 0", "begins 1", "begins 2"])
            with pytest.raises((CommTimeoutError, PeerDiedError)):
                all_reduce(torch.ones(7), 1)
            store().set(f"raised {dist.get_rank()}", "")

    spawn(body, 3)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"0_rank{rank}.json" for rank in range(3)]
    first = json.loads((tmp_path / files[0]).read_text())
    assert [entry["state"] for entry in first["entries"]][-1] == "failed"
    assert first["entries"][-1]["profiling_name"] == "dist_prims:all_reduce"
    assert main(["doctor", "--dump", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "group 0, 3 ranks" in said
    assert "call 2: rank 0, 2 all_reduce(float32, [7]) failed; rank 1 all_gather(float32, [9]) failed" in said


def test_the_record_is_written_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), async_op=True)
        from dist_prims.backend import dump

        time.sleep(0.3)
        dump(tmp_path / f"{dist.get_rank()}.json")
        if dist.get_rank() == 1:
            until((tmp_path / "0.json").exists, time.monotonic() + 60, "the record of rank 0")
            dist.barrier()  # fails, and ends rank 0

    with pytest.raises(RankFailedError, match="MismatchError"):
        spawn(body, 2)
    assert main(["doctor", "--dump", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 1 is behind: it has made 1 call, rank 0 has made 2" in said, said


def test_a_monitored_barrier_names_the_missing_ranks() -> None:
    def body() -> None:
        group = dist.new_group()
        for _ in range(3):
            group.monitored_barrier(timedelta(seconds=50))
        if dist.get_rank() == 0:
            with pytest.raises(CommTimeoutError, match=r"in monitored_barrier: .* no sign of rank 2, 3"):
                group.monitored_barrier(timedelta(milliseconds=300), wait_all_ranks=True)
        elif dist.get_rank() == 1:
            with pytest.raises(CommTimeoutError):
                group.monitored_barrier(timedelta(seconds=50))
        dist.barrier()

    spawn(body, 4)


def test_a_death_is_named_although_another_rank_has_left_because_of_it() -> None:
    """Rank 0 sees the death in a group of two, and leaves. Rank 2 once named rank 0 alone, which is healthy."""

    def body() -> list[str]:
        rank, meeting = dist.get_rank(), store()
        pair, everyone = dist.new_group([0, 1]), dist.new_group()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            with pytest.raises(PeerDiedError, match="rank 1"):
                dist.barrier(pair)
            dist.destroy_process_group()
            meeting.set("left", "")
            return []
        until(lambda: meeting.check(["left"]), time.monotonic() + 50, "rank 0")
        with pytest.raises(PeerLeftError) as of_message:
            dist.recv(torch.ones(1), 0)  # awaits rank 0 only
        with pytest.raises(PeerDiedError) as of_collective:
            dist.all_reduce(torch.ones(2), group=everyone)  # awaits both
        return [str(of_message.value), str(of_collective.value)]

    _, _, texts = dist_prims.spawn(body, 3, backend="dist_prims", timeout=60, min_ranks=2)
    assert re.search(r"rank 2: rank 0 has left the group in .*, and rank 1 \(process \d+\) has died; see", texts[0])
    assert re.search(r": rank 1 \(process \d+\) has died in all_reduce", texts[1])
