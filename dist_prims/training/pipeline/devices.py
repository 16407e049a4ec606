"""A pipeline whose stages are on several devices of one process: the same plan, the same work, no messages.

Calls to CUDA return before they are done, so one thread that goes through the plan in the order of time keeps all
devices busy. Tensors are copied between devices on streams of their own, concurrently with computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ...schedules.pipelines import PipelinePlan, Row
from .action_executor import Batch, Job, Owner, in_order, make_plan, message_to, times_from_first
from .loss_weights import Function, Objective
from .stage import Tensors

__all__: list[str] = []


class DevicePipeline(Owner):
    """Stages of a model, which are moved to ``devices`` by the plan; the other arguments are as for Pipeline.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> loss = torch.nn.functional.mse_loss
    >>> pipeline = DevicePipeline(list(model), devices=["cpu", "cpu"], loss=loss, num_microbatches=2)
    >>> loss = pipeline.step(torch.ones(4, 2), torch.ones(4, 1))
    >>> torch.allclose(loss, torch.nn.functional.mse_loss(model(torch.ones(4, 2)), torch.ones(4, 1)))
    True
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        plan: str | PipelinePlan = "1f1b",
        *,
        devices: Sequence[torch.device | str],
        loss: Function | None = None,
        metrics: Mapping[str, Function] | None = None,
        num_microbatches: int | None = None,
        reduction: str = "mean",
        loss_weight: Callable[..., Any] | None = None,
        scaler: Any = None,
        checkpoint: bool = False,
    ) -> None:
        plan = make_plan(plan, len(devices), num_microbatches, len(stages))
        self._device_of = [torch.device(devices[rank]) for rank in plan.rank_of]
        moved = {number: module.to(self._device_of[number]) for number, module in enumerate(stages)}
        objective = Objective(loss, metrics, reduction, loss_weight, scaler)
        if objective.module is not None:
            objective.module.to(self._device_of[-1])
        super().__init__(Job(plan, moved, objective, checkpoint))
        self._order = in_order(plan)
        self._copies = _Copies(self._device_of)

    def step(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Forward and backward of a batch: gradients are added to ``.grad``, and the loss is returned."""
        self._job.check_step()
        with self._job.average.step():
            self._run(True, inputs, targets)
        return self.measured["loss"]

    def evaluate(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """The loss of a batch, and its metrics in ``measured``, without a gradient."""
        self._run(False, inputs, targets)
        return self.measured["loss"]

    def forward(self, inputs: Any) -> Any:
        """The outputs for a batch, on the device of the last stage, without a gradient."""
        outputs = self._run(False, inputs, None, with_loss=False)
        return outputs[0] if outputs is not None and len(outputs) == 1 else outputs

    def rows(self) -> list[Row]:
        """What was recorded since the last call."""
        rows, self._job.rows = self._job.rows, []
        return times_from_first(rows)

    def _run(self, learn: bool, inputs: Any, targets: Any, with_loss: bool = True) -> Tensors | None:
        batch = Batch.of(inputs, learn, self.plan.num_microbatches)
        assert batch.inputs is not None
        self._job.begin(batch)
        if with_loss:
            self._job.set_targets(batch, targets, self._device_of[-1])
        # Tensors on their way to a device, by the kind of action, the stage and the micro-batch that need them.
        on_their_way = {
            ("F", 0, micro): self._copies.start(leaves, self._device_of[0])
            for micro, leaves in enumerate(batch.inputs.micro_batches)
        }
        try:
            for action in self._order:
                if not batch.has(action):
                    continue
                arriving = on_their_way.pop((action.kind[0], action.stage, action.micro), None)
                device = self._device_of[action.stage]
                with torch.cuda.device(device) if device.type == "cuda" else ExitStack():
                    incoming = self._copies.finish(arriving) if arriving else ()
                    outgoing = self._job.do(action, incoming, batch)
                    if to := message_to(self.plan, action):
                        on_their_way[to] = self._copies.start(outgoing, self._device_of[to[1]], apart=to[0] == "F")
            self._job.finish(batch)
        except BaseException:
            self._job.forget()
            raise
        self._job.commit(batch)
        if batch.sums is not None:
            self._measure(batch.sums)
        return batch.result


class _Copy(NamedTuple):
    tensors: Tensors
    device: torch.device
    done: torch.cuda.Event | None


class _Copies:
    """Copies between devices, on a stream for each device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {each: torch.cuda.Stream(each) for each in devices if each.type == "cuda"}

    def start(self, tensors: Tensors, device: torch.device, apart: bool = False) -> _Copy:
        """Begin to copy tensors to a device. ``apart``: tensors that are there already are copied, too: a stage that
        begins in place would change a tensor of the stage before."""
        moved = []
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for each in tensors:
            if each.device == device:
                moved.append(each.detach().clone() if apart else each.detach())
                continue
            streams = {on: self._stream(on) for on in (each.device, device) if on.type == "cuda"}
            with ExitStack() as stack:
                for on, stream in streams.items():
                    if on == each.device:
                        stream.wait_stream(torch.cuda.current_stream(on))  # it must have been computed
                        each.record_stream(stream)  # and not be freed before it is copied
                    stack.enter_context(torch.cuda.stream(stream))
                moved.append(each.detach().to(device, non_blocking=True))
        copies = tuple(copy.requires_grad_(each.requires_grad) for copy, each in zip(moved, tensors, strict=True))
        # The last stream is the stream of ``device``, or, if that is the CPU, of the device that the tensors come from.
        return _Copy(copies, device, list(streams.values())[-1].record_event() if streams else None)

    def finish(self, copy: _Copy) -> Tensors:
        """The copied tensors, for which the current stream of the device waits."""
        if copy.done is not None and copy.device.type == "cuda":
            stream = torch.cuda.current_stream(copy.device)
            stream.wait_event(copy.done)
            for each in copy.tensors:
                each.record_stream(stream)
        elif copy.done is not None:
            copy.done.synchronize()
        return copy.tensors

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
