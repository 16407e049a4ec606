"""``python -m dist_prims.bench repair``: the time from the death of a rank to the next sum of the survivors.

Each round starts a group and kills one of its ranks, a different one in each round, while all ranks do collectives. The
survivors call ``shrink`` when they get the error. A time is the time of the last survivor, in milliseconds.

Under a launcher, start one process on each host: each starts its part of the ranks, so that the launcher does not see
the deaths. The hosts must be network namespaces of one machine, which share a clock:

    ./launch_scripts/netns-hosts.sh 2 1 1gbit -- python -m dist_prims.bench repair --ranks 4
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import statistics
import struct
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommError
from ..rendezvous.detect_launcher import detect
from ..rendezvous.hosts import boot_id
from ..rendezvous.launcher_rendezvous import rendezvous_of
from ..rendezvous.network import LOOPBACK, own_address
from ..rendezvous.rank_values import from_rank_0
from ..rendezvous.secret import VARIABLE
from ..rendezvous.served import open_store, served_store
from ..repair import shrink
from .arguments import positive

__all__: list[str] = []

_BEFORE = 20  # collectives before the death
_TIMEOUT = 100.0  # seconds of a round
_MOMENTS = "error", "shrink has returned", "next all_reduce"  # until which the time from the death is measured


@dataclass(frozen=True)
class _Processes:
    """The processes that a launcher has started, one on each host, or this process alone."""

    number: int  # of this process
    count: int
    store: Any
    address: str  # where the ranks meet: a store, or a folder if there is one process only
    secret: str = field(repr=False)  # by which the ranks know each other

    def gather(self, key: str, value: Any) -> list[Any]:
        """The values of all processes; all of them call it with a key that they have not used before."""
        self.store.set(f"{key}/{self.number}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{each}")) for each in range(self.count)]


@dataclass(frozen=True)
class _Round:
    """One round, as the ranks need it."""

    number: int
    ranks: int
    victim: int
    host_names: list[str]  # by rank; empty if they are the hosts of the processes


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dist_prims.bench repair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=positive, default=4, help="ranks on all hosts together (4)")
    parser.add_argument("--hosts", type=positive, default=1, help="hosts that the ranks of this machine stand for (1)")
    parser.add_argument("--rounds", type=positive, default=50)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        return _run(parser, options, _join(folder))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, processes: _Processes) -> int:
    """Run all rounds. Every process that the launcher has started calls it."""
    if processes.count > 1 and options.hosts > 1:
        parser.error("under a launcher the hosts are those of the processes: omit --hosts")
    if len({*processes.gather("boot", boot_id())}) > 1:
        parser.error("the hosts must be network namespaces of one machine: clocks of several machines differ")
    hosts = max(options.hosts, processes.count)
    if options.ranks < max(2, hosts):
        parser.error(f"--ranks {options.ranks}: give at least 2, and one for each host")
    names = [f"host{rank * hosts // options.ranks}" for rank in range(options.ranks)] if options.hosts > 1 else []
    rounds = []
    for number in range(options.rounds):
        victim = number % options.ranks if hosts == 1 or options.ranks > 2 else 1
        of_survivors = _times_of_ranks(_Round(number, options.ranks, victim, names), processes)
        rounds.append([max(times) for times in zip(*of_survivors, strict=True)])
    if processes.number == 0:
        _print(f"{options.ranks} ranks, {hosts} hosts, {options.rounds} rounds", rounds)
    processes.gather("end", None)  # the first process serves the store
    return 0


def _join(folder: str) -> _Processes:
    """Meet the other processes of the launcher; the first one serves a store for the ranks."""
    launcher = detect()
    if launcher.size == 1:
        return _Processes(0, 1, dist.HashStore(), folder, _new_secret())
    meeting = rendezvous_of(launcher, _TIMEOUT)
    count = len(meeting.hosts)

    def of_first(key: str, make: Any) -> str:
        return from_rank_0(meeting.store, meeting.rank, count, key, make)

    address, secret = of_first("store", lambda: served_store(own_address())[1]), of_first("secret", _new_secret)
    return _Processes(meeting.rank, count, meeting.store, address, secret)


def _new_secret() -> str:
    return os.environ.get(VARIABLE) or secrets.token_hex(16)


def _times_of_ranks(round: _Round, processes: _Processes) -> list[list[float]]:
    """Run the ranks of this process; return the times of all ranks that survive, here and elsewhere."""
    first, last = (round.ranks * each // processes.count for each in (processes.number, processes.number + 1))
    context = multiprocessing.get_context("fork")
    started = []
    try:
        for rank in range(first, last):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(round, rank, processes, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((rank, process, ours))
        own = [_outcome(rank, ours) for rank, _, ours in started if rank != round.victim]
        return [times for part in processes.gather(f"times/{round.number}", own) for times in part]
    finally:
        for _, process, ours in started:
            process.kill()
            process.join()
            ours.close()


def _outcome(rank: int, reports: Connection) -> list[float]:
    """The times that a rank reports."""
    if not reports.poll(_TIMEOUT):
        raise TimeoutError(f"rank {rank} has not ended its round within {_TIMEOUT:g} s")
    try:
        times: list[float] = reports.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} has failed; see its output") from None
    return times


def _run_rank(round: _Round, rank: int, processes: _Processes, reports: Connection) -> None:
    """The program of a forked rank."""
    try:
        reports.send(_measure(round, rank, processes))
        signal.pause()  # the parent kills it when all ranks have their times
    finally:
        os._exit(1)


def _measure(round: _Round, rank: int, processes: _Processes) -> list[float]:
    """The times of one rank from the death to each of the ``_MOMENTS``, in milliseconds."""
    # 1. Make the group, and do some collectives.
    torch.set_num_threads(1)
    os.environ[VARIABLE] = processes.secret
    if round.host_names:
        os.environ.update(DIST_PRIMS_HOST_ID=round.host_names[rank], MASTER_ADDR=LOOPBACK)
    store: Any
    if processes.count == 1:
        store = dist.FileStore(f"{processes.address}/{round.number}", round.ranks)
    else:
        store = dist.PrefixStore(f"round{round.number}", open_store(processes.address, round.ranks, _TIMEOUT))
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("dist_prims", store=store, rank=rank, world_size=round.ranks, timeout=timeout)
    tensor = torch.ones(1000)
    for _ in range(_BEFORE):
        dist.all_reduce(tensor.fill_(1))
    # 2. The victim dies; its note says when. The others go on until they get the error.
    if rank == round.victim:
        store.set("death", struct.pack("d", time.monotonic()).hex())
        os.kill(os.getpid(), signal.SIGKILL)
    times = [_time_of_error(tensor)]
    # 3. Repair, and add again.
    shrink()
    times.append(time.monotonic())
    dist.all_reduce(tensor.fill_(1))
    times.append(time.monotonic())
    if not (tensor == round.ranks - 1).all():
        raise RuntimeError(f"rank {rank}: the sum of {round.ranks - 1} survivors is {tensor[0].item()}")
    [death] = struct.unpack("d", bytes.fromhex(store.get("death").decode()))
    return [(moment - death) * 1e3 for moment in times]


def _time_of_error(tensor: torch.Tensor) -> float:
    try:
        while True:
            dist.all_reduce(tensor.fill_(1))
    except CommError:
        return time.monotonic()


def _print(title: str, rounds: list[list[float]]) -> None:
    print(f"# {title}: milliseconds after SIGKILL")
    for name, times in zip(_MOMENTS, zip(*rounds, strict=True), strict=True):
        ordered = sorted(times)
        print(f"{name:20} median {statistics.median(ordered):7.1f}   least {ordered[0]:7.1f}   most {ordered[-1]:7.1f}")
