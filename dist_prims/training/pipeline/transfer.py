"""What goes from stage to stage between processes: one message a micro-batch, over any ``torch.distributed`` group.

Who sends what when is in the plan, so all ranks know it of all. Three things follow from that.

*Order.* Messages need no names. All of them stand in one order, that of the plan if every action takes one time unit,
and each rank asks for what it receives in that order: so those of a pair match, whatever the engine is. With NCCL,
where a send waits for its receiver and all transfers of a rank stand in a queue, a rank also asks for all that comes
before a send before it sends. Then nothing hangs: of the messages that are not done, the first in that order has no
other in front of it, on either rank.

*Receipts.* What a rank sends back tells which of its actions are done, and so which of our messages have arrived: their
memory is free without asking, waiting or counting.

*Layouts.* What lies in a message is told once for each kind of batch, and again when the first rank says that its batch
is of a new kind; otherwise a message is its data and nothing else goes before it. A few receives are asked for ahead,
so that they come while something is computed.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import CommError
from ...schedules.pipelines import PipelinePlan
from .action_executor import in_order, message_to
from .packet import FAILED, HEAD, LAYOUT, Layout, Pool, head_of, pack, read_head, spec_of
from .stage import Tensors

__all__ = ["Message", "StageFailed", "Transfers", "messages"]

_TAG = 20_553  # beside the tags that a program may use in the same group
_AHEAD = 2  # receives that are asked for before they are needed


class StageFailed(CommError):
    """A rank of the pipeline failed in its part of a step; the group can go on with the next one."""


class Message(NamedTuple):
    """What a stage needs of another rank: "F", its input, or "B", the gradient of its output."""

    kind: str
    stage: int
    micro: int
    source: int
    target: int


def messages(plan: PipelinePlan, learn: bool, num_microbatches: int | None = None) -> list[Message]:
    """All messages of a step between ranks, in the order of the plan; of the first ``num_microbatches`` only."""
    found = []
    for action in in_order(plan):
        to = message_to(plan, action)
        if (
            to is None
            or not (learn or action.kind == "F")
            or (num_microbatches is not None and action.micro >= num_microbatches)
        ):
            continue
        source, target = plan.rank_of[action.stage], plan.rank_of[to[1]]
        if source != target:
            found.append(Message(*to, source, target))
    return found


class _Script:
    """What one rank sends and receives in a step."""

    def __init__(self, plan: PipelinePlan, rank: int, learn: bool, num_microbatches: int) -> None:
        mine = [each for each in messages(plan, learn, num_microbatches) if rank in (each.source, each.target)]
        self.receives = [each for each in mine if each.target == rank]
        self.sends = [each for each in mine if each.source == rank]
        self.turn = {message: at for at, message in enumerate(mine)}
        place = {(action.kind[0], *action[1:]): at for action, (_, at) in plan.places.items()}
        self.needed_at = {each: place[each.kind, each.stage, each.micro] for each in mine}  # in the receiver's actions
        step = {"F": -1, "B": 1}
        self.made_at = {each: place[each.kind, each.stage + step[each.kind], each.micro] for each in mine}


class _Letter(NamedTuple):
    """A transfer under way, with its memory."""

    work: Any
    data: torch.Tensor
    layout: Layout
    failure: str | None = None  # of one that was told to fail before its data came


class Transfers:
    """The messages of one rank, a step at a time."""

    def __init__(self, plan: PipelinePlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._queued = device.type == "cuda"
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        self._timeout = timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout
        self._plan = plan
        self._scripts: dict[tuple[bool, int], _Script] = {}  # by whether gradients are passed, and micro-batches
        self._layouts: dict[int, dict[tuple[int, int], Layout]] = {}  # by kind of batch; by stage and micro-batch
        self._pool = Pool(device)
        self._leaving: list[tuple[Message | None, Any, torch.Tensor]] = []
        self._unread: list[torch.Tensor] = []
        self.begin(True, plan.num_microbatches, 0, True)

    def begin(self, learn: bool, num_microbatches: int, slot: int, fresh: bool) -> None:
        """A step with so many micro-batches of a kind of batch; ``fresh``: its layouts are still to be told."""
        if (learn, num_microbatches) not in self._scripts:
            self._scripts[learn, num_microbatches] = _Script(self._plan, self._group.rank(), learn, num_microbatches)
        self._script = self._scripts[learn, num_microbatches]
        self._due = deque(self._script.receives)
        self._unsent = deque(self._script.sends)
        self._coming: dict[Message, _Letter] = {}
        self._fresh = fresh
        if fresh:
            self._layouts[slot] = {}
            self._pool.clear()
        self._known = self._layouts[slot]

    def give(self, message: Message, tensors: Tensors) -> None:
        """Send tensors; ValueError, and nothing is sent, if they are not what this kind of batch gave before."""
        layout = Layout(map(spec_of, tensors))
        if message.kind == "F" and not self._fresh:
            known = self._known[message[1:3]]
            if layout != known:
                raise ValueError(
                    f"the output of stage {message.stage - 1} is now {layout}, and was {known} for such "
                    "a batch; call renegotiate() on every rank after a change of the model"
                )
        if message.kind == "B":
            layout = self._layout(message)
        data = self._pool.take(layout.nbytes)
        pack(data, layout, tensors)  # may fail, and then nothing has been sent
        self._before(message)
        if message.kind == "F" and self._fresh:
            self._known[message[1:3]] = layout
            self._tell_layout(message.target, layout)
        self.tell(message.target, data, message)

    def fail(self, message: Message, text: str) -> None:
        """Send instead of the tensors what has gone wrong."""
        self._before(message)
        if self._fresh and message.kind == "F":
            self.tell(message.target, head_of(FAILED, text))
        else:
            data = self._pool.take(self._layout(message).nbytes)
            data.zero_()  # a device that has not read the head computes with it
            data[:HEAD] = head_of(FAILED, text)
            self.tell(message.target, data, message)

    def take(self, message: Message) -> Tensors:
        """The tensors of a message, when it has come; StageFailed if they will not."""
        while message not in self._coming:
            self._ask()
        self._ask_ahead()
        letter = self._coming.pop(message)
        self._wait(letter.work)
        self._free(message)
        if letter.failure is None and self._queued:
            self._unread.append(letter.data[:HEAD])
        elif failure := letter.failure or _failure(letter.data):
            raise StageFailed(failure)
        views = letter.layout.views(letter.data)
        return tuple(v.requires_grad_(spec.needs_grad) for v, spec in zip(views, letter.layout.specs, strict=True))

    def tell(self, rank: int, data: torch.Tensor, message: Message | None = None) -> None:
        """Send bytes; they are on their way until :meth:`finish`."""
        data = data.to(self._device)
        self._leaving.append((message, self._start(dist.isend, data, rank), data))

    def hear(self, rank: int, nbytes: int) -> torch.Tensor:
        """Receive bytes."""
        data = self._pool.take(nbytes)
        self._wait(self._start(dist.irecv, data, rank))
        return data

    def tell_all(self, ranks: list[int], tensors: Tensors, failure: str | None) -> None:
        """Send tensors, of any layout, or what has gone wrong, to several ranks; they :meth:`hear_all`."""
        layout = Layout(spec_of(each.detach()) for each in tensors)
        data = self._pool.take(layout.nbytes)
        pack(data, layout, tensors)
        for rank in ranks:
            if failure is None:
                self._tell_layout(rank, layout)
                self.tell(rank, data)
            else:
                self.tell(rank, head_of(FAILED, failure))

    def hear_all(self, rank: int) -> Tensors:
        """What one rank :meth:`tell_all`."""
        layout = self._hear_layout(rank)
        if isinstance(layout, str):
            raise StageFailed(layout)
        return tuple(layout.views(self.hear(rank, layout.nbytes)))

    def unread(self) -> StageFailed | None:
        """What the messages that were not read when they came, as on CUDA, say of a failure."""
        unread, self._unread = self._unread, []
        failures = (_failure(head) for head in (torch.stack(unread).cpu() if unread else []))
        return next((StageFailed(failure) for failure in failures if failure), None)

    def finish(self) -> None:
        """Return when nothing of the step is under way."""
        leaving, self._leaving = self._leaving, []
        for _, work, _ in leaving:
            self._wait(work)

    def _layout(self, message: Message) -> Layout:
        """Of a message; what failed before it was told has nothing in it, and so has its answer."""
        if message.kind == "F":
            return self._known[message[1:3]]
        return self._known.get((message.stage + 1, message.micro), Layout(())).gradients

    def _before(self, message: Message) -> None:
        """Ask for all that comes before a send."""
        self._unsent.remove(message)
        while self._queued and self._due and self._script.turn[self._due[0]] < self._script.turn[message]:
            self._ask()

    def _ask(self) -> None:
        """Ask for the next message; its layout comes first if nobody here knows it."""
        message = self._due.popleft()
        if self._fresh and message.kind == "F":
            layout = self._hear_layout(message.source)
            if isinstance(layout, str):
                self._coming[message] = _Letter(None, torch.empty(0), Layout(()), layout)
                return
            self._known[message[1:3]] = layout
        layout = self._layout(message)
        data = self._pool.take(layout.nbytes)
        self._coming[message] = _Letter(self._start(dist.irecv, data, message.source), data, layout)

    def _ask_ahead(self) -> None:
        turn = self._script.turn
        while self._due and len(self._coming) <= _AHEAD and not self._fresh:
            if self._queued and self._unsent and turn[self._unsent[0]] < turn[self._due[0]]:
                return
            self._ask()

    def _free(self, message: Message) -> None:
        """What a rank had before it made this message has arrived there."""
        script, leaving = self._script, self._leaving
        self._leaving = []
        for each, work, data in leaving:
            if each and each.target == message.source and script.needed_at[each] <= script.made_at[message]:
                self._wait(work)
            else:
                self._leaving.append((each, work, data))

    def _tell_layout(self, rank: int, layout: Layout) -> None:
        numbers = torch.tensor(layout.encode())
        self.tell(rank, head_of(LAYOUT, str(len(numbers))))
        self.tell(rank, numbers.view(torch.uint8))

    def _hear_layout(self, rank: int) -> Layout | str:
        """The layout that a rank tells, or what has gone wrong there."""
        status, text = read_head(self.hear(rank, HEAD))
        if status == FAILED:
            return text
        return Layout.decode(self.hear(rank, 8 * int(text)).cpu().view(torch.int64).tolist())

    def _start(self, kind: Any, data: torch.Tensor, peer: int) -> Any:
        if self._queued:
            return dist.batch_isend_irecv([dist.P2POp(kind, data, group=self._group, group_peer=peer)])[0]
        start = self._group.send if kind is dist.isend else self._group.recv
        return start([data], peer, _TAG)

    def _wait(self, work: Any) -> None:
        if work is None:
            return
        if self._queued:
            work.wait()  # the stream waits, not this thread; NCCL's watchdog keeps the time
        else:
            work.wait(self._timeout)


def _failure(head: torch.Tensor) -> str | None:
    if not head[0]:
        return None
    return read_head(head)[1]
