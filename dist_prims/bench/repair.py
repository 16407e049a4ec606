"""``python -m dist_prims.bench repair``: the time from the death of a rank to the next sum of the survivors.

Each round starts a group and kills one of its ranks, a different one in each round, while all of them do collectives.
The survivors call ``shrink`` when they get the error. Times are those of the last survivor.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import struct
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import CommError
from ..launch import init, spawn
from ..repair import shrink
from .arguments import positive

__all__: list[str] = []

_BEFORE = 20  # collectives before the death
_TIMEOUT = 100.0  # seconds of a round


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench repair", description=__doc__)
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--hosts", type=positive, default=1, help="hosts that the ranks of this machine stand for (1)")
    parser.add_argument("--rounds", type=positive, default=50)
    given = parser.parse_args(words)
    if given.ranks < max(2, given.hosts):
        parser.error(f"--ranks {given.ranks}: give at least 2, and one for each host")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            victim = number % given.ranks if given.hosts == 1 or given.ranks > 2 else 1
            arguments = (victim, given.hosts, f"{folder}/{number}")
            found = spawn(
                _round, given.ranks, arguments, backend="dist_prims", timeout=_TIMEOUT, min_ranks=given.ranks - 1
            )
            rounds.append([max(times) for times in zip(*filter(None, found), strict=True)])
    print(f"# {given.ranks} ranks, {given.hosts} hosts, {given.rounds} rounds: milliseconds after SIGKILL")
    for name, times in zip(("error", "shrink has returned", "next all_reduce"), zip(*rounds, strict=True), strict=True):
        ordered = sorted(times)
        print(f"{name:20} median {statistics.median(ordered):7.1f}   least {ordered[0]:7.1f}   most {ordered[-1]:7.1f}")
    return 0


def _round(victim: int, hosts: int, file: str) -> list[float]:
    """The times of one rank in milliseconds."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    if hosts > 1:
        dist.destroy_process_group()
        os.environ["DIST_PRIMS_HOST_ID"] = f"host{rank * hosts // size}"
        init("dist_prims", timeout=_TIMEOUT)
    tensor = torch.ones(1000)
    for _ in range(_BEFORE):
        dist.all_reduce(tensor.fill_(1))
    if rank == victim:
        Path(file).write_bytes(struct.pack("d", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    times = [_time_of_error(tensor)]
    shrink()
    times.append(time.monotonic())
    dist.all_reduce(tensor.fill_(1))
    times.append(time.monotonic())
    if not (tensor == size - 1).all():
        raise RuntimeError(f"rank {rank}: the sum of {size - 1} survivors is {tensor[0].item()}")
    dist.barrier()
    [death] = struct.unpack("d", Path(file).read_bytes())
    return [(moment - death) * 1e3 for moment in times]


def _time_of_error(tensor: torch.Tensor) -> float:
    try:
        while True:
            dist.all_reduce(tensor.fill_(1))
    except CommError:
        return time.monotonic()
