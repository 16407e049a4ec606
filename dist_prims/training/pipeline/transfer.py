"""Messages between the stages of a pipeline over processes: one a micro-batch, over any ``torch.distributed`` group.

A message carries the output of a stage to the next one ("F"), or its gradient back to the stage before ("B"). The plan
fixes which rank sends which message when, so every rank knows all messages beforehand. Four properties:

*Order.* Messages need no tags. All of them have one order, the order of the plan if every action takes one time unit,
and each rank posts its receives in that order: so the messages of a pair match, whatever the backend is. With NCCL,
where a send waits for its receiver and all transfers of a rank are in one queue, a rank that is about to send first
posts the receives that come earlier in the order. So nothing deadlocks: the first unfinished message of the order has
no other message in front of it, on either rank.

*Receipts.* A message from a rank shows which of its actions are done, and so which messages to that rank have been
used. Their buffers are free here without an acknowledgement.

*A group of their own.* A call that is left before the ranks know each other's success, as by Ctrl-C, leaves an unknown
number of messages. The rank then leaves the group: the other ranks raise at once, and a new pipeline has a new group
without old messages.

*Layouts.* The layout of a message is sent once for each kind of batch, and again when the first rank announces a new
kind; otherwise a message is its data alone. A few receives are posted ahead, to overlap with computation.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import CommError
from ...schedules.pipelines import Action, PipelinePlan
from ...torch_compat import message_device, timeout_of
from ...tracing import format as fmt
from ...tracing import recorder
from ..group_duplicates import duplicate, end_groups
from .action_executor import in_order, is_needed, message_to
from .packet import FAILED, HEAD, LAYOUT, Packet, PacketLayout, Pool, head_of, read_head, spec_of
from .stage import Tensors

__all__: list[str] = []

_TAG = 20_553  # beside the tags that a program may use in the same group
_AHEAD = 2  # receives that are posted before they are needed


class StageFailedError(CommError):
    """A rank of the pipeline failed in its part of a step; the group can go on with the next one.

    >>> import torch, dist_prims
    >>> def step_then_step():
    ...     def loss(output, target):
    ...         if target.sum() < 0:
    ...             raise ValueError("a negative target")
    ...         return (output - target).square().mean()
    ...     stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    ...     pipeline = dist_prims.Pipeline(stages, loss=loss, num_microbatches=2)
    ...     try:
    ...         pipeline.step(torch.ones(4, 2), -torch.ones(4, 2))
    ...     except StageFailedError as error:
    ...         text = str(error)
    ...     pipeline.step(torch.ones(4, 2), torch.ones(4, 2))  # the group can go on
    ...     return text
    >>> for text in dist_prims.spawn(step_then_step, 2, timeout=60):
    ...     print(text)
    rank 1: F(stage 1, micro-batch 0) failed: ValueError: a negative target
    rank 1: F(stage 1, micro-batch 0) failed: ValueError: a negative target
    """


class PipelineMessage(NamedTuple):
    """A message that a stage needs of another stage: "F", its input, or "B", the gradient of its output."""

    kind: str
    stage: int  # that needs it
    micro: int  # the number of the micro-batch
    source: int  # the rank that sends it
    target: int  # the rank of the stage


def messages(plan: PipelinePlan, learn: bool, num_microbatches: int | None = None) -> list[PipelineMessage]:
    """All messages of a step between ranks, in the order of the plan. ``learn``: with the backward;
    ``num_microbatches``: only the messages of the first micro-batches, for a batch that has so few."""
    results = _results(plan, learn, plan.num_microbatches if num_microbatches is None else num_microbatches)
    return [message for message in results.values() if message.source != message.target]


def _results(plan: PipelinePlan, learn: bool, num_microbatches: int) -> dict[Action, PipelineMessage]:
    """The message with the result of each action, which may go to a stage of the same rank."""
    results = {}
    for action in in_order(plan):
        if is_needed(action, learn, num_microbatches) and (to := message_to(plan, action)):
            results[action] = PipelineMessage(*to, plan.rank_of[action.stage], plan.rank_of[to[1]])
    return results


class ActionMessages(NamedTuple):
    """An action of a rank, the message that it needs, and the message with its result."""

    action: Action
    needs: PipelineMessage | None
    gives: PipelineMessage | None


class _Script:
    """What one rank does, sends and receives in a step with this number of micro-batches; ``learn``: with a
    backward."""

    def __init__(self, plan: PipelinePlan, rank: int, learn: bool, num_microbatches: int) -> None:
        # 1. The actions of the rank, in their order. An action "BW" needs the message "B".
        results = _results(plan, learn, num_microbatches)
        needs = {message[:3]: message for message in results.values()}
        self.actions = [
            ActionMessages(action, needs.get((action.kind[0], *action[1:])), results.get(action))
            for action in plan.actions[rank]
            if is_needed(action, learn, num_microbatches)
        ]
        # 2. The messages of the rank, in the order of the plan; ``turn`` is the place of each.
        own = [each for each in messages(plan, learn, num_microbatches) if rank in (each.source, each.target)]
        self.receives = [each for each in own if each.target == rank]
        self.sends = [each for each in own if each.source == rank]
        self.turn = {message: turn for turn, message in enumerate(own)}
        # 3. Receipts: which action of the receiver needs a message, and which action of the sender has made it.
        number_of = {(action.kind[0], *action[1:]): number for action, (_, number) in plan.places.items()}
        self.needed_at = {message: number_of[message[:3]] for message in own}
        self.made_at = {message: plan.places[action][1] for action, message in results.items()}


class _Transfer(NamedTuple):
    """A receive that is posted, with its buffer."""

    work: Any  # what torch has returned
    packet: Packet
    layout: PacketLayout
    failure: str | None = None  # the error, where a layout was expected


_Packed = tuple[Any, Any]  # layout and packet; for a stage of the same rank None and the tensors


class Transfers:
    """The messages of one rank, a step at a time. One thread calls it, the thread of the program.

    Args:
        plan: of the pipeline; ``group``: its ranks, every one of which makes Transfers.
        device: where messages lie.
        name: of the group for the messages, new and the same on all ranks.
    """

    def __init__(self, plan: PipelinePlan, group: dist.ProcessGroup, device: torch.device, name: str) -> None:
        # 1. The group of the messages.
        self.group = duplicate(group, name)
        self._device = device
        if device.type == "cuda":  # all ranks must make NCCL's first call in a group
            dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=self.group)
        self._owns_group = self.group is not group
        # No rank may leave the new group, as by Ctrl-C, while another rank still makes it.
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=message_device(group)), group=group)
        self._finalizer = weakref.finalize(self, end_groups, [self.group], group, os.getpid())
        self._finalizer.atexit = False
        if device.type != "cpu":  # with NCCL, ending a communicator is a collective: end() aborts it instead
            self._finalizer.detach()
        # 2. The state of all steps.
        self._queued = device.type == "cuda"  # NCCL: all transfers of a rank are in one queue
        self._timeout = timeout_of(group, device)
        self._plan = plan
        self._scripts: dict[tuple[bool, int], _Script] = {}  # by whether gradients are passed, and micro-batches
        self._layouts: dict[int, dict[tuple[int, int], PacketLayout]] = {}  # by kind of batch; by stage and micro-batch
        self._pool = Pool(device)
        self._local: dict[PipelineMessage, Tensors] = {}  # between two stages of this rank
        self._sending: list[tuple[PipelineMessage | None, Any, torch.Tensor]] = []  # message, work and its buffer
        self._unread: list[torch.Tensor] = []  # heads of messages, on CUDA, until unread()
        self.begin(True, plan.num_microbatches, 0, True)

    def begin(self, learn: bool, num_microbatches: int, kind_of_batch: int, is_new_kind: bool) -> list[ActionMessages]:
        """Begin a step, and return the actions of this rank in it.

        Args:
            learn: whether the step has a backward; ``num_microbatches``: of the batch, the plan's or fewer.
            kind_of_batch: the number of the kind; batches of one kind have messages of the same layouts.
            is_new_kind: the layouts are not known yet: they are sent before the messages "F".
        """
        if (learn, num_microbatches) not in self._scripts:
            self._scripts[learn, num_microbatches] = _Script(self._plan, self.group.rank(), learn, num_microbatches)
        self._script = self._scripts[learn, num_microbatches]
        self._to_receive = deque(self._script.receives)
        self._to_send = deque(self._script.sends)
        self._posted: dict[PipelineMessage, _Transfer] = {}
        self._sends_layouts = is_new_kind
        if is_new_kind:
            self._layouts[kind_of_batch] = {}
            self._pool.clear()
        self._layout_of_input = self._layouts[kind_of_batch]  # by stage and micro-batch
        return self._script.actions

    def pack(self, message: PipelineMessage, tensors: Tensors) -> _Packed:
        """The tensors as they are sent; ValueError if their layout differs from the layout in earlier such batches."""
        if message.target == message.source:
            return None, tensors
        layout = PacketLayout(map(spec_of, tensors))
        if message.kind == "F" and not self._sends_layouts:
            known = self._layout_of_input[message[1:3]]
            if layout != known:
                raise ValueError(
                    f"the output of stage {message.stage - 1} is now {layout}, and was {known} for such "
                    "a batch; call renegotiate() on every rank after a change of the model"
                )
        if message.kind == "B":
            layout = self._layout(message)
        packet = self._pool.take(layout)
        packet.write(tensors)
        return layout, packet

    def send_message(self, message: PipelineMessage, packed: _Packed | None, failure: str) -> None:
        """Send what :meth:`pack` has returned, or, for None, the text of a failure instead of tensors."""
        if message.target == message.source:
            self._local[message] = packed[1] if packed else ()
            return
        self._post_receives_before(message)
        # 1. An error instead of a layout: the receiver expects no data.
        is_new = message.kind == "F" and self._sends_layouts
        if packed is None and is_new:
            self.send(message.target, head_of(FAILED, failure))
            return
        # 2. An error instead of data, in a message of the same length.
        if packed is None:
            data = self._pool.take(self._layout(message)).data
            data.zero_()  # a device that has not read the head computes with it
            data[:HEAD] = head_of(FAILED, failure)
        # 3. The data, after the layout if the receiver does not know it.
        else:
            layout, packet = packed
            data = packet.data
            if is_new:
                self._layout_of_input[message[1:3]] = layout
                self._send_layout(message.target, layout)
        self.send(message.target, data, message)

    def receive_message(self, message: PipelineMessage) -> Tensors:
        """Wait for a message and return its tensors; StageFailedError if it has an error instead."""
        if message.target == message.source:
            return self._receive_local(message)
        # 1. Post the receive, if it was not posted ahead, and wait.
        while message not in self._posted:
            self._post_receive()
        self._post_receives_ahead()
        transfer = self._posted.pop(message)
        self._wait(transfer.work)
        self._free_arrived(message)
        # 2. Does the message have an error? On CUDA to look would wait for the device; see unread().
        if transfer.failure is not None:
            raise StageFailedError(transfer.failure)
        packet = transfer.packet
        if self._queued:
            self._unread.append(packet.data[:HEAD])
        elif packet.status.item():
            raise StageFailedError(read_head(packet.data)[1])
        # 3. The tensors are views of the packet, and leaves of autograd on this rank.
        pairs = zip(packet.tensors, transfer.layout.specs, strict=True)
        return tuple(view.detach().requires_grad_(spec.needs_grad) for view, spec in pairs)

    def _receive_local(self, message: PipelineMessage) -> Tensors:
        """The tensors of a message from another stage of this rank."""
        passed = self._local.pop(message)
        if message.kind != "F":
            return passed
        # A copy, since a stage that begins in place would change a tensor that the stage before keeps.
        return tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in passed)

    def send(self, rank: int, data: torch.Tensor, message: PipelineMessage | None = None) -> None:
        """Begin to send bytes to a rank; :meth:`finish` waits. ``message``: of which they are the data."""
        data = data.to(self._device)
        self._sending.append((message, self._start_transfer(dist.isend, data, rank), data))

    def receive(self, rank: int, nbytes: int) -> torch.Tensor:
        """Receive bytes from a rank."""
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._wait(self._start_transfer(dist.irecv, data, rank))
        return data

    def unread(self) -> StageFailedError | None:
        """The failure in a head that was not read when its message came, as on CUDA."""
        unread, self._unread = self._unread, []
        failures = (_failure(head) for head in (torch.stack(unread).cpu() if unread else []))
        return next((StageFailedError(failure) for failure in failures if failure), None)

    def finish(self) -> None:
        """Wait for all sends of the step."""
        self._local.clear()  # what is left after a failure
        leaving, self._sending = self._sending, []
        for _, work, _ in leaving:
            self._wait(work)

    def end(self, error: BaseException | None = None) -> None:
        """Leave the group after a call that ``error`` has ended; ranks that wait for this one then raise at once."""
        self._posted.clear()
        self._sending.clear()
        self._local.clear()
        while error is not None:  # gloo closes a connection when nothing refers to a transfer
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_globals.get("__name__", "").startswith("dist_prims."):
                    with suppress(RuntimeError):  # of a frame that still runs
                        frame.clear()
            error = error.__context__
        if (group := self.__dict__.pop("group", None)) is not None and self._queued and self._owns_group:
            group.abort()
        del group
        self._finalizer()

    def _layout(self, message: PipelineMessage) -> PacketLayout:
        """The layout of a message; it is empty where a failure came instead of a layout."""
        if message.kind == "F":
            return self._layout_of_input[message[1:3]]
        # The gradients of a stage's output are gradients of the input of the stage behind it.
        return self._layout_of_input.get((message.stage + 1, message.micro), PacketLayout(())).gradients

    def _post_receives_before(self, message: PipelineMessage) -> None:
        """With NCCL, post the receives that come before a send in the order of the plan."""
        self._to_send.remove(message)
        while self._queued and self._to_receive and self._script.turn[self._to_receive[0]] < self._script.turn[message]:
            self._post_receive()

    def _post_receive(self) -> None:
        """Post the next receive; the layout comes first if it is not known."""
        message = self._to_receive.popleft()
        if self._sends_layouts and message.kind == "F":
            layout = self._receive_layout(message.source)
            if isinstance(layout, str):
                nothing = PacketLayout(())
                self._posted[message] = _Transfer(None, self._pool.take(nothing), nothing, layout)
                return
            self._layout_of_input[message[1:3]] = layout
        layout = self._layout(message)
        packet = self._pool.take(layout)
        self._posted[message] = _Transfer(self._start_transfer(dist.irecv, packet.data, message.source), packet, layout)

    def _post_receives_ahead(self) -> None:
        """Post a few receives before they are needed; with NCCL none that comes after a send in the order of the
        plan."""
        turn = self._script.turn
        # One posted receive is for the message that the rank needs next; the others are ahead.
        while self._to_receive and len(self._posted) <= _AHEAD and not self._sends_layouts:
            if self._queued and self._to_send and turn[self._to_send[0]] < turn[self._to_receive[0]]:
                return
            self._post_receive()

    def _free_arrived(self, message: PipelineMessage) -> None:
        """Free the buffers of the sent messages whose receiver has used them before it made ``message``."""
        script, sending = self._script, self._sending
        self._sending = []
        for sent, work, data in sending:
            if sent and sent.target == message.source and script.needed_at[sent] <= script.made_at[message]:
                self._wait(work)
            else:
                self._sending.append((sent, work, data))

    def _send_layout(self, rank: int, layout: PacketLayout) -> None:
        data = layout.encode()
        self.send(rank, head_of(LAYOUT, str(len(data))))
        self.send(rank, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _receive_layout(self, rank: int) -> PacketLayout | str:
        """The layout that a rank sends, or its error text."""
        status, text = read_head(self.receive(rank, HEAD))
        if status == FAILED:
            return text
        return PacketLayout.decode(bytes(self.receive(rank, int(text)).tolist()))

    def _start_transfer(self, kind: Any, data: torch.Tensor, peer: int) -> Any:
        """Post a transfer, and return its work. ``kind``: dist.isend or dist.irecv."""
        if self._queued:
            work = dist.batch_isend_irecv([dist.P2POp(kind, data, group=self.group, group_peer=peer)])[0]
        else:
            start = self.group.send if kind is dist.isend else self.group.recv
            work = start([data], peer, _TAG)
        if recorder.active is None:
            return work
        return recorder.TracedWork(work, fmt.SEND if kind is dist.isend else fmt.RECEIVE, peer, data.nbytes)

    def _wait(self, work: Any) -> None:
        if work is None:
            return
        if self._queued:
            work.wait()  # the stream waits, not this thread; NCCL's watchdog has the timeout
        else:
            work.wait(self._timeout)


def _failure(head: torch.Tensor) -> str | None:
    """The error text in the head of a message; None if the message has data."""
    return read_head(head)[1] if head[0] else None
