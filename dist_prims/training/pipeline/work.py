"""The work of a plan's actions, whoever brings what they need and takes what they give.

Ranks as processes and devices of one process differ in how a tensor comes from one stage to the next, and in nothing
else. What is here is the same for both: micro-batches, their share in the loss, metrics, what has been done when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...collectives.flat import split_evenly
from ...schedules.pipeline import Action, PipelinePlan, Row, pipeline_plan
from .worker import Tensors, Worker, as_tuple

__all__ = ["Batch", "Function", "Job", "Owner", "in_order", "joined", "make_plan", "message_to", "parts", "targets_of"]

_Owner = TypeVar("_Owner", bound="Owner")
Function = Callable[..., torch.Tensor]  # of the output, or the tuple of them, and the target


def make_plan(plan: str | PipelinePlan, ranks: int, micros: int | None, stages: int | None) -> PipelinePlan:
    """The plan of a name, or the plan itself if it fits; proved before anybody follows it."""
    if isinstance(plan, str):
        if stages is not None and stages % ranks:
            raise ValueError(
                f"pipeline: {stages} stages cannot be shared evenly among {ranks} ranks; cut the model anew"
            )
        plan = pipeline_plan(plan, ranks, 2 * ranks if micros is None else micros, stages and stages // ranks)
    for what, has, given in (
        ("ranks", plan.ranks, ranks),
        ("micros", plan.micros, micros),
        ("stages", plan.stages, stages),
    ):
        if given is not None and has != given:
            raise ValueError(f"pipeline: the plan {plan.name} is for {what}={has}, and here {what}={given}")
    plan.verify()
    return plan


def in_order(plan: PipelinePlan) -> list[Action]:
    """All actions in one order, about that of time, in which each comes after what it needs.

    >>> [str(action)[:1] for action in in_order(pipeline_plan("1f1b", ranks=2, micros=1))]
    ['F', 'F', 'B', 'B']
    """
    rows = sorted(plan.cost().rows, key=lambda row: (row.end, row.rank))
    return [Action(row.kind, row.stage, row.micro) for row in rows]


def message_to(plan: PipelinePlan, action: Action) -> tuple[str, int, int] | None:
    """For whom the result of an action is: "F" or "B", and stage and micro-batch that need it."""
    kind, stage, micro = action
    if kind == "F":
        return ("F", stage + 1, micro) if stage + 1 < plan.stages else None
    return ("B", stage - 1, micro) if kind != "W" and stage > 0 else None


def parts(batch: Tensors, micros: int, what: str) -> list[Tensors]:
    """A batch as micro-batches, whose sizes differ by one at most.

    >>> parts((torch.arange(5),), 2, "inputs")
    [(tensor([0, 1]),), (tensor([2, 3, 4]),)]
    """
    sizes = [len(each) if each.dim() else 0 for each in batch]
    if not sizes or min(sizes) != max(sizes):
        raise ValueError(
            f"pipeline: the {what} hold {sizes or 'no'} items; each tensor must hold the same number of them"
        )
    if sizes[0] < micros:
        raise ValueError(f"pipeline: the {what} hold {sizes[0]} items for {micros} micro-batches; take fewer (micros=)")
    lengths = split_evenly(sizes[0], micros)
    return list(zip(*(torch.split_with_sizes(each, lengths) for each in batch), strict=True))


class Batch:
    """What one step works on: the micro-batches as far as this rank needs them, and what comes of them."""

    def __init__(self, learn: bool, count: int) -> None:
        self.learn = learn
        self.count = count
        self.inputs: list[Tensors] = []
        self.targets: list[Any] | None = None
        self.sums: torch.Tensor | None = None  # of the loss and the metrics
        self.outputs: dict[int, Tensors] = {}


class Job:
    """What a rank does for its stages; a :class:`Batch` at a time."""

    def __init__(
        self,
        plan: PipelinePlan,
        workers: Mapping[int, Worker],
        loss: Function | None,
        metrics: Mapping[str, Function],
        reduction: str,
        checkpoint: bool,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"pipeline: reduction={reduction!r}; the loss is a 'mean' or a 'sum' over the batch")
        self.plan = plan
        self.workers = workers
        self.loss = loss
        self.metrics = dict(metrics)
        self.rows: list[Row] = []
        self.record = False
        self._reduction = reduction
        self._again = self._to_compute_again(plan) if checkpoint else set()

    @staticmethod
    def _to_compute_again(plan: PipelinePlan) -> set[Action]:
        """Forwards whose backward does not follow at once; there nothing would be saved."""
        again = set()
        for actions in plan.actions:
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                at_once = following is not None and following.kind != "F" and following[1:] == action[1:]
                if action.kind == "F" and not at_once:
                    again.add(action)
        return again

    def do(self, action: Action, incoming: Tensors, batch: Batch) -> Tensors:
        """Do an action with what has come for it; what it gives on."""
        begin = self._now() if self.record else 0.0
        worker = self.workers[action.stage]
        if action.kind == "F":
            outgoing = self._forward(worker, action, incoming or batch.inputs[action.micro], batch)
        elif action.kind == "W":
            worker.weights(action.micro)
            outgoing = ()
        else:
            last = action.stage == self.plan.stages - 1
            outgoing = worker.backward(action.micro, (None,) if last else incoming)
        if self.record:
            self.rows.append(Row(*action, begin, self._now(), self.plan.rank_of[action.stage]))
        return outgoing

    def check_loss(self) -> Function:
        """The loss; ValueError if there is none."""
        if self.loss is None:
            raise ValueError("pipeline: it was made without a loss; step() and evaluate() need one (loss=)")
        return self.loss

    def forget(self) -> None:
        """Let go of what a step has left that failed."""
        for worker in self.workers.values():
            worker.forget()

    def _forward(self, worker: Worker, action: Action, inputs: Tensors, batch: Batch) -> Tensors:
        _, stage, micro = action
        last = stage == self.plan.stages - 1
        if not batch.learn:
            with torch.no_grad():
                outputs = worker.infer(inputs)
                if last and batch.targets is not None and self.loss is not None:
                    self._judge(self.loss, outputs, micro, batch)
        else:
            loss = self._judged(micro, batch) if last else None
            split = Action("W", stage, micro) in self.plan.places
            outputs = worker.forward(micro, inputs, split=split, again=action in self._again, loss=loss)
        if last and not batch.learn and batch.targets is None:
            batch.outputs[micro] = outputs
        return () if last else outputs

    def _judged(self, micro: int, batch: Batch) -> Callable[[Tensors], torch.Tensor]:
        function, counted = self.check_loss(), False

        def loss(outputs: Tensors) -> torch.Tensor:
            nonlocal counted
            value = self._judge(function, outputs, micro, batch, count=not counted)
            counted = True  # a forward that is computed again is not counted again
            return value

        return loss

    def _judge(self, loss: Function, outputs: Tensors, micro: int, batch: Batch, count: bool = True) -> torch.Tensor:
        """This micro-batch's share in the loss of the batch; added up with its share in the metrics."""
        assert batch.targets is not None
        target, output = batch.targets[micro], outputs[0] if len(outputs) == 1 else outputs
        share = split_evenly(batch.count, self.plan.micros)[micro] / batch.count
        value = loss(output, *target)
        if value.dim():
            raise ValueError(f"pipeline: the loss is a tensor of shape {list(value.shape)}; it must be one number")
        value = value * share if self._reduction == "mean" else value
        if count:
            with torch.no_grad():
                found = [metric(output, *target) * share for metric in self.metrics.values()]
                numbers = [torch.as_tensor(each, device=value.device).detach().double() for each in (value, *found)]
                sums = torch.stack(numbers)
                batch.sums = sums if batch.sums is None else batch.sums + sums
        return value

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # who records wants to know when it was done, not when it was asked for
        return time.perf_counter()


