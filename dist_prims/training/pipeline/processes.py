"""A pipeline over processes: each rank executes its part of a plan.

    ranks = dist.get_world_size()
    stages = split(model, ranks)                                    # or a list of your own
    pipeline = Pipeline(stages, "1f1b", loss=F.cross_entropy, num_microbatches=8)
    optimizer = torch.optim.SGD(pipeline.parameters())              # of the stages of this rank
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)                       # the same on every rank
        optimizer.step()

Every rank makes the same calls. The rank of the first stage reads the inputs and that of the last stage the targets;
what other ranks give is ignored, so all may give the whole batch. A rank that fails in its stage sends the
error instead of its results: all ranks raise, and the group can go on with the next step. A rank that leaves a call by
Ctrl-C, or by an error of communication, ends the pipeline: all ranks raise, and make it again.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...agreement import check_lists, gather_or_raise, gather_values
from ...collectives.traced_call import in_group
from ...errors import CommError, MismatchError
from ...schedules.pipelines import PipelinePlan, Row
from ...torch_compat import default_group
from ...tracing import recorder
from ...tracing.session import begin_from_environment
from .action_executor import Batch, Job, Owner, joined, make_plan, parts
from .given_stages import Stages, count_stages, describe, device_of, own_stages, shared_stages
from .loss_weights import Function, Objective
from .outside_gradients import Leaves
from .packet import FAILED, HEAD, WELL, WORD, PacketLayout, TensorSpec, head_of, read_head
from .stage import Tensors, as_tuple
from .transfer import ActionMessages, PipelineMessage, StageFailedError, Transfers

__all__: list[str] = []

_KINDS = 16  # of batches, whose layouts are remembered
_REMEDY = (
    "Give the same plan, num_microbatches, reduction, metrics, cut and type of device, and a scaler or none, on all"
)
_AGAIN = "make the pipeline again, on every rank of its group"


class Pipeline(Owner):
    """The stages of this rank, in a pipeline over the ranks of ``group``.

    A batch of fewer items than ``num_microbatches`` has a micro-batch for each item; the rest of the plan is left out.
    Running statistics of norms move once a batch, by those of the whole batch, when the step has succeeded.

    ``stages``: all stages in order, of which a rank keeps its own, or a dict {number: stage} of its own. ``plan``: a
    plan, or the name of a schedule of ``num_microbatches`` (2 a rank unless given). ``loss`` and each of
    ``metrics``: function(output, target) of a micro-batch; a stage that returns a tuple gives a tuple as output, and a
    tuple of targets is given as further arguments. ``reduction``: whether the loss is the "mean" or the "sum" over its
    micro-batch, and so over the batch. A mean is over the items; or over what counts for ``cross_entropy`` and
    ``nll_loss`` with ``ignore_index`` and class weights, as functions, ``functools.partial`` of them or torch's
    modules. ``loss_weight``: for another loss, function(target), what the mean of a micro-batch divides by. ``scaler``:
    a GradScaler; gradients are scaled, and the loss is returned as it is. ``checkpoint``: keep the input of a stage
    only, and compute the rest again in the backward. ``device``: where messages lie; by default that of the stages.

    >>> torch.manual_seed(0) and None
    >>> model = torch.nn.Linear(2, 1)
    >>> pipeline = Pipeline([model], loss=torch.nn.functional.mse_loss, num_microbatches=2)
    >>> loss = pipeline.step(torch.ones(4, 2), torch.ones(4, 1))
    >>> torch.allclose(loss, torch.nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 1)))
    True
    >>> pipeline.forward(torch.ones(4, 2)).shape
    torch.Size([4, 1])

    A loss that is a module is trained: on the rank of the last stage its parameters are in :meth:`parameters`. Inputs
    and targets that require a gradient get it, on the ranks that read them.

    >>> from torch.nn.functional import mse_loss
    >>> def masked(output, target):
    ...     return mse_loss(output[target > 0], target[target > 0])
    >>> pipeline = Pipeline([model], loss=masked, loss_weight=lambda target: (target > 0).sum(), num_microbatches=2)
    >>> inputs, targets = torch.ones(4, 2, requires_grad=True), torch.tensor([[1.0], [0.0], [2.0], [3.0]])
    >>> torch.allclose(pipeline.step(inputs, targets), masked(model(inputs), targets))
    True
    >>> inputs.grad.shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        stages: Stages,
        plan: str | PipelinePlan = "1f1b",
        *,
        loss: Function | None = None,
        metrics: Mapping[str, Function] | None = None,
        num_microbatches: int | None = None,
        reduction: str = "mean",
        loss_weight: Callable[..., Any] | None = None,
        scaler: Any = None,
        checkpoint: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._group = group or default_group()
        self._rank = self._group.rank()
        problem: Exception | None = None
        description = ""
        try:
            self.plan = make_plan(plan, self._group.size(), num_microbatches, count_stages(stages, self._group.size()))
            own = own_stages(stages, self.plan, self._rank)
            objective = Objective(loss, metrics, reduction, loss_weight, scaler)
            shared = shared_stages(stages, objective.module, self.plan)
            self._job = Job(self.plan, own, objective, checkpoint, shared)
            self._device = torch.device(device) if device is not None else device_of(own)
            description = describe(self.plan, objective, stages, self._device)
        except Exception as error:
            problem = error
        found = gather_or_raise("Pipeline", (description, secrets.token_hex(8)), problem, self._group)
        check_lists("Pipeline", [[each] for each, _ in found], _REMEDY, self._group)
        self.stages = own
        self.measured: dict[str, torch.Tensor] = {}
        self._transfers = Transfers(self.plan, self._group, self._device, f"Pipeline-{found[0][1]}")
        self._local: dict[PipelineMessage, Tensors] = {}
        self._slots: OrderedDict[Any, int] = OrderedDict()
        self._sums = PacketLayout([TensorSpec(torch.float64, (1 + len(objective.metrics),), (1,), False)])
        self._traced = 0  # calls
        self._unfinished: str | None = None  # the call that has begun, or that was left before all ranks had ended it

    def step(self, inputs: Any = None, targets: Any = None) -> torch.Tensor:
        """Forward and backward of a batch: gradients are added to ``.grad``, the loss is returned on every rank and the
        metrics are in ``measured``."""
        self._job.objective.start_scaler(self._device)
        with self._job.average.step():
            self._run("step", inputs, targets)
        return self.measured["loss"]

    def evaluate(self, inputs: Any = None, targets: Any = None) -> torch.Tensor:
        """The loss of a batch, and its metrics, without a gradient."""
        self._run("evaluate", inputs, targets)
        return self.measured["loss"]

    def forward(self, inputs: Any = None, everywhere: bool = False) -> Any:
        """The outputs for a batch, without a gradient: on the rank of the last stage, None on others; or on all."""
        outputs = self._run("forward everywhere" if everywhere else "forward", inputs, None)
        return outputs[0] if outputs is not None and len(outputs) == 1 else outputs

    def renegotiate(self) -> None:
        """Forget the layouts of stages' outputs; to be called after a change of the model, such as of its dtype."""
        self._slots.clear()

    def rows(self) -> list[Row]:
        """The rows recorded on all ranks since the last call, on rank 0; every rank calls it. Clocks are the hosts'."""
        mine, self._job.rows = self._job.rows, []
        found: list[list[Any]] = gather_values([tuple(row) for row in mine], self._group)
        rows = sorted((Row(*row) for rows in found for row in rows), key=lambda row: row.begin)
        start = rows[0].begin if rows else 0.0
        return [row._replace(begin=row.begin - start, end=row.end - start) for row in rows] if self._rank == 0 else []

    def _run(self, call: str, inputs: Any, targets: Any) -> Tensors | None:
        """Run a call. One that is left before the ranks know each other's success ends the pipeline on all ranks."""
        if self._unfinished is not None:
            self._transfers.end()
            raise CommError(
                f"rank {self._rank}: {call}() of the pipeline: {self._unfinished}() before it was left by an error or "
                f"an interrupt; {_AGAIN}"
            )
        self._unfinished = call
        try:
            result, failure = self._run_traced(call, inputs, targets)
        except StageFailedError:
            self._unfinished = None
            raise
        except BaseException as error:
            self._job.forget()
            self._local.clear()
            self._transfers.end(error)
            if not isinstance(error, Exception):
                raise
            kind = type(error) if isinstance(error, CommError) else CommError
            text = f"rank {self._rank}: {call}() of the pipeline did not end on all ranks: {error}; {_AGAIN}"
            raise kind(text) from error
        self._unfinished = None
        if failure is not None:
            raise failure
        return result

    def _run_traced(self, call: str, inputs: Any, targets: Any) -> tuple[Tensors | None, Exception | None]:
        begin_from_environment()
        if recorder.active is None:
            return self._run_plan(call, inputs, targets)
        self._traced += 1
        with in_group(self._group, "pipeline", self._traced):
            return self._run_plan(call, inputs, targets)

    def _run_plan(self, call: str, inputs: Any, targets: Any) -> tuple[Tensors | None, Exception | None]:
        """The result, and the failure of which all ranks know."""
        agreed, batch, slot, fresh, failure = self._open(call, inputs)
        steps = self._transfers.begin(batch.learn, batch.num_microbatches, slot, fresh)
        self._job.begin(batch)
        try:
            if failure is None and call == "step":
                self._job.check_step()
            if failure is None and call in ("step", "evaluate") and self._is_last:
                self._job.set_targets(batch, targets)
        except Exception as error:
            failure = self._failed(error, call)
        for step in steps:
            failure = self._do(step, batch, failure)
        if failure is None:
            try:
                self._job.finish(batch)
            except Exception as error:
                failure = self._failed(error, call)
        result, failure = self._close(agreed, batch, failure)
        self._local.clear()
        if failure is None:
            self._job.commit(batch)
            return result, None
        self._job.forget()
        if self._is_first and fresh:
            self._slots.popitem()
        return None, failure

    def _open(self, call: str, inputs: Any) -> tuple[str, Batch, int, bool, Exception | None]:
        """Begin a call: the first rank sends its call, which all ranks end, and what kind of batch comes."""
        first = self.plan.rank_of[0]
        if self._rank != first:
            status, text = read_head(self._transfers.receive(first, HEAD))
            if status == FAILED:
                raise StageFailedError(text)
            word = json.loads(text)
            failure: Exception | None = None
            if word["call"] != call:
                failure = MismatchError(
                    f"rank {self._rank}: {call}() of the pipeline, while rank {first} calls {word['call']}(); every "
                    "rank makes the same calls"
                )
            batch = Batch(word["learn"], word["count"], self.plan.num_microbatches)
            return word["call"], batch, word["slot"], word["fresh"], failure
        try:
            if inputs is None:
                raise ValueError(f"{call}() has no inputs; the rank of the first stage gives them")
            if call == "step":
                self._job.check_step()
            whole = as_tuple(inputs, "the batch of inputs")
            cut = parts(whole, self.plan.num_microbatches, "inputs")
            batch = Batch(call == "step", len(whole[0]), self.plan.num_microbatches)
            batch.inputs = Leaves(whole, cut, batch.learn, apart=True)
        except Exception as error:
            failed = self._failed(error, call)
            self._send_to_others(head_of(FAILED, str(failed)))
            self._transfers.finish()
            raise failed from error
        slot, fresh = self._slot(batch.learn, whole)
        word = {"call": call, "learn": batch.learn, "count": batch.count, "slot": slot, "fresh": fresh}
        self._send_to_others(head_of(WORD, json.dumps(word)))
        return call, batch, slot, fresh, None

    def _send_to_others(self, head: torch.Tensor) -> None:
        for rank in self._others:
            self._transfers.send(rank, head)

    def _slot(self, learn: bool, whole: Tensors) -> tuple[int, bool]:
        """The number of this kind of batch, and whether it is new."""
        kind = self._device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (learn, cast, tuple((each.dtype, each.shape, each.stride(), each.requires_grad) for each in whole))
        if key in self._slots:
            self._slots.move_to_end(key)
            return self._slots[key], False
        if len(self._slots) == _KINDS:
            self._slots.popitem(last=False)
        self._slots[key] = min(set(range(_KINDS)) - set(self._slots.values()))
        return self._slots[key], True

    def _do(self, step: ActionMessages, batch: Batch, failure: Exception | None) -> Exception | None:
        """Do one action, or, after a failure, send the error instead of its result."""
        action, needs, gives = step
        incoming: Tensors = ()
        try:
            if needs is not None:
                incoming = self._take(needs)
        except StageFailedError as error:
            failure = failure or error
        outgoing: Tensors = ()
        if failure is None:
            try:
                outgoing = self._job.do(action, incoming, batch)
            except Exception as error:
                failure = self._failed(error, str(action))
        if gives is None:
            return failure
        if gives.target == self._rank:
            self._local[gives] = outgoing
            return failure
        if failure is None:
            try:
                self._transfers.send_message(gives, outgoing)
            except CommError:
                raise
            except Exception as error:
                failure = self._failed(error, str(action))
        if failure is not None:
            self._transfers.send_failure(gives, str(failure))
        return failure

    def _take(self, message: PipelineMessage) -> Tensors:
        """The tensors that an action needs of another stage."""
        if message.source != self._rank:
            return self._transfers.receive_message(message)
        passed = self._local.pop(message)
        if message.kind != "F":
            return passed
        # A copy, since a stage that begins in place would change a tensor that the stage before keeps.
        return tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in passed)

    def _close(self, call: str, batch: Batch, failure: Exception | None) -> tuple[Tensors | None, Exception | None]:
        """End a call: the last rank collects failures, and sends the results."""
        last, outputs = self.plan.rank_of[-1], None
        results: Tensors = ()
        known = (
            None if call == "forward everywhere" else self._sums if call in ("step", "evaluate") else PacketLayout(())
        )
        failure = self._verdict(last, failure or self._transfers.unread())
        try:
            if self._rank != last:
                results = self._transfers.receive_tensors(last, known)
            elif failure is None:
                outputs = None if batch.learn or call == "evaluate" else joined(batch.outputs)
                if batch.sums is not None:
                    results = (batch.sums,)
                elif outputs is not None and call == "forward everywhere":
                    results = outputs
        except StageFailedError as error:
            failure = failure or error
        except Exception as error:
            if self._rank != last:
                raise
            failure = failure or self._failed(error, call)
        if self._rank == last:
            self._transfers.send_tensors(self._others, results, known, str(failure) if failure else None)
        self._transfers.finish()
        if failure is None and call in ("step", "evaluate"):
            values = results[0].to(torch.get_default_dtype()).unbind()
            self.measured = dict(zip(("loss", *self._job.objective.metrics), values, strict=True))
        return outputs if self._rank == last or call != "forward everywhere" else results, failure

    def _verdict(self, last: int, failure: Exception | None) -> Exception | None:
        """Collect failures on the last rank: by itself a failure in a backward reaches only earlier stages."""
        if self._rank != last:
            self._transfers.send(last, head_of(FAILED, str(failure)) if failure else head_of(WELL))
            return failure
        for rank in self._others:
            status, text = read_head(self._transfers.receive(rank, HEAD))
            if status == FAILED:
                failure = failure or StageFailedError(text)
        return failure

    def _failed(self, error: Exception, what: str) -> StageFailedError:
        failure = StageFailedError(f"rank {self._rank}: {what} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    @property
    def _is_first(self) -> bool:
        return self._rank == self.plan.rank_of[0]

    @property
    def _is_last(self) -> bool:
        return self._rank == self.plan.rank_of[-1]

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size()) if rank != self._rank]
