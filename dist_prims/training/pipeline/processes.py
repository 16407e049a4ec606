"""A pipeline over processes: each rank executes its part of a plan.

Every rank makes the same calls. The rank of the first stage reads the inputs, and the rank of the last stage the
targets; what other ranks give is ignored, so all may give the whole batch. A rank that fails in its stage sends the
error instead of its results: all ranks raise, and the group can go on with the next step. Ctrl-C or an error of
communication in a call ends the pipeline: all ranks raise, and make it again.

``Pipeline`` joins two objects. ``Job`` (action_executor.py) computes the actions of this rank. ``Transfers``
(transfer.py) carries the messages between stages, on the thread that calls it:

- its sends return at once; ``finish()`` waits for them at the end of a call;
- its receives wait for the message. They raise StageFailedError if the sender has sent an error instead, and another
  CommError after the timeout of the group, or if a rank has left the group;
- the messages of a plan cannot deadlock: all ranks post their receives in one order;
- ``end()`` leaves the group of the messages, so that all ranks that wait for this rank raise.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...agreement import check_lists, gather_values
from ...collectives.traced_call import in_group
from ...errors import CommError, MismatchError
from ...schedules.pipelines import PipelinePlan, Row
from ...torch_compat import default_group
from ...tracing import recorder
from ...tracing.session import begin_trace_of_environment
from ..state_transfer import transfer
from .action_executor import Batch, Job, Owner, make_plan, times_from_first
from .given_stages import Stages, count_stages, describe, device_of, own_stages, shared_stages
from .loss_weights import Function, Objective
from .packet import CALL, FAILED, HEAD, head_of, read_head
from .stage import Tensors
from .transfer import ActionMessages, StageFailedError, Transfers

__all__: list[str] = []

_T = TypeVar("_T")
_KINDS = 16  # the most kinds of batches of which the layouts of messages are remembered
_REMEDY = (
    "Give the same plan, num_microbatches, reduction, metrics, cut and type of device, and a scaler or none, on all"
)
_AGAIN = "make the pipeline again, on every rank of its group"


class Pipeline(Owner):
    """The stages of this rank, in a pipeline over the ranks of ``group``.

    A batch of fewer items than ``num_microbatches`` has a micro-batch for each item; the rest of the plan is left out.
    Running statistics of norms move once a batch, by the statistics of the whole batch, when the step has succeeded.

    - ``stages``: all stages in order, of which a rank keeps its own, or a dict {number: stage} of its own.
    - ``plan``: a plan, or the name of a schedule of ``num_microbatches`` (2 a rank unless given).
    - ``loss`` and each of ``metrics``: function(output, target) of a micro-batch; a stage that returns a tuple gives a
      tuple as output, and a tuple of targets is given as further arguments.
    - ``reduction``: whether the loss is the "mean" or the "sum" over its micro-batch, and so over the batch. A mean is
      over the items; or over what counts for ``cross_entropy`` and ``nll_loss`` with ``ignore_index`` and class
      weights, as functions, ``functools.partial`` of them or torch's modules.
    - ``loss_weight``: for another loss, function(target), what the mean of a micro-batch divides by.
    - ``scaler``: a GradScaler; gradients are scaled, and the loss is returned as it is.
    - ``checkpoint``: keep the input of a stage only, and compute the rest again in the backward.
    - ``group``: the ranks, by default all. ``device``: where messages lie; by default the stages' device.

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
        # 1. Make this rank's part. An error is kept until all ranks know of it, so that none waits.
        problem: Exception | None = None
        description = ""  # what all ranks must have in common
        try:
            plan = make_plan(plan, self._group.size(), num_microbatches, count_stages(stages, self._group.size()))
            own = own_stages(stages, plan, self._rank)
            objective = Objective(loss, metrics, reduction, loss_weight, scaler)
            shared = shared_stages(stages, objective.module, plan)
            super().__init__(Job(plan, own, objective, checkpoint, shared))
            self._device = torch.device(device) if device is not None else device_of(own)
            description = describe(plan, objective, stages, self._device)
        except Exception as error:
            problem = error
        # 2. Compare the descriptions of all ranks. The token of rank 0 names the group of the messages on all ranks.
        descriptions, tokens = zip(
            *gather_values((description, secrets.token_hex(8)), self._group, "Pipeline", problem), strict=True
        )
        check_lists("Pipeline", [[text] for text in descriptions], _REMEDY, self._group)
        self._transfers = Transfers(self.plan, self._group, self._device, f"Pipeline-{tokens[0]}")
        # 3. The state of the calls to come.
        self._kinds: dict[Any, int] = {}  # on the rank of the first stage: the number of each kind of batch
        self._traced = 0  # the number of calls that were traced
        self._failure: StageFailedError | None = None  # of this rank in the call that runs
        self._unfinished: str | None = None  # the call that runs, or that has failed before all ranks had ended it

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
        self._kinds.clear()

    def rows(self) -> list[Row]:
        """On rank 0, the actions of all ranks since the last call of ``rows()``, with times from the first one; [] on
        other ranks. Every rank calls it. Set ``record`` first. The clocks of two hosts may differ."""
        own_rows, self._job.rows = self._job.rows, []
        rows_of_ranks: list[list[Any]] = gather_values([tuple(row) for row in own_rows], self._group)
        return times_from_first([Row(*row) for rows in rows_of_ranks for row in rows]) if self._rank == 0 else []

    def _run(self, call: str, inputs: Any, targets: Any) -> Tensors | None:
        """Run a call of the program, "step", "evaluate", "forward" or "forward everywhere", and return the outputs of
        the batch, if this rank has them. An error in a call before all ranks know whether the others have succeeded
        ends the pipeline on all ranks."""
        if self._unfinished is not None:
            self._transfers.end()
            raise CommError(
                f"rank {self._rank}: {call}() of the pipeline: {self._unfinished}() before it was left by an error or "
                f"an interrupt; {_AGAIN}"
            )
        self._unfinished, self._failure = call, None
        begin_trace_of_environment()
        self._traced += recorder.active is not None
        try:
            with in_group(self._group, "pipeline", self._traced) if recorder.active is not None else nullcontext():
                return self._run_plan(call, inputs, targets)
        except BaseException as error:
            self._job.forget()
            if self._unfinished is None:  # all ranks raise; the pipeline can go on
                raise
            self._transfers.end(error)
            if not isinstance(error, Exception):
                raise
            kind = type(error) if isinstance(error, CommError) else CommError
            text = f"rank {self._rank}: {call}() of the pipeline did not end on all ranks: {error}; {_AGAIN}"
            raise kind(text) from error

    def _run_plan(self, call: str, inputs: Any, targets: Any) -> Tensors | None:
        last = self.plan.rank_of[-1]
        # 1. The rank of the first stage tells the others what kind of batch comes.
        if call == "step":
            self._attempt(call, self._job.check_step)
        batch, kind, is_new_kind = self._agree_on_batch(call, inputs)
        # 2. Each rank does its actions. After a failure it sends the error instead of its results.
        steps = self._transfers.begin(batch.learn, batch.num_microbatches, kind, is_new_kind)
        self._job.begin(batch)
        if self._rank == last and call in ("step", "evaluate"):
            self._attempt(call, self._job.set_targets, batch, targets)
        for step in steps:
            self._do_action(step, batch)
        self._attempt(call, self._job.finish, batch)
        # 3. All ranks learn of each other's failures: the messages of a backward carry a failure to earlier stages
        #    only.
        self._failure = self._failure or self._transfers.unread()
        own_text, own_sums = self._failure and str(self._failure), None if batch.sums is None else batch.sums.tolist()
        texts, sums = zip(*gather_values((own_text, own_sums), self._transfers.group), strict=True)
        self._transfers.finish()
        if failure := self._failure or next((StageFailedError(text) for text in texts if text), None):
            if is_new_kind and self._kinds:  # the layouts of this kind may not have reached all ranks: forget the kind
                self._kinds.popitem()
            self._unfinished = None
            raise failure
        # 4. The results.
        outputs = batch.result
        if call == "forward everywhere":
            outputs = transfer(outputs, last, self._transfers.group, take=True)
        if call in ("step", "evaluate"):
            self._measure(torch.tensor(sums[last], dtype=torch.float64, device=self._device))
        self._job.commit(batch)
        self._unfinished = None
        return outputs

    def _attempt(self, what: object, act: Callable[..., _T], *arguments: Any) -> _T | None:
        """Call ``act`` and return its result. An error becomes the failure of this rank, and after a failure ``act`` is
        not called. ``what``: the name of ``act`` in the error."""
        if self._failure is None:
            try:
                return act(*arguments)
            except Exception as error:
                self._failure = StageFailedError(f"rank {self._rank}: {what} failed: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
        return None

    def _agree_on_batch(self, call: str, inputs: Any) -> tuple[Batch, int, bool]:
        """The batch, the number of its kind, and whether the kind is new. The rank of the first stage finds these, and
        sends them to the other ranks."""
        # 1. The rank of the first stage sends a head (packet.py) with these values, or with its failure.
        first, count = self.plan.rank_of[0], self.plan.num_microbatches
        if self._rank == first:
            batch = self._attempt(call, Batch.of, inputs, call == "step", count)
            if batch is None:
                head = head_of(FAILED, str(self._failure))
            else:
                kind, is_new_kind = self._kind_of(batch)
                head = head_of(CALL, json.dumps([call, batch.learn, batch.count, kind, is_new_kind]))
            for rank in range(self._group.size()):
                if rank != first:
                    self._transfers.send(rank, head)
            if batch is not None:
                return batch, kind, is_new_kind
            self._transfers.finish()
            status, text = FAILED, ""
        # 2. The others receive the head, and compare the calls.
        else:
            status, text = read_head(self._transfers.receive(first, HEAD))
        if status == FAILED:
            self._unfinished = None
            raise self._failure or StageFailedError(text)
        called, learn, items, kind, is_new_kind = json.loads(text)
        if called != call:
            self._attempt(call, self._refuse_call, call, called)
        return Batch(learn, items, count), kind, is_new_kind

    def _refuse_call(self, call: str, called: str) -> None:
        raise MismatchError(
            f"rank {self._rank}: {call}() of the pipeline, while rank {self.plan.rank_of[0]} calls {called}(); every "
            "rank makes the same calls"
        )

    def _kind_of(self, batch: Batch) -> tuple[int, bool]:
        """The number of the kind of a batch, and whether the kind is new. Messages of batches of a kind have the same
        layouts."""
        assert batch.inputs is not None
        device = self._device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        specs = tuple(
            (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in batch.inputs.batch
        )
        kind = (batch.learn, cast, specs)
        if kind in self._kinds:
            return self._kinds[kind], False
        if len(self._kinds) == _KINDS:
            self._kinds.clear()
        self._kinds[kind] = len(self._kinds)
        return self._kinds[kind], True

    def _do_action(self, step: ActionMessages, batch: Batch) -> None:
        """Do one action, or, after a failure, send the error instead of its result."""
        action, needs, gives = step
        incoming: Tensors = ()
        try:
            if needs is not None:
                incoming = self._transfers.receive_message(needs)
        except StageFailedError as error:
            self._failure = self._failure or error
        outgoing = self._attempt(action, self._job.do, action, incoming, batch)
        if gives is not None:
            packed = self._attempt(action, self._transfers.pack, gives, outgoing)
            self._transfers.send_message(gives, packed, str(self._failure))
