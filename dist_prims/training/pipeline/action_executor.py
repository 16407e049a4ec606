"""Executor of a plan's actions, independent of how tensors move between stages.

A plan lists for each rank its actions: F, the forward of a stage for one micro-batch; B, its backward, or only the part
for the gradient of the input; W, the gradients of the weights that a B has left; BW, both at once. ``processes.py``
runs ranks as processes and ``devices.py`` as devices of one process. They differ only in how a tensor moves from one
stage to the next. The rest is the same for both and is here: micro-batches, their share in the loss, metrics, times of
actions.
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
from .loss_weights import Objective, Share
from .outside_gradients import Leaves, give_back
from .shared_tensors import SharedTensor, refuse_trained
from .stage import StageWorker, Tensors, as_tuple

__all__: list[str] = []

_Owner = TypeVar("_Owner", bound="Owner")


def make_plan(plan: str | PipelinePlan, ranks: int, num_microbatches: int | None, stages: int | None) -> PipelinePlan:
    """The plan of a name, or the plan itself; ValueError if it does not fit the other arguments or its proof fails.
    None stands for the plan's own number, or, for a name, for 2 micro-batches a rank and the schedule's number of
    stages."""
    if isinstance(plan, str):
        if stages is not None and stages % ranks:
            raise ValueError(
                f"pipeline: {stages} stages cannot be shared evenly among {ranks} ranks; choose another number"
            )
        plan = pipeline_plan(
            plan, ranks, 2 * ranks if num_microbatches is None else num_microbatches, stages and stages // ranks
        )
    for what, of_plan, here in (
        ("ranks", plan.ranks, ranks),
        ("num_microbatches", plan.num_microbatches, num_microbatches),
        ("stages", plan.stages, stages),
    ):
        if here is not None and of_plan != here:
            raise ValueError(f"pipeline: the plan {plan.name} is for {what}={of_plan}, and here {what}={here}")
    plan.verify()
    return plan


def in_order(plan: PipelinePlan) -> list[Action]:
    """All actions in one order, about the order of time, in which each comes after what it needs."""
    rows = sorted(plan.cost().rows, key=lambda row: (row.end, row.rank))
    return [Action(row.kind, row.stage, row.micro) for row in rows]


def message_to(plan: PipelinePlan, action: Action) -> tuple[str, int, int] | None:
    """The destination of an action's result: "F" or "B", and the stage and micro-batch that need it."""
    kind, stage, micro = action
    if kind == "F":
        return ("F", stage + 1, micro) if stage + 1 < plan.stages else None
    return ("B", stage - 1, micro) if kind != "W" and stage > 0 else None


def is_needed(action: Action, learn: bool, num_microbatches: int) -> bool:
    """Whether a batch of ``num_microbatches`` needs the action; ``learn``: with its backward."""
    return action.micro < num_microbatches and (learn or action.kind == "F")


def cut_batch(batch: Tensors, num_microbatches: int, what: str) -> list[Tensors]:
    """Cut a batch into micro-batches whose sizes differ by one at most; a batch of fewer items has one for each item.
    ``what``: the name of the batch in an error.

    >>> cut_batch((torch.arange(5),), 2, "inputs")
    [(tensor([0, 1]),), (tensor([2, 3, 4]),)]
    >>> cut_batch((torch.arange(2),), 4, "inputs")
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
        self.learn = learn  # whether the step has a backward
        self.count = count  # items
        self.lengths = split_evenly(count, min(num_microbatches, count))  # of the micro-batches
        self.inputs: Leaves | None = None
        self.targets: Leaves | None = None
        self.shares: list[tuple[Share, ...]] = []  # of each micro-batch, its share in the loss and in every metric
        # of each micro-batch, what it adds to the loss and to every metric
        self.contributions: dict[int, list[Any]] = {}
        self.sums: torch.Tensor | None = None  # the loss and the metrics of the batch
        self.outputs: dict[int, Tensors] = {}  # of each micro-batch
        self.result: Tensors | None = None  # the outputs of the batch
        self.wants_gradient = False  # whether a stage before the last one needs the gradient of its output
        self.has_gradient = False  # whether the loss of a micro-batch that counts requires a gradient
        self.backwards = 0  # backward actions that the last stage has done

    @classmethod
    def of(cls, inputs: Any, learn: bool, num_microbatches: int) -> Batch:
        """The batch on the rank that has its inputs."""
        whole = as_tuple(inputs, "the batch of inputs")
        cut = cut_batch(whole, num_microbatches, "inputs")
        batch = cls(learn, len(whole[0]), num_microbatches)
        batch.inputs = Leaves(whole, cut, learn, apart=True)
        return batch

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches there are."""
        return len(self.lengths)

    def has(self, action: Action) -> bool:
        """Whether an action of the plan is to be done for this batch."""
        return is_needed(action, self.learn, self.num_microbatches)


