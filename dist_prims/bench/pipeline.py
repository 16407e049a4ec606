"""``python -m dist_prims.bench pipeline``: train a ResNet that is cut over the ranks, by every pipeline schedule.

    contender         description
    alone             each rank trains the whole model on a batch of its own: the upper limit, without any waiting
    model_parallel    one micro-batch at a time through all stages and back: the baseline
    1f1b, zb_h1, ...  the registered schedules
    torch ...         torch.distributed.pipelining over the same group, with the same cut

All contenders use the same micro-batches and share one model. They run in rotation; the result is the median of the
slowest rank's times. Columns: *alone* is the rate of a schedule divided by the rate of the ranks alone; *speedup* is
the rate divided by model_parallel's; *plan* is the time predicted from the plan and the durations of its own
actions, divided by the measured time; *ceiling* is the share of time in which the plan lets the ranks compute; *held*
is the peak of the activations that rank 0 holds between forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from .._chart import line_chart
from ..agreement import broadcast_value
from ..models import resnet
from ..schedules.pipelines import PipelinePlan, Row, draw_gantt, pipeline_plan, pipeline_plans, predict
from ..training.pipeline import Pipeline
from ..training.pipeline.action_executor import cut_batch
from ..training.pipeline.profile import profile
from ..training.pipeline.split_model import balance, split
from .arguments import positive, run_on_ranks
from .steps import Table, measure

__all__: list[str] = []

_ALONE, _BASELINE = "alone", "model_parallel"
_THEIRS = {"torch gpipe": ScheduleGPipe, "torch 1f1b": Schedule1F1B}


def main(arguments: Sequence[str]) -> int:
    return run_on_ranks(bench, _parser().parse_args(arguments), "dist_prims")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dist_prims.bench pipeline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="resnet50", choices=[f"resnet{depth}" for depth in (18, 34, 50, 101, 152)])
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--image", type=positive, default=128, help="width and height of the images (128)")
    parser.add_argument("--microbatches", type=positive, default=8, help="micro-batches (8)")
    parser.add_argument("--schedules", default="", help="names of schedules (all)")
    parser.add_argument("--ranks", type=positive, default=2, help="number of ranks to start without a launcher (2)")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--sweep",
        type=_numbers,
        default=(),
        help="run 1f1b and zb_h1 with these numbers of micro-batches instead, e.g. 1,2,4,8,16",
    )
    parser.add_argument("--pictures", type=Path, help="folder for the plot of the sweep or the charts of plan and run")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


def bench(options: argparse.Namespace) -> int:
    """Run the benchmark on every rank; returns 1 if a loss or a gradient was wrong."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = getattr(resnet, options.model)(num_classes=1000)
    num_microbatches = max([options.microbatches] if not options.sweep else options.sweep)
    cuts = _Cuts(model, torch.randn(max(options.batch // num_microbatches, 1), 3, options.image, options.image))
    if options.pictures and dist.get_rank() == 0:
        options.pictures.mkdir(parents=True, exist_ok=True)
    return _sweep(options, model, cuts) if options.sweep else _compare(options, model, cuts)


class _Cuts:
    """The stages of a model for any number of stages; rank 0 measures the layers once."""

    def __init__(self, model: torch.nn.Module, sample: torch.Tensor) -> None:
        self.model = model
        measured = [cost.seconds for cost in profile(model, sample)] if dist.get_rank() == 0 else []
        self.seconds = broadcast_value(measured, 0, None)

    def __call__(self, stages: int) -> list[torch.nn.Module]:
        return [*split(self.model, stages, balance(self.seconds, stages))]


class _Work:
    """Steps of one model by all contenders, for :func:`.steps.measure`."""

    what, unit, units = "pipeline", "step", 1
    barrier_group: dist.ProcessGroup | None = None

    def __init__(self, options: Any, model: torch.nn.Module, plans: dict[str, PipelinePlan], cuts: _Cuts) -> None:
        self.model, self.num_microbatches, self.plans = model, options.microbatches, plans
        self.shape = (options.batch, 3, options.image, options.image)
        self.pipelines = {
            name: Pipeline(cuts(plan.stages), plan, loss=functional.cross_entropy) for name, plan in plans.items()
        }
        own = cuts(dist.get_world_size())[dist.get_rank()]
        stage = functools.partial(PipelineStage, own, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        self.theirs = {
            name: make(stage(), self.num_microbatches, loss_fn=functional.cross_entropy)
            for name, make in _THEIRS.items()
            if dist.get_world_size() > 1
            and self.num_microbatches >= dist.get_world_size()
            and options.batch % self.num_microbatches == 0
        }
        self.contenders = [_ALONE, *self.pipelines, *self.theirs]
        self.losses: dict[str, float] = {}
        self.gradients: dict[str, dict[str, torch.Tensor]] = {}
        self.random = torch.Generator().manual_seed(0)  # the same batch on every rank
        self.first = True

    def prepare(self, round: int) -> None:
        self.inputs = torch.randn(self.shape, generator=self.random)
        self.targets = torch.randint(1000, self.shape[:1], generator=self.random)
        self.model.zero_grad()

    def run(self, contender: str) -> None:
        self.model.zero_grad()
        if contender == _ALONE:
            loss = self._alone()
        elif contender in self.pipelines:
            loss = float(self.pipelines[contender].step(self.inputs, self.targets))
        else:
            loss = self._torch_schedule(self.theirs[contender])
        self.losses[contender] = loss
        if self.first:
            named = self.model.named_parameters()
            self.gradients[contender] = {name: each.grad.clone() for name, each in named if each.grad is not None}

    def _alone(self) -> float:
        total = 0.0
        for x, y in cut_batch((self.inputs, self.targets), self.num_microbatches, "inputs"):
            loss = functional.cross_entropy(self.model(x), y) * (len(x) / len(self.inputs))
            torch.autograd.backward(loss)
            total += loss.item()
        return total

    def _torch_schedule(self, schedule: Any) -> float:
        inputs = [self.inputs] if dist.get_rank() == 0 else []
        if dist.get_rank() < dist.get_world_size() - 1:
            schedule.step(*inputs)
            return math.nan  # only the last rank has the loss
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=self.targets, losses=losses)
        return statistics.fmean(each.item() for each in losses)

    def agree(self) -> bool:
        """Whether losses, and in the first round gradients, agree with the unsplit model's, within 1e-5."""
        expected = self.gradients.pop(_ALONE, {})
        close = all(abs(loss / self.losses[_ALONE] - 1) < 1e-5 for loss in self.losses.values() if not math.isnan(loss))
        for gradients in self.gradients.values():
            errors = (float((grad - expected[name]).norm() / expected[name].norm()) for name, grad in gradients.items())
            close &= all(error < 1e-5 for error in errors)
        self.gradients.clear()
        self.first = False
        return close


def _plans(text: str, num_microbatches: int) -> dict[str, PipelinePlan]:
    names = text.split(",") if text else pipeline_plans()
    return {
        name: pipeline_plan(name, dist.get_world_size(), num_microbatches)
        for name in dict.fromkeys([_BASELINE, *names])
    }


def _compare(options: argparse.Namespace, model: torch.nn.Module, cuts: _Cuts) -> int:
    plans = _plans(options.schedules, options.microbatches)
    work = _Work(options, model, plans, cuts)
    table = measure(work, options.rounds, warmup=1)
    recorded = {name: _recorded(work, name, options.rounds) for name in plans}
    held = {name: _held(work, name) for name in plans}
    if dist.get_rank() == 0:
        _print(options, table, work, recorded, held)
        for name, (rows, _) in recorded.items():
            if options.pictures:
                _draw(options.pictures / f"{name}.svg", plans[name], rows)
    return int(not table.agree)


def _recorded(work: _Work, name: str, rounds: int) -> tuple[list[Row], float]:
    """A recorded step, and the median over steps of (time predicted from its actions) / (measured time)."""
    pipeline, ratios, rows = work.pipelines[name], [], []
    for _ in range(rounds):
        work.model.zero_grad()
        pipeline.record = True
        dist.barrier()
        began = time.perf_counter()
        pipeline.step(work.inputs, work.targets)
        took = torch.tensor(time.perf_counter() - began)
        pipeline.record = False
        dist.all_reduce(took, dist.ReduceOp.MAX)
        rows = pipeline.rows()
        if rows:
            ratios.append(predict(work.plans[name], rows).makespan / float(took))
    return rows, statistics.median(ratios) if ratios else 0.0


def _draw(path: Path, plan: PipelinePlan, rows: Sequence[Row]) -> None:
    panels = {"planned, with the measured durations": predict(plan, rows).rows, "as it ran": rows}
    draw_gantt(path, panels, f"{plan.name}, {plan.ranks} ranks, {plan.num_microbatches} micro-batches")


@contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd keeps for the backward; the yielded function returns the peak."""
    storages: Counter[int] = Counter()
    now = most = 0

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal now, most
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if not storages[self.key]:
                now += tensor.untyped_storage().nbytes()
                most = max(most, now)
            storages[self.key] += 1

        def __del__(self) -> None:
            nonlocal now
            storages[self.key] -= 1
            if not storages[self.key]:
                now -= self.tensor.untyped_storage().nbytes()

    def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
        return tensor if tensor.is_leaf and tensor.requires_grad else Kept(tensor)

    def unpack(kept: torch.Tensor | Kept) -> torch.Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield lambda: most


def _held(work: _Work, name: str) -> int:
    """The peak of the bytes of activations that this rank holds in a step."""
    work.model.zero_grad()
    with _counting() as most:
        work.pipelines[name].step(work.inputs, work.targets)
    return most()


def _print(
    options: Any, table: Table, work: _Work, recorded: dict[str, tuple[list[Row], float]], held: dict[str, int]
) -> None:
    """Print the table of the contenders; ``recorded``: of each plan a step and a ratio; ``held``: bytes."""
    ranks = dist.get_world_size()
    print(
        f"# {options.model}, batch {options.batch} of {options.image}x{options.image}, {options.microbatches} "
        f"micro-batches, {ranks} ranks of one thread, torch {torch.__version__}\n"
        f"# {'':17}{'step':>9}{'rate':>10}{'alone':>8}{'speedup':>9}{'plan':>7}{'ceiling':>9}{'held':>9}"
    )
    alone, baseline = table.median(_ALONE), table.median(_BASELINE)
    for name in table.seconds:
        seconds = table.median(name)
        images = options.batch * (ranks if name == _ALONE else 1) / seconds
        line = f"{name:18} {seconds * 1e3:6.0f} ms {images:6.2f}/s {images * alone / (ranks * options.batch):8.3f}"
        line += f" {baseline / seconds:8.2f}" if name != _ALONE else ""
        if name in recorded:
            rows, ratio = recorded[name]
            line += f" {ratio:6.3f} {predict(work.plans[name], rows).used:8.3f} {held[name] / 2**20:5.0f} MB"
        print(line, flush=True)
    print(f"# losses and gradients {'agree' if table.agree else 'DO NOT AGREE'} with the unsplit model's")


def _sweep(options: argparse.Namespace, model: torch.nn.Module, cuts: _Cuts) -> int:
    """Sweep over the number of micro-batches, as in PyTorch's tutorial: alone, model parallel, and pipelines."""
    lines: dict[str, list[tuple[float, float]]] = {}
    agree = True
    for num_microbatches in options.sweep:
        options.microbatches = num_microbatches
        work = _Work(options, model, _plans(options.schedules or "1f1b,zb_h1", num_microbatches), cuts)
        table = measure(work, options.rounds, warmup=1)
        agree &= table.agree
        for name in table.seconds:
            rate = options.batch / table.median(name)
            lines.setdefault("one rank alone" if name == _ALONE else name, []).append(
                (options.batch / num_microbatches, rate)
            )
        if dist.get_rank() == 0:
            rates = ", ".join(f"{name} {points[-1][1]:.2f}" for name, points in lines.items())
            print(
                f"{num_microbatches:4} micro-batches of {options.batch / num_microbatches:g}: images a second: {rates}",
                flush=True,
            )
    if dist.get_rank() == 0 and options.pictures:
        title = (
            f"{options.model}, batch {options.batch} of {options.image}x{options.image}, {dist.get_world_size()} ranks"
        )
        lines = {name: sorted(points) for name, points in lines.items()}
        print(line_chart(options.pictures / "sweep.svg", title, "images of a micro-batch", "images a second", lines))
    return int(not agree)
