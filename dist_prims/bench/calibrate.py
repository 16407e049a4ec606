"""``python -m dist_prims.bench calibrate``: measure the costs of messages and bytes within a host and between hosts.

Then the predicted time of every all_reduce algorithm is compared with the measured time.

A *probe* is a schedule of a few steps in which ranks only exchange a chunk; the executor of the collectives runs it.
The time of a step is the time of a call with many steps minus the time of a call without steps, divided by the steps. A
*trial* is an all_reduce by a schedule of the comparison. Times are seconds, and of the slowest rank.

The costs: ``alpha`` is the time of a message, ``beta`` the time of a byte, ``gamma`` the time of adding a byte;
``inner`` within a host and ``outer`` between hosts; ``processor`` what a message between hosts takes of a core.

    probe                       measures
    256 bytes, one pair         alpha, within a host and between hosts
    256 bytes, all ranks        processor.alpha; the number of ranks that run at the same time (cores)
    256 KB, all ranks           processor.beta, if this takes longer than the link needs
    4 MB, one pair of a host    beta within a host; with a reduction: gamma
    4 MB, one host to another   beta of links between hosts: in one direction, so that the cores have least to do
    4 MB, all ranks             to all other hosts instead of to one: congestion

The probes are repeated in turn: another program that needs the cores for a moment then slows a few repetitions of each
probe, and not all of one. They are repeated again in turn with the algorithms of the comparison, and these repetitions
alone give the costs: the cores of a shared machine are not equally fast from minute to minute. Each call is made once
before it is timed: the first call by a pinned schedule converts it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..agreement import broadcast_value, gather_values
from ..backend.link_costs import ASSUMED
from ..backend.tuning import CALIBRATION
from ..launch import init
from ..rendezvous.hosts import boot_id
from ..schedules.contract import contract
from ..schedules.cost import seconds
from ..schedules.host_order import HostOrder
from ..schedules.program import RankSchedule
from ..schedules.recommend import recommend
from ..schedules.schedule import Schedule
from ..schedules.steps import Step, Steps
from ..schedules.topology import Topology
from ..torch_compat import backend_of, default_group
from .arguments import sizes

__all__: list[str] = []

Ints = NDArray[np.int64]
T = TypeVar("T")

_CPU = torch.device("cpu")
# Bytes of a message in a probe, and steps. A byte of a message of usual length takes a core longer than a byte of a
# stream of many MB, so `processor` is measured with a length that schedules use.
_SMALL, _USUAL, _LARGE = 256, 256 << 10, 4 << 20
_STEPS = {_SMALL: 32, _USUAL: 4, _LARGE: 2}
_ROUNDS = 9
_SIGNIFICANT = 1.05  # a smaller ratio of two times may be chance
_ROUNDS_AGAIN = 4  # times as many rounds in which the chosen schedule is compared with the best one


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench calibrate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=sizes, default="64K:64M/4", help="sizes of the comparison (64K:64M/4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the comparison; 0: calibrate only (5)")
    parser.add_argument("--output", type=Path, default=CALIBRATION.file(), help="the file that new groups read")
    options = parser.parse_args(arguments)
    placement = init("dist_prims", timeout=600)
    if dist.get_world_size() < 2:
        parser.error("one rank sends nothing: start it with 2 or more, torchrun ... -m dist_prims.bench calibrate")
    if problem := _from_rank_0(_write_problem(options.output)):
        parser.error(problem)
    torch.set_num_threads(1)
    # 1. The probes alone: first costs, by which the trials are chosen.
    bench = _Bench(placement.hosts)
    probes = _Probes(bench)
    bench.measure(probes.every, _ROUNDS)
    # 2. The probes again, in turn with the trials.
    trials: list[_Timed] = []
    if options.rounds:
        costs, hosts = probes.costs(), bench.order.hosts
        trials = [trial for nbytes in options.sizes for trial in _trials(costs, hosts, nbytes)]
        for probe in probes.every:
            probe.times.clear()
        repetitions = math.ceil(_ROUNDS / options.rounds)
        bench.measure([*repetitions * probes.every, *trials], options.rounds)
    # 3. The costs, and the comparison.
    costs = probes.costs()
    if bench.rank == 0:
        print(f"# {', '.join(f'{key} {value}' for key, value in costs.items())}")
        print(f"# written to {CALIBRATION.write(costs, options.output)}", flush=True)
    if trials:
        _compare(bench, costs, trials, options.rounds)
    return 0


def _write_problem(path: Path | None) -> str:
    """Why the file cannot be written; empty if it can."""
    try:
        CALIBRATION.check_writable(path)
    except OSError as error:
        return str(error)
    return ""


@dataclass
class _Timed:
    """An all_reduce that is timed: a trial, which has a name, or a probe, which has steps to divide its time by."""

    schedule: Schedule
    segments: int
    nbytes: int
    name: str = ""
    steps: int = 0
    times: list[float] = field(default_factory=list, init=False)  # of each repetition

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    def __str__(self) -> str:
        return f"{self.name} x{self.segments}"


class _Bench:
    """The default group's all_reduce, run by any schedule and timed. Every rank must make the same calls."""

    def __init__(self, hosts: tuple[tuple[int, ...], ...]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        self.order = HostOrder.of([host_of[rank] for rank in range(self.size)])
        self.backend: Any = backend_of(default_group(), _CPU)

    def measure(self, every: Sequence[_Timed], rounds: int) -> None:
        """Time each of these calls in each round; the seconds are added to its ``times``."""
        tensors = {nbytes: torch.zeros(nbytes // 4) for nbytes in {each.nbytes for each in every}}
        for number in range(rounds):
            # in another order each time, the same on all ranks: a call after one of another size takes longer
            for each in random.Random(number).sample(every, len(every)):
                tensors[each.nbytes].fill_(1.0)
                each.times.append(self.time(each.schedule, each.segments, tensors[each.nbytes]))

    def time(self, schedule: Schedule, segments: int, tensor: torch.Tensor) -> float:
        """The seconds of one call by the schedule on the slowest rank."""
        # 1. The backend uses the schedule for every all_reduce until step 3.
        pinned = RankSchedule.of(self.order.renumbered(schedule), self.rank, "probe", segments, high=1 << 62)
        self.backend.pin("all_reduce", "probe", lambda root: [pinned])
        # 2. The first call converts the schedule; the second one is timed.
        dist.all_reduce(tensor)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        # 3. The backend's own choice of a schedule again.
        self.backend.pin("all_reduce", "", None)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return float(spent)


def _repeat_step(size: int, src: Ints | list[int], dst: Ints | list[int], steps: int, reduce: bool = False) -> Schedule:
    """A schedule of ``size`` ranks in which src[i] sends its chunk to dst[i] in each of ``steps`` steps, where dst[i]
    adds it if ``reduce``, or else stores it in a spare chunk. Its result has no meaning."""
    # A rank with several senders has a spare chunk for each: how many earlier senders have the same receiver?
    earlier_senders = [list(dst[:number]).count(to) for number, to in enumerate(dst)]
    into = np.zeros(len(dst), np.int64) if reduce else 1 + np.array(earlier_senders, np.int64)
    scratch = 1 + max(earlier_senders, default=0)

    def make() -> Iterator[Step]:
        for _ in range(steps):
            yield Step(src, dst, chunk=0, into=into, reduce=reduce)

    return Schedule("all_reduce", "exchange", size, 1, contract("all_reduce", size, 1, scratch=scratch), Steps(make))


class _Probes:
    """The probes: exchanges between ranks, which are numbered host by host; and the costs that their times show."""

    def __init__(self, bench: _Bench) -> None:
        self.bench, self.hosts = bench, np.array(bench.order.hosts)  # the number of ranks of each host
        self.ranks = np.arange(bench.size)
        self.first = np.cumsum((0, *self.hosts[:-1]))  # the first rank of each host
        self.host = np.repeat(np.arange(len(self.hosts)), self.hosts)  # the host of each rank
        self.most = int(self.hosts.max())  # the ranks of the host with the most
        boots = gather_values(boot_id(), None)
        self.one_machine = len(set(boots)) == 1 and len(self.hosts) > 1
        self.probes = {"nothing": _Timed(_repeat_step(bench.size, [], [], 0), 1, _SMALL)}
        self._add("small from all", self.ranks, self._neighbours(int(len(self.hosts) > 1)), _SMALL)
        if self.most > 1:
            self._add_inside()
        if len(self.hosts) > 1:
            self._add_between()

    @property
    def every(self) -> list[_Timed]:
        return list(self.probes.values())

    def costs(self) -> dict[str, Any]:
        """The costs, the same on every rank; quantities that cannot be measured stay assumed."""
        costs: dict[str, Any] = {"call": self.probes["nothing"].seconds, **ASSUMED}
        if self.most > 1:
            costs |= self._inside()
        if len(self.hosts) > 1:
            costs |= self._between()
        # Ranks that share cores send slower together than one pair alone: the ratio shows how many run at a time.
        sharing = self.bench.size if self.one_machine else self.most
        alone = costs["outer" if len(self.hosts) > 1 else "inner"]["alpha"]
        slowdown = self._step("small from all") / max(alone, 1e-9)
        cores = min(os.cpu_count() or 1, max(1, round(sharing / max(slowdown, 1.0))))
        if len(self.hosts) > 1:
            by_link = costs["outer"]["alpha"] + _USUAL * self.most * costs["outer"]["beta"]
            small, usual = self._step("small from all"), self._step("usual from all")
            costs["processor"] = _processor(small, usual, by_link, cores / sharing)
        return _from_rank_0({**costs, "one_machine": self.one_machine, "cores": cores})

    def _step(self, name: str) -> float:
        """The seconds of one step of a probe."""
        probe = self.probes[name]
        return max(probe.seconds - self.probes["nothing"].seconds, 0.0) / probe.steps

    def _inside(self) -> dict[str, Any]:
        """The costs within a host."""
        alpha, copied, added = (self._step(name) for name in ("small inside", "large inside", "reduced inside"))
        beta, gamma = max(copied - alpha, 0.0) / _LARGE, max(added - copied, 0.0) / _LARGE
        return {"inner": {"alpha": alpha, "beta": beta}, "gamma": gamma}

    def _between(self) -> dict[str, Any]:
        """The costs between hosts. ``congestion``: what a byte costs more if a host sends to all others at once."""
        alpha, one_way, to_one = (self._step(name) for name in ("small between", "one way", "large to one"))
        beta = max(one_way - alpha, 0.0) / (_LARGE * self.most)
        congestion, receivers = 0.0, len(self.hosts) - 1
        if receivers > 1:
            congestion = max(self._step("large to each") / receivers - to_one, 0.0) / (_LARGE * self.most)
        return {"outer": {"alpha": alpha, "beta": beta}, "congestion": congestion}

    def _add(self, name: str, src: Ints, dst: Ints, nbytes: int, reduce: bool = False) -> None:
        """Add a probe in each step of which each rank of ``src`` sends ``nbytes`` to the rank in ``dst``."""
        steps = _STEPS[nbytes]
        schedule = _repeat_step(self.bench.size, src, dst, steps, reduce)
        self.probes[name] = _Timed(schedule, 1, nbytes, steps=steps)

    def _add_inside(self) -> None:
        pair = self.first[int(self.hosts.argmax())] + np.arange(2)
        self._add("small inside", pair, pair[::-1], _SMALL)
        self._add("large inside", pair, pair[::-1], _LARGE)
        self._add("reduced inside", pair, pair[::-1], _LARGE, reduce=True)

    def _add_between(self) -> None:
        pair = self.first[:2]
        self._add("small between", pair, pair[::-1], _SMALL)
        others = [self._neighbours(distance) for distance in range(1, len(self.hosts))]
        # only the messages of all ranks of a host together saturate its link
        from_one = self.host == self.hosts.argmax()
        self._add("one way", self.ranks[from_one], others[0][from_one], _LARGE)
        self._add("usual from all", self.ranks, others[0], _USUAL)
        self._add("large to one", self.ranks, others[0], _LARGE)
        self._add("large to each", np.tile(self.ranks, len(others)), np.concatenate(others), _LARGE)

    def _neighbours(self, distance: int) -> Ints:
        """For each rank a peer ``distance`` hosts further; 0: the next rank on its own host."""
        to = (self.host + distance) % len(self.hosts)
        peers: Ints = self.first[to] + (self.ranks - self.first[self.host] + (distance == 0)) % self.hosts[to]
        return peers


def _processor(small: float, usual: float, by_link: float, cores: float) -> dict[str, float]:
    """The time of a core for a message between hosts and for a byte of it, if each rank has ``cores``, 1 or less.

    ``small`` and ``usual``: the seconds in which all ranks together send a message of each length. If the link alone
    needs about as long for ``usual``, the cores are no limit, and their time for a byte is not known: 0.

    >>> {name: round(1e9 * value, 1) for name, value in _processor(80e-6, 3.5e-3, 2.2e-3, cores=0.5).items()}
    {'alpha': 40000.0, 'beta': 6.5}
    >>> _processor(80e-6, 2.25e-3, 2.2e-3, cores=0.5)["beta"]
    0.0
    """
    is_limit = usual > by_link * _SIGNIFICANT
    beta = max(usual - small, 0.0) * cores / _USUAL if is_limit else 0.0
    return {"alpha": small * cores, "beta": beta}


def _from_rank_0(value: T) -> T:
    """Rank 0's value on every rank, because all ranks must make the same choices."""
    return broadcast_value(value, 0, None)


def _trials(costs: Mapping[str, Any], hosts: tuple[int, ...], nbytes: int) -> list[_Timed]:
    """The schedules for a size, without times; first the schedule that is chosen by these costs."""
    candidates = recommend("all_reduce", nbytes, Topology.measured(hosts, costs)).candidates
    return [_Timed(each.schedule, each.segments, nbytes, each.name) for each in candidates]


def _compare(bench: _Bench, costs: Mapping[str, Any], trials: Sequence[_Timed], rounds: int) -> None:
    """Print predicted beside measured times, and the time of the chosen schedule divided by the best time."""
    if bench.rank == 0:
        _print(trials, Topology.measured(bench.order.hosts, costs), costs["call"])
    for nbytes in dict.fromkeys(trial.nbytes for trial in trials):
        of_size = [trial for trial in trials if trial.nbytes == nbytes]
        best = of_size[_from_rank_0(min(range(len(of_size)), key=lambda index: of_size[index].seconds))]
        # The least of many medians is partly luck. So the two schedules are measured again, and only that decides.
        chosen = _trials(costs, bench.order.hosts, nbytes)[0]
        best = replace(best)  # without its times
        bench.measure([chosen, best], _ROUNDS_AGAIN * rounds)
        if bench.rank == 0:
            ratio = statistics.median(map(float.__truediv__, chosen.times, best.times))
            print(f"# {nbytes:9} bytes: chosen {chosen}, {ratio:.2f} times the best, {best}", flush=True)


def _print(trials: Sequence[_Timed], topology: Topology, call: float) -> None:
    """Print a row for each trial; ``call``: the seconds of a call without steps, which a prediction does not
    contain."""
    print(f"# {'bytes':>9}  {'algorithm':52} {'predicted':>10} {'measured':>10}  error")
    errors = []
    for trial in trials:
        predicted = call + seconds(trial.schedule, trial.nbytes, topology, trial.segments)
        errors.append(predicted / trial.seconds - 1)
        times = f"{predicted * 1e3:8.2f} ms {trial.seconds * 1e3:8.2f} ms"
        print(f"{trial.nbytes:11}  {trial!s:52} {times} {errors[-1]:+6.0%}")
    print(f"# median error {statistics.median(map(abs, errors)):.1%} over {len(trials)}", flush=True)
