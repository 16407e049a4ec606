"""``python -m dist_prims.bench steps``: measure the cost of communication in real use, beside the computation.

Two kinds of work: training steps of DistributedDataParallel, which hides part of its communication behind the backward
pass, and tokens of a tensor-parallel decoder, which can hide none. Each runs over a group of gloo, over a group of
dist_prims, and without communication; the additional time of a group is its exposed communication. The contenders run
in rotation; the time of a run is the time of its slowest rank, and the result is the median of the runs.

Training without communication is the model without DDP. The contender "noop" is DDP with a hook that sends nothing: it
shows which part of the exposed time is DDP's own work. "averager" is GradientAverager over the group of dist_prims.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ..training import GradientAverager
from .arguments import names_of, positive, run_on_ranks
from .report import environment, write_json

__all__: list[str] = []

_WAIT_SECONDS = 300.0  # limit of one wait for another rank
_NONE, _NOOP, _AVERAGER, _GROUPS = "none", "noop", "averager", ("gloo", "dist_prims")
_WORKS = ("ddp", "decode")
_HEAD = 64  # columns of an attention head
_VOCABULARY = 256


class MeasuredWork(Protocol):
    """The work that is timed: in each round every contender runs once, on the same data."""

    what: str  # its name in the report
    unit: str  # what the report gives times of: a step, a token
    units: int  # in one run
    contenders: list[str]
    barrier_group: dist.ProcessGroup | None  # its barrier separates the runs

    def prepare(self, round: int) -> None: ...

    def run(self, contender: str) -> None: ...

    def agree(self) -> bool:
        """Whether the results of the round are right on this rank. Every rank must call it."""
        ...


@dataclass
class Table:
    """The times of one kind of work; the same on every rank."""

    what: str
    unit: str
    units: int
    seconds: dict[str, list[float]]  # of each run, by contender
    agree: bool

    def median(self, contender: str) -> float:
        """The median seconds of a unit."""
        return statistics.median(self.seconds[contender]) / self.units

    def exposed(self, contender: str) -> float:
        """The seconds that communication adds to a unit."""
        return self.median(contender) - self.median(_NONE)

    def ratio(self, contender: str) -> float:
        """The exposed seconds divided by gloo's; NaN if gloo exposes none."""
        return self.exposed(contender) / self.exposed("gloo") if self.exposed("gloo") > 0 else float("nan")

    def as_dict(self) -> dict[str, Any]:
        contenders = {name: {"median": self.median(name), "exposed": self.exposed(name)} for name in self.seconds}
        return {**asdict(self), "contenders": contenders}


def measure(work: MeasuredWork, rounds: int, warmup: int = 2) -> Table:
    """Time ``rounds`` rounds of the work, after ``warmup`` rounds that are not timed. Every rank must call it."""
    # 1. In each round another contender is the first, so that none is always behind the same other one.
    seconds: dict[str, list[float]] = {name: [] for name in work.contenders}
    right = True
    for round in range(-warmup, rounds):
        work.prepare(round)
        first = round % len(seconds)
        for name in work.contenders[first:] + work.contenders[:first]:
            dist.barrier(group=work.barrier_group)
            began = time.perf_counter()
            work.run(name)
            if round >= 0:
                seconds[name].append(time.perf_counter() - began)
        right &= work.agree()
    # 2. A run takes as long as its slowest rank, and is right if all ranks find it right.
    slowest = torch.tensor([*seconds.values()], dtype=torch.float64)
    right_everywhere = torch.tensor(int(right))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(right_everywhere, dist.ReduceOp.MIN)
    by_name = dict(zip(seconds, slowest.tolist(), strict=True))
    return Table(work.what, work.unit, work.units, by_name, bool(right_everywhere))


