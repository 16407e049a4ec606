"""Executor of a plan's actions, independent of how tensors move between stages.

Ranks as processes and devices of one process differ only in how a tensor moves from one stage to the next. The rest is
the same for both and is here: micro-batches, their share in the loss, metrics, times of actions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ...collectives.flat import split_evenly
from ...schedules.pipelines import Action, PipelinePlan, Row, pipeline_plan
from ...tracing import format as fmt
from ...tracing import recorder
from .averaging import AverageOnce
from .loss_weights import Objective, Part
from .outside_gradients import Leaves, give_back
from .shared_tensors import SharedTensor, refuse_trained
from .stage import StageWorker, Tensors, as_tuple

__all__: list[str] = []

_Owner = TypeVar("_Owner", bound="Owner")


def make_plan(plan: str | PipelinePlan, ranks: int, num_microbatches: int | None, stages: int | None) -> PipelinePlan:
    """The plan of a name, or the plan itself if it fits; proved before it is used."""
    if isinstance(plan, str):
        if stages is not None and stages % ranks:
            raise ValueError(
                f"pipeline: {stages} stages cannot be shared evenly among {ranks} ranks; choose another number"
            )
        plan = pipeline_plan(
            plan, ranks, 2 * ranks if num_microbatches is None else num_microbatches, stages and stages // ranks
        )
    for what, has, given in (
        ("ranks", plan.ranks, ranks),
        ("num_microbatches", plan.num_microbatches, num_microbatches),
        ("stages", plan.stages, stages),
    ):
        if given is not None and has != given:
            raise ValueError(f"pipeline: the plan {plan.name} is for {what}={has}, and here {what}={given}")
    plan.verify()
    return plan


def in_order(plan: PipelinePlan) -> list[Action]:
    """All actions in one order, about the order of time, in which each comes after what it needs.

    >>> [str(action)[:1] for action in in_order(pipeline_plan("1f1b", ranks=2, num_microbatches=1))]
    ['F', 'F', 'B', 'B']
    """
    rows = sorted(plan.cost().rows, key=lambda row: (row.end, row.rank))
    return [Action(row.kind, row.stage, row.micro) for row in rows]


def message_to(plan: PipelinePlan, action: Action) -> tuple[str, int, int] | None:
    """The destination of an action's result: "F" or "B", and the stage and micro-batch that need it."""
    kind, stage, micro = action
    if kind == "F":
        return ("F", stage + 1, micro) if stage + 1 < plan.stages else None
    return ("B", stage - 1, micro) if kind != "W" and stage > 0 else None


def is_done(action: Action, learn: bool, num_microbatches: int) -> bool:
    """Whether a batch of ``num_microbatches`` needs the action; ``learn``: with its backward."""
    return action.micro < num_microbatches and (learn or action.kind == "F")


def parts(batch: Tensors, num_microbatches: int, what: str) -> list[Tensors]:
    """A batch as micro-batches, whose sizes differ by one at most; of a batch of fewer items, as many as it has items.

    >>> parts((torch.arange(5),), 2, "inputs")
    [(tensor([0, 1]),), (tensor([2, 3, 4]),)]
    >>> parts((torch.arange(2),), 4, "inputs")
    [(tensor([0]),), (tensor([1]),)]
    """
    sizes = [len(each) if each.dim() else 0 for each in batch]
    if not sizes or min(sizes) != max(sizes):
        raise ValueError(
            f"pipeline: the {what} hold {sizes or 'no'} items; each tensor must hold the same number of them"
        )
    if not sizes[0]:
        raise ValueError(f"pipeline: the {what} hold 0 items; a batch has at least one: skip it on every rank")
    lengths = split_evenly(sizes[0], min(num_microbatches, sizes[0]))
    return list(zip(*(torch.split_with_sizes(each, lengths) for each in batch), strict=True))


