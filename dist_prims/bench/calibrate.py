"""``python -m dist_prims.bench calibrate``: what a message and a byte cost within a host and between hosts, and how
well that foretells the time of every all_reduce algorithm.

The probes are plans like those that collectives follow, and run by the same executor: a few steps in which ranks
exchange a chunk and do nothing else. The time of a step is that of a call with many of them less that of one with none.

    probe                           by itself               all ranks at once
    exchange of 4 KB                alpha                   how many ranks really work at once (cores)
    exchange of much                beta (inside)         beta (of the links between hosts); to all other hosts: meeting
    the same, and add it            gamma
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..backend.multi_host import ASSUMED, Seats
from ..backend.tuning import CALIBRATION
from ..launch import init
from ..schedules.contract import contract
from ..schedules.cost import seconds
from ..schedules.native import to_native
from ..schedules.recommend import Candidate, recommend
from ..schedules.schedule import Schedule, Step, Steps
from ..schedules.topology import Topology
from .arguments import sizes

__all__ = ["main"]

Ints = NDArray[np.int64]
T = TypeVar("T")

_CPU = torch.device("cpu")
_SMALL, _LARGE = 4096, 4 << 20  # bytes of a message in a probe
_STEPS = {_SMALL: 32, _LARGE: 4}
_ROUNDS = 9


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench calibrate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=sizes, default="64K:64M/4", help="of the check (64K:64M/4)")
    parser.add_argument("--rounds", type=int, default=5, help="of the check; 0: only calibrate")
    parser.add_argument("--output", type=Path, default=CALIBRATION.file(), help="the file that groups read")
    given = parser.parse_args(arguments)
    place = init("dist_prims", timeout=600)
    if dist.get_world_size() < 2:
        parser.error("one rank sends nothing: start it with 2 or more, torchrun ... -m dist_prims.bench calibrate")
    if problem := _agreed(_not_writable(given.output)):
        parser.error(problem)
    torch.set_num_threads(1)
    bench = _Bench(place.hosts)
    found = _calibrate(bench)
    if bench.speaks:
        print(f"# {', '.join(f'{key} {value}' for key, value in found.items())}")
        print(f"# written to {CALIBRATION.write(found, given.output)}", flush=True)
    if given.rounds:
        _check(bench, Topology.measured(bench.seats.hosts, found), found["call"], given.sizes, given.rounds)
    return 0


def _not_writable(path: Path | None) -> str:
    try:
        CALIBRATION.check_writable(path)
    except OSError as error:
        return str(error)
    return ""


class _Bench:
    """Runs an all_reduce of the default group by any plan, and times it."""

    def __init__(self, hosts: tuple[tuple[int, ...], ...]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.speaks = self.rank == 0
        names = [next(str(number) for number, ranks in enumerate(hosts) if rank in ranks) for rank in range(self.size)]
        self.seats = Seats.of(names)
        self.backend: Any = dist.distributed_c10d._get_default_group()._get_backend(_CPU)

    def plan(self, schedule: Schedule, segments: int = 1) -> None:
        """From now on every all_reduce follows it."""
        self.backend.pin([to_native(schedule, self.rank, 0, 1 << 62, "probe", segments, self.seats.rank_at)])

    def time(self, tensor: torch.Tensor) -> float:
        """Seconds of one call, of the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        self.backend.pin([])
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)

    def median(self, schedule: Schedule, nbytes: int) -> float:
        tensor = torch.zeros(nbytes // 4)
        found = []
        for _ in range(_ROUNDS):
            self.plan(schedule)
            found.append(self.time(tensor))
        return statistics.median(found[1:])


def _exchange(size: int, src: Ints | list[int], dst: Ints | list[int], steps: int, reduce: bool = False) -> Schedule:
    """Each of ``src`` sends its chunk to the one of ``dst`` beside it, so often; only its time counts."""

    nth = [list(dst[:number]).count(to) for number, to in enumerate(dst)]  # who gets several keeps them apart
    into = np.zeros(len(dst), np.int64) if reduce else 1 + np.array(nth, np.int64)
    scratch = 1 + max(nth, default=0)

    def make() -> Iterator[Step]:
        for _ in range(steps):
            yield Step(src, dst, chunk=0, into=into, reduce=reduce)

    return Schedule("all_reduce", "exchange", size, 1, contract("all_reduce", size, 1, scratch=scratch), Steps(make))


def _calibrate(bench: _Bench) -> dict[str, Any]:
    probes = _Probes(bench)
    hosts = bench.seats.hosts
    found: dict[str, Any] = {"call": probes.nothing, **ASSUMED}  # what cannot be measured here stays assumed
    if max(hosts) > 1:
        found |= probes.inside()
    if len(hosts) > 1:
        found |= probes.between()
    boots = [""] * bench.size
    dist.all_gather_object(boots, Path("/proc/sys/kernel/random/boot_id").read_text())
    found["one_machine"] = len(set(boots)) == 1 and len(hosts) > 1
    sharing = bench.size if found["one_machine"] else max(hosts)
    crowd = probes.crowd() / max(found["outer" if len(hosts) > 1 else "inner"]["alpha"], 1e-9)
    found["cores"] = min(os.cpu_count() or 1, max(1, round(sharing / max(crowd, 1.0))))
    return _agreed(found)


class _Probes:
    """Exchanges between seats."""

    def __init__(self, bench: _Bench) -> None:
        self.bench, self.hosts = bench, np.array(bench.seats.hosts)
        self.seats = np.arange(bench.size)
        self.first = np.cumsum((0, *self.hosts[:-1]))
        self.host = np.repeat(np.arange(len(self.hosts)), self.hosts)
        self.nothing = bench.median(_exchange(bench.size, [], [], 0), _SMALL)

    def step(self, src: Ints, dst: Ints, nbytes: int, reduce: bool = False) -> float:
        """Seconds of one step in which ``src`` send so much to ``dst``."""
        steps = _STEPS[nbytes]
        spent = self.bench.median(_exchange(self.bench.size, src, dst, steps, reduce), nbytes)
        return max(spent - self.nothing, 0.0) / steps

    def following(self, away: int) -> Ints:
        """For each seat the one beside it: on its own host (0), or so many hosts further."""
        to = (self.host + away) % len(self.hosts)
        seats: Ints = self.first[to] + (self.seats - self.first[self.host] + (away == 0)) % self.hosts[to]
        return seats

    def inside(self) -> dict[str, Any]:
        pair = self.first[int(self.hosts.argmax())] + np.arange(2)
        alpha, moved = self.step(pair, pair[::-1], _SMALL), self.step(pair, pair[::-1], _LARGE)
        folded = self.step(pair, pair[::-1], _LARGE, reduce=True)
        beta, gamma = max(moved - alpha, 0.0) / _LARGE, max(folded - moved, 0.0) / _LARGE
        return {"inner": {"alpha": alpha, "beta": beta}, "gamma": gamma}

    def between(self) -> dict[str, Any]:
        pair = self.first[:2]
        alpha = self.step(pair, pair[::-1], _SMALL)
        others = [self.following(away) for away in range(1, len(self.hosts))]
        # links are never so busy with one message as with those of all ranks
        beta = max(self.step(self.seats, others[0], _LARGE) - alpha, 0.0) / (_LARGE * int(self.hosts.max()))
        meeting = 0.0
        if len(others) > 1:
            everyone = self.step(np.tile(self.seats, len(others)), np.concatenate(others), _LARGE)
            meeting = max((everyone - alpha) / (_LARGE * int(self.hosts.max()) * len(others)) - beta, 0.0)
        return {"outer": {"alpha": alpha, "beta": beta}, "meeting": meeting}

    def crowd(self) -> float:
        """Seconds of a small message where all ranks send one at a time."""
        return self.step(self.seats, self.following(int(len(self.hosts) > 1)), _SMALL)


def _agreed(found: T) -> T:
    """What rank 0 found: the ranks must choose alike."""
    box = [found]
    dist.broadcast_object_list(box)
    return box[0]


@dataclass
class _Trial:
    nbytes: int
    candidate: Candidate
    predicted: float
    times: list[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.times)


def _check(bench: _Bench, topology: Topology, call: float, every: Sequence[int], rounds: int) -> None:
    trials = [
        _Trial(nbytes, each, call + float(seconds(each.schedule, nbytes, topology, each.segments)), [])
        for nbytes in every
        for each in recommend("all_reduce", nbytes, topology).candidates
    ]
    tensors = {nbytes: torch.zeros(nbytes // 4) for nbytes in every}
    for _ in range(rounds):
        for trial in trials:
            tensors[trial.nbytes].fill_(1.0)
            bench.plan(trial.candidate.schedule, trial.candidate.segments)
            trial.times.append(bench.time(tensors[trial.nbytes]))
    if bench.speaks:
        _print(trials, every)


def _print(trials: list[_Trial], every: Sequence[int]) -> None:
    print(f"# {'bytes':>9}  {'algorithm':52} {'predicted':>10} {'measured':>10}  error")
    for trial in trials:
        name = f"{trial.candidate.name} x{trial.candidate.segments}"
        error = trial.predicted / trial.measured - 1
        times = f"{trial.predicted * 1e3:8.2f} ms {trial.measured * 1e3:8.2f} ms"
        print(f"{trial.nbytes:11}  {name:52} {times} {error:+6.0%}")
    errors = [abs(trial.predicted / trial.measured - 1) for trial in trials]
    print(f"# median error {statistics.median(errors):.1%} over {len(trials)}")
    for nbytes in every:
        of = [trial for trial in trials if trial.nbytes == nbytes]
        best, chosen = min(of, key=lambda trial: trial.measured), min(of, key=lambda trial: trial.predicted)
        print(
            f"# {nbytes:9} bytes: chosen {chosen.candidate.name}, {chosen.measured / best.measured:.2f} times "
            f"the best, {best.candidate.name}"
        )