class Job:
    """Executes the actions of a rank's stages, one :class:`Batch` at a time.

    Args:
        plan: of the pipeline; ``stages``: the stages here, by number.
        objective: loss and metrics, which only the last stage uses.
        checkpoint: keep the inputs of stages only, and compute the forward again in the backward.
        shared: tensors of which other ranks have a copy, and which must therefore not be trained.
    """

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
        self._recomputed = self._forwards_to_recompute(plan) if checkpoint else set()

    @staticmethod
    def _forwards_to_recompute(plan: PipelinePlan) -> set[Action]:
        """All forwards but those whose backward follows at once: to recompute these would save no memory."""
        recomputed = set()
        for actions in plan.actions:
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                at_once = following is not None and following.kind != "F" and following[1:] == action[1:]
                if action.kind == "F" and not at_once:
                    recomputed.add(action)
        return recomputed

    def begin(self, batch: Batch) -> None:
        """Begin a step with this batch: the averagers learn which actions of this rank will add to gradients."""
        every = (action for actions in self.plan.actions for action in actions)
        self.average.expect(action for action in every if action.stage in self.workers and batch.has(action))

    def do(self, action: Action, incoming: Tensors, batch: Batch) -> Tensors:
        """Do an action, and return its result.

        ``incoming``: of a forward the inputs, of a backward the gradients of the outputs; empty for the first stage,
        whose inputs are in the batch, and for the backward of the loss.
        """
        begin = self._now() if self.record else 0.0
        traced = recorder.started()
        # 1. The action itself.
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
        # 2. Its times, for a trace and for rows().
        if traced:
            recorder.record(fmt.ACTION, traced, name=str(action))
        if self.record:
            self.rows.append(Row(*action, begin, self._now(), self.plan.rank_of[action.stage]))
        # 3. An averager may send the gradients that are complete now.
        self.average.done(action)
        return outgoing

    def set_targets(self, batch: Batch, targets: Any, device: torch.device | None = None) -> None:
        """Set the targets of a batch, on a device, and compute the share of each micro-batch in the loss."""
        self.objective.check()
        batch.targets = _targets_of(targets, batch, device)
        batch.shares = self.objective.shares(batch.lengths, batch.targets.micro_batches)

    def finish(self, batch: Batch) -> None:
        """Sum the loss and the metrics, join the outputs, and pass the gradients of inputs and targets to the
        program."""
        if batch.outputs:
            outputs = [batch.outputs[micro] for micro in range(batch.num_microbatches)]
            batch.result = tuple(torch.cat(each) for each in zip(*outputs, strict=True))
        if batch.contributions:
            device = batch.contributions[0][0].device
            numbers = [
                torch.as_tensor(each, dtype=torch.float64, device=device)
                for of_micro_batch in batch.contributions.values()
                for each in of_micro_batch
            ]
            batch.sums = torch.stack(numbers).view(len(batch.contributions), -1).sum(0)
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
        """The forward of a stage, and behind the last stage loss and metrics; return what the next stage needs."""
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
            outputs = worker.forward(micro, inputs, split=split, again=action in self._recomputed, loss=loss)
        if last and not batch.learn and batch.targets is None:
            batch.outputs[micro] = outputs
        return () if last else outputs

    def _evaluate(self, outputs: Tensors, micro: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute loss and metrics of a micro-batch, and keep its contributions to those of the batch. Return the
        tensor from which its backward begins, and the gradient of that tensor."""
        assert batch.targets is not None
        shares, targets = batch.shares[micro], batch.targets.micro_batches[micro]
        root, grad, contributions = self.objective(outputs, targets, shares, self._known_leaves)
        batch.has_gradient |= root.requires_grad and shares[0].fraction != 0
        batch.contributions[micro] = contributions  # the same if a forward is computed again
        return root, grad

    def _known_leaves(self) -> Iterator[torch.Tensor]:
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


def times_from_first(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of time, with times from the beginning of the first."""
    rows = sorted(rows, key=lambda row: row.begin)
    return [row._replace(begin=row.begin - rows[0].begin, end=row.end - rows[0].begin) for row in rows]


def _targets_of(targets: Any, batch: Batch, device: torch.device | None) -> Leaves:
    """The targets of every micro-batch, on ``device``: arguments of loss and metrics behind the output; none for
    None."""
    if targets is None:
        return Leaves((), [()] * batch.num_microbatches)
    whole = as_tuple(targets, "the targets")
    cut = cut_batch(whole, batch.num_microbatches, "targets")
    if len(whole[0]) != batch.count:
        raise ValueError(f"pipeline: {len(whole[0])} targets for {batch.count} inputs; every input has one")
    if device is not None:
        cut = [tuple(each.to(device) for each in micro) for micro in cut]
    return Leaves(whole, cut, batch.learn)