class Batch:
    """The data of one step: the micro-batches as far as this rank needs them, and the results.

    A batch of fewer items than the plan has micro-batches has one of each item. Every rank leaves out the actions of
    the other micro-batches. The remaining actions do not depend on them, so the plan's proof holds.
    """

    def __init__(self, learn: bool, count: int, num_microbatches: int) -> None:
        self.learn = learn
        self.count = count
        self.lengths = split_evenly(count, min(num_microbatches, count))  # of the micro-batches
        self.inputs: Leaves | None = None
        self.targets: Leaves | None = None
        self.parts: list[tuple[Part, ...]] = []  # of each micro-batch, in the loss and in every metric
        self.found: dict[int, list[Any]] = {}  # the parts of the loss and the metrics of each micro-batch
        self.sums: torch.Tensor | None = None  # the loss and the metrics
        self.outputs: dict[int, Tensors] = {}  # of each micro-batch
        self.result: Tensors | None = None  # the outputs of the batch
        self.wants_gradient = False  # a stage before the last one
        self.has_gradient = False  # the loss of some micro-batch that counts
        self.backwards = 0  # of the last stage

    @classmethod
    def of(cls, inputs: Any, learn: bool, num_microbatches: int) -> Batch:
        """The batch where its inputs are."""
        whole = as_tuple(inputs, "the batch of inputs")
        cut = parts(whole, num_microbatches, "inputs")
        batch = cls(learn, len(whole[0]), num_microbatches)
        batch.inputs = Leaves(whole, cut, learn, apart=True)
        return batch

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches there are."""
        return len(self.lengths)

    def has(self, action: Action) -> bool:
        """Whether an action of the plan is to be done for this batch."""
        return is_done(action, self.learn, self.num_microbatches)


class Job:
    """Executes the actions of a rank's stages, one :class:`Batch` at a time."""

    def __init__(
        self,
        plan: PipelinePlan,
        stages: Mapping[int, torch.nn.Module],
        objective: Objective,
        checkpoint: bool,
        shared: Sequence[SharedTensor] = (),
    ) -> None:
        last = plan.stages - 1
        self.plan, self.stages = plan, stages
        self.workers = {
            stage: StageWorker(module, stage, objective.module if stage == last else None)
            for stage, module in stages.items()
        }
        self.module = torch.nn.ModuleList(
            each for worker in self.workers.values() for each in worker.trained.children()
        )
        self.objective = objective
        self.average = AverageOnce({stage: worker.trained for stage, worker in self.workers.items()})
        self.rows: list[Row] = []
        self.record = False
        self._shared = shared
        self.check_shared()
        self._again = self._to_compute_again(plan) if checkpoint else set()

    @staticmethod
    def _to_compute_again(plan: PipelinePlan) -> set[Action]:
        """Forwards to recompute: not those whose backward follows at once, where recomputing would save no memory."""
        again = set()
        for actions in plan.actions:
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                at_once = following is not None and following.kind != "F" and following[1:] == action[1:]
                if action.kind == "F" and not at_once:
                    again.add(action)
        return again

    def begin(self, batch: Batch) -> None:
        """Begin a step with a batch, whose number of micro-batches is known."""
        every = (action for actions in self.plan.actions for action in actions)
        self.average.expect(action for action in every if action.stage in self.workers and batch.has(action))

    def do(self, action: Action, incoming: Tensors, batch: Batch) -> Tensors:
        """Do an action with the tensors it needs, and return its result."""
        begin = self._now() if self.record else 0.0
        traced = recorder.started()
        worker = self.workers[action.stage]
        if action.kind == "F":
            if batch.inputs is not None and action.stage == 0:
                incoming = incoming or batch.inputs.micro_batches[action.micro]
            outgoing = self._forward(worker, action, incoming, batch)
        elif action.kind == "W":
            worker.weights(action.micro)
            outgoing = ()
        else:
            outgoing = worker.backward(action.micro, incoming)
            batch.backwards += action.stage == self.plan.stages - 1
            if batch.backwards == batch.num_microbatches:
                self._check_gradient(batch)  # before an averager sends the gradients of any stage
            if action.stage == 0 and batch.inputs is not None:
                batch.inputs.set_gradients(action.micro, outgoing)
        if traced:
            recorder.record(fmt.ACTION, traced, name=str(action))
        if self.record:
            self.rows.append(Row(*action, begin, self._now(), self.plan.rank_of[action.stage]))
        self.average.done(action)
        return outgoing

    def set_targets(self, batch: Batch, targets: Any, device: torch.device | None = None) -> None:
        """Set the targets of a batch, on a device, and compute the share of each micro-batch in the loss."""
        self.objective.check()
        batch.targets = _targets_of(targets, batch, device)
        batch.parts = self.objective.parts(batch.lengths, batch.targets.micro_batches)

    def finish(self, batch: Batch) -> None:
        """Sum the loss and the metrics, join the outputs, and pass the gradients of inputs and targets to the
        program."""
        if batch.outputs:
            outputs = [batch.outputs[micro] for micro in range(batch.num_microbatches)]
            batch.result = tuple(torch.cat(each) for each in zip(*outputs, strict=True))
        if batch.found:
            device = batch.found[0][0].device
            numbers = [
                torch.as_tensor(each, dtype=torch.float64, device=device)
                for found in batch.found.values()
                for each in found
            ]
            batch.sums = torch.stack(numbers).view(len(batch.found), -1).sum(0)
        give_back(*(each for each in (batch.inputs, batch.targets) if each is not None and batch.learn))

    def _check_gradient(self, batch: Batch) -> None:
        """RuntimeError if the loss has no gradient, though something could learn; a frozen model runs without one."""
        trained = self.workers[self.plan.stages - 1].trained
        learns = batch.wants_gradient or any(each.requires_grad for each in trained.parameters())
        if learns and not batch.has_gradient:
            raise RuntimeError(
                "pipeline: the loss does not require grad in any micro-batch, so step() would train nothing; compute "
                "it from the output of the last stage, without detach() and no_grad(), or call evaluate()"
            )

    def check_shared(self) -> None:
        """ValueError if training changes a tensor of which other ranks have a copy."""
        refuse_trained("pipeline", self._shared, "give both to one stage, or to stages of one rank")

    def check_step(self) -> None:
        """RuntimeError where gradients are switched off; ValueError if a shared tensor is trained now."""
        self.check_shared()
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "pipeline: step() computes gradients, and is called under torch.no_grad() or inference_mode(); call "
                "evaluate() for the loss alone, or step() outside of it"
            )

    def commit(self, batch: Batch) -> None:
        """End a step that has succeeded."""
        for worker in self.workers.values():
            worker.statistics.commit()
        if batch.learn:
            self.objective.end_step()

    def forget(self) -> None:
        """Discard the state of a step that failed."""
        for worker in self.workers.values():
            worker.forget()

    def _forward(self, worker: StageWorker, action: Action, inputs: Tensors, batch: Batch) -> Tensors:
        _, stage, micro = action
        last = stage == self.plan.stages - 1
        if not batch.learn:
            with torch.no_grad(), worker.statistics.collected():
                outputs = worker.infer(inputs)
                if last and batch.targets is not None:
                    self._evaluate(outputs, micro, batch)
        else:
            batch.wants_gradient |= last and any(each.requires_grad for each in inputs)
            loss = partial(self._evaluate, micro=micro, batch=batch) if last else None
            split = Action("W", stage, micro) in self.plan.places
            outputs = worker.forward(micro, inputs, split=split, again=action in self._again, loss=loss)
        if last and not batch.learn and batch.targets is None:
            batch.outputs[micro] = outputs
        return () if last else outputs

    def _evaluate(self, outputs: Tensors, micro: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The root of the backward of a micro-batch, and its gradient; its part of loss and metrics is kept."""
        assert batch.targets is not None
        parts = batch.parts[micro]
        root, grad, found = self.objective(outputs, batch.targets.micro_batches[micro], parts, self._known)
        batch.has_gradient |= root.requires_grad and parts[0].share != 0
        batch.found[micro] = found  # the same if a forward is computed again
        return root, grad

    def _known(self) -> Iterator[torch.Tensor]:
        """The leaves that a loss may reach: parameters, and the inputs of stages, which a stage may keep."""
        yield from self.module.parameters()
        for worker in self.workers.values():
            yield from worker.inputs()

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the recorded time is the time of the kernel's end, not of its launch
        return time.perf_counter()


class Owner:
    """Base of Pipeline and DevicePipeline: access to the modules of the stages here."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.plan, self.stages = job.plan, job.stages
        self.measured: dict[str, torch.Tensor] = {}

    def _measure(self, sums: torch.Tensor) -> None:
        """Set the loss and the metrics of a batch."""
        values = sums.to(torch.get_default_dtype()).unbind()
        self.measured = dict(zip(("loss", *self._job.objective.metrics), values, strict=True))

    @property
    def module(self) -> torch.nn.ModuleList:
        """The trained modules here: the stages, and behind the last one the loss, if it is a module."""
        return self._job.module

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the trained modules here, each once."""
        return self.module.parameters()

    def train(self: _Owner, mode: bool = True) -> _Owner:
        """Set the trained modules here to training, or to evaluation."""
        self.module.train(mode)
        return self

    def eval(self: _Owner) -> _Owner:
        """Set the trained modules here to evaluation."""
        return self.train(False)

    @property
    def record(self) -> bool:
        """Whether the time of each action is recorded; on CUDA recording synchronises devices."""
        return self._job.record

    @record.setter
    def record(self, value: bool) -> None:
        self._job.record = value


def from_first(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of time, with times from the beginning of the first."""
    rows = sorted(rows, key=lambda row: row.begin)
    return [row._replace(begin=row.begin - rows[0].begin, end=row.end - rows[0].begin) for row in rows]


def _targets_of(targets: Any, batch: Batch, device: torch.device | None) -> Leaves:
    """The targets of every micro-batch, as further arguments of loss and metrics; none if there are none."""
    if targets is None:
        return Leaves((), [()] * batch.num_microbatches)
    found = as_tuple(targets, "the targets")
    cut = parts(found, batch.num_microbatches, "targets")
    if len(found[0]) != batch.count:
        raise ValueError(f"pipeline: {len(found[0])} targets for {batch.count} inputs; every input has one")
    if device is not None:
        cut = [tuple(each.to(device) for each in micro) for micro in cut]
    return Leaves(found, cut, batch.learn)