class Owner:
    """Has stages, all or those of its rank, and a job to do with them."""

    stages: Mapping[int, torch.nn.Module]
    _job: Job

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of the stages that are here."""
        for module in self.stages.values():
            yield from module.parameters()

    def train(self: _Owner, mode: bool = True) -> _Owner:
        """Set the stages that are here to training, or to evaluation."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def eval(self: _Owner) -> _Owner:
        """Set the stages that are here to evaluation."""
        return self.train(False)

    @property
    def record(self) -> bool:
        """Whether it is noted when each action was done; on CUDA that makes ranks and devices wait for each other."""
        return self._job.record

    @record.setter
    def record(self, value: bool) -> None:
        self._job.record = value


def targets_of(targets: Any, micros: int, count: int) -> list[Tensors]:
    """The targets of every micro-batch, as further arguments of loss and metrics; none if there are none."""
    if targets is None:
        return [()] * micros
    found = as_tuple(targets, "the targets")
    cut = parts(found, micros, "targets")
    if len(found[0]) != count:
        raise ValueError(f"pipeline: {len(found[0])} targets for {count} inputs; every input has one")
    return cut


def joined(outputs: Mapping[int, Tensors]) -> Tensors:
    """The outputs of all micro-batches as those of the batch."""
    several: Sequence[Tensors] = [outputs[micro] for micro in range(len(outputs))]
    return tuple(torch.cat(each) for each in zip(*several, strict=True))