class MeasuredTraining:
    """Steps of SGD on linear layers. All contenders begin each step with the same weights, and the gradients of the
    groups must agree with each other. In the first step, when all ranks still have the same model, the gradients must
    equal the mean of the gradients of single ranks."""

    what, unit, units = "ddp", "step", 1

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup | None], layers: int = 24, width: int = 1024, batch: int = 64
    ) -> None:
        self.names, self.barrier_group = [*groups], [*groups.values()][-1]
        self.contenders = [_NONE, _NOOP, *groups, _AVERAGER]
        self.models: dict[str, torch.nn.Module] = {_NONE: _layers(layers, width)}
        self.models[_NOOP] = without_sends = DistributedDataParallel(_layers(layers, width))
        without_sends.register_comm_hook(None, noop_hook)
        for name, group in groups.items():
            self.models[name] = DistributedDataParallel(_layers(layers, width), process_group=group)
        self.models[_AVERAGER] = _layers(layers, width)
        self.averager = GradientAverager(self.models[_AVERAGER], group=self.barrier_group)
        self.optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.01) for name, each in self.models.items()}
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.shape, self.first = (2, batch, width), True

    def prepare(self, round: int) -> None:
        self.input, self.target = torch.randn(self.shape, generator=self.random)
        for name in (*self.names[1:], _AVERAGER):  # rounding errors would grow from step to step
            for own, first in zip(self.models[name].parameters(), self.models[self.names[0]].parameters(), strict=True):
                own.data.copy_(first.data)

    def run(self, contender: str) -> None:
        self.optimizers[contender].zero_grad()
        torch.autograd.backward(functional.mse_loss(self.models[contender](self.input), self.target))
        self.optimizers[contender].step()

    def agree(self) -> bool:
        gradients = {name: _gradients(self.models[name]) for name in (*self.names, _AVERAGER)}
        expected = gradients[self.names[0]]
        if self.first:
            expected = _gradients(self.models[_NONE])
            for gradient in expected:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        self.first = False
        return all(_close(own, mean) for each in gradients.values() for own, mean in zip(each, expected, strict=True))


def _layers(layers: int, width: int) -> torch.nn.Sequential:
    """The same layers on every rank, initialized so that neither values nor gradients vanish."""
    random = torch.Generator().manual_seed(0)
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    for layer in linear:
        torch.nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=random)
        torch.nn.init.zeros_(layer.bias)
    return torch.nn.Sequential(*(part for layer in linear for part in (layer, torch.nn.ReLU())))


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def _close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare relative to the largest element: orders of addition differ, and rounding errors grow with the steps."""
    return bool((value - expected).abs().max() <= 1e-3 * expected.abs().max())


class Decoding:
    """Greedy decoding of a transformer, batch 1, whose heads and inner columns are split over the ranks: two
    all-reduces a layer, of ``4 * hidden`` bytes. Each run decodes ``tokens`` tokens behind a cache of ``context``
    tokens. The states of all ranks must have the same bits. Between the groups only the first state of a run is
    compared, because rounding may change the choice of a token."""

    what, unit = "decode", "token"

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup | None],
        layers: int = 8,
        hidden: int = 4096,
        heads: int = 1,  # of a rank
        inner: int = 128,  # of a rank
        context: int = 128,
        tokens: int = 16,
    ) -> None:
        self.names, self.barrier_group, self.groups = [*groups], [*groups.values()][-1], groups
        self.contenders, self.units, self.context = [_NONE, *groups], tokens, context
        self.embedding = torch.randn(_VOCABULARY, hidden, generator=torch.Generator().manual_seed(0))
        random = torch.Generator().manual_seed(1 + dist.get_rank())
        self.layers = [_Layer(hidden, heads, inner, context + tokens, random) for _ in range(layers)]
        self.token = 0
        self.states: dict[str, torch.Tensor] = {}

    def prepare(self, round: int) -> None:
        self.token = round % _VOCABULARY

    @torch.inference_mode()
    def run(self, contender: str) -> None:
        token, states = self.token, []
        for position in range(self.context, self.context + self.units):
            state = self.embedding[token]
            for layer in self.layers:
                state = state + self._sum(layer.attention(state, position), contender)
                state = state + self._sum(layer.perceptron(state), contender)
            token = int(functional.linear(_norm(state), self.embedding).argmax())
            states.append(state)
        self.states[contender] = torch.stack(states)

    def _sum(self, part: torch.Tensor, contender: str) -> torch.Tensor:
        if contender != _NONE:
            dist.all_reduce(part, group=self.groups[contender])
        return part

    def agree(self) -> bool:
        right = True
        for name in self.names:
            first = self.states[name].clone()
            dist.broadcast(first, 0)
            right &= torch.equal(first, self.states[name])
            right &= _close(self.states[name][0], self.states[self.names[0]][0])
        return right


class _Layer:
    """One rank's part of a layer: columns of the input matrices, rows of the output matrices, and its heads' cache."""

    def __init__(self, hidden: int, heads: int, inner: int, positions: int, random: torch.Generator) -> None:
        def matrix(rows: int, columns: int, parts: int = 1) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random) / math.sqrt(columns * parts)

        size = dist.get_world_size()
        self.heads = heads
        self.query_key_value = matrix(3 * heads * _HEAD, hidden)
        self.out = matrix(hidden, heads * _HEAD, size)
        self.up, self.down = matrix(inner, hidden), matrix(hidden, inner, size)
        self.keys, self.values = torch.randn(2, heads, positions, _HEAD, generator=random)

    def attention(self, state: torch.Tensor, position: int) -> torch.Tensor:
        """This rank's addend of the output."""
        projected = functional.linear(_norm(state), self.query_key_value).view(3, self.heads, 1, _HEAD)
        self.keys[:, position], self.values[:, position] = projected[1, :, 0], projected[2, :, 0]
        keys, values = self.keys[:, : position + 1], self.values[:, : position + 1]
        attended = functional.scaled_dot_product_attention(projected[0], keys, values)
        return functional.linear(attended.flatten(), self.out)

    def perceptron(self, state: torch.Tensor) -> torch.Tensor:
        """This rank's addend of the output."""
        return functional.linear(functional.silu(functional.linear(_norm(state), self.up)), self.down)


def _norm(state: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(state, state.shape)


_COLUMNS = {"what": 8, "contender": 12, "unit": 7, "ms": 10, "least ms": 10, "per s": 8, "exposed ms": 12, "vs gloo": 9}


def report(facts: Mapping[str, Any], tables: Iterable[Table]) -> str:
    """Format the tables with one row for each contender.

    >>> table = Table("ddp", "step", 1, {"none": [0.25], "gloo": [0.5], "dist_prims": [0.375]}, True)
    >>> print(report({"ranks": 2, "cores": 2}, [table]))
    # steps: ranks 2, cores 2
    # ms: median; exposed: median minus the median of none; vs gloo: exposed divided by gloo's
    #   what   contender   unit        ms  least ms   per s  exposed ms  vs gloo
         ddp        none   step   250.000   250.000     4.0           -        -
         ddp        gloo   step   500.000   500.000     2.0     250.000     1.00
         ddp  dist_prims   step   375.000   375.000     2.7     125.000     0.50
    # ddp: results agree
    """
    lines = ["# steps: " + ", ".join(f"{name} {value}" for name, value in facts.items())]
    lines.append("# ms: median; exposed: median minus the median of none; vs gloo: exposed divided by gloo's")
    lines.append("#" + "".join(name.rjust(width) for name, width in _COLUMNS.items())[1:])
    tables = list(tables)
    for table in tables:
        for name in table.seconds:
            median = table.median(name)
            least = min(table.seconds[name]) / table.units
            cells = [table.what, name, table.unit, f"{median * 1e3:.3f}", f"{least * 1e3:.3f}", f"{1 / median:.1f}"]
            cells += "-", "-"
            if name != _NONE:
                cells[-2:] = f"{table.exposed(name) * 1e3:.3f}", f"{table.ratio(name):.2f}"
            lines.append("".join(cell.rjust(width) for cell, width in zip(cells, _COLUMNS.values(), strict=True)))
    lines += [f"# {table.what}: results {'agree' if table.agree else 'DIFFER'}" for table in tables]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    return run_on_ranks(_bench, _parser().parse_args(arguments), wait_timeout=_WAIT_SECONDS)


def _bench(options: argparse.Namespace) -> int:
    """Run the benchmark on every rank; returns 1 if any result is wrong."""
    torch.set_num_threads(1)
    facts = environment()
    groups = {name: dist.new_group(backend=name, timeout=timedelta(seconds=_WAIT_SECONDS)) for name in _GROUPS}
    tables = []
    for what in options.what:
        work: MeasuredWork = MeasuredTraining(groups, width=options.width) if what == "ddp" else Decoding(groups)
        tables.append(measure(work, options.steps))
        del work  # frees a model for each contender
    if dist.get_rank() == 0:
        print(report(facts, tables), flush=True)
        if options.json:
            write_json(options.json, facts, tables=tables)
    return int(not all(table.agree for table in tables))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench steps", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, default=2, help="number of ranks to start without a launcher (2)")
    parser.add_argument(
        "--steps", type=positive, default=20, help="runs of each contender: 1 step or 16 tokens each (20)"
    )
    parser.add_argument("--what", type=names_of(_WORKS), default=list(_WORKS), help="ddp, decode or both (ddp,decode)")
    parser.add_argument(
        "--width", type=positive, default=1024, help="of the 24 layers of ddp: 1024 is 100 MB of gradients, 512 25 MB"
    )
    parser.add_argument("--json", type=Path, help="write all times")
    return parser
