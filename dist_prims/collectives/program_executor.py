"""Executor of one rank's part of a schedule, its *program*, over a channel and on the memory of the user.

A *piece* is a part of the data of all ranks. A *chunk* is this rank's memory for a piece: a slice of a flat tensor.
*Scratch* memory is memory that the executor allocates.

- A received chunk that replaces another is received in its slice.
- A received chunk that is to be added is received in a scratch buffer and added from there.
- Where the target is read-only (an input of an out-of-place operation), the executor adds *into* the scratch buffer,
  which becomes the memory of the chunk.

The executor therefore copies no whole buffer, and needs one chunk of scratch memory for each receive in progress.

By definition every transfer of a step reads the state before the step. The executor therefore does not write a slice
before the sends from it have completed, and does not read a slice in a step after it has written the slice. It runs on
the thread of the call (``queue.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..schedules.program import NO_PART, OWN, Message, Program, ProgramStep, Write
from ..tracing import format as fmt
from ..tracing import recorder
from .channel import Channel, Pending, Transfer
from .flat import cut
from .reduction import fold

__all__: list[str] = []


@dataclass(frozen=True)
class ChunkSlice:
    """Elements start to stop, without stop, of a flat tensor: the memory of a chunk.

    ``writable`` is False for an input of the user that must not change.
    """

    flat: torch.Tensor
    start: int
    stop: int
    writable: bool

    @property
    def view(self) -> torch.Tensor:
        return self.flat[self.start : self.stop]


@dataclass
class ReceiveBuffer:
    """The memory of a received message: as a whole, the part of each chunk, and whether it is scratch memory.

    It stops being ``scratch`` when it becomes the memory of a chunk: the next step must not reuse it.
    """

    whole: torch.Tensor
    parts: list[torch.Tensor]
    scratch: bool


def _joined(slices: Sequence[ChunkSlice]) -> torch.Tensor | None:
    """Return one view of slices that are consecutive in one tensor, else None."""
    consecutive = all(a.flat is b.flat and a.stop == b.start for a, b in itertools.pairwise(slices))
    return slices[0].flat[slices[0].start : slices[-1].stop] if consecutive else None


class ProgramExecutor:
    """Runs one program once.

    Args:
        channel: sends and receives.
        slices: the memory of each chunk that this rank has before the first step, by number. It changes with the steps.
        lengths: the number of elements of each piece of the data, by number.
        like: a tensor with the type and device of the data.
        op: the reduction.
        ranks: the size of the group, by which a mean is divided.
        segment: the number of elements of a segment; 0 sends messages in one piece.
    """

    def __init__(
        self,
        channel: Channel,
        slices: dict[int, ChunkSlice],
        lengths: Sequence[int],
        like: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        ranks: int,
        segment: int = 0,
    ) -> None:
        self._channel = channel
        self.slices = slices
        self._lengths = lengths
        self._like = like
        self._op = op
        self._ranks = ranks
        self._segment = segment
        self._pending_sends: dict[int, list[Pending]] = {}  # by the chunk that the sends read
        # Scratch memory of an earlier step, for reuse: the page faults of new memory cost as much as a copy.
        self._old_scratch: torch.Tensor | None = None

    def run(self, program: Program) -> None:
        """Execute all steps. Return when all sends have completed."""
        for number, step in enumerate(program.steps):
            if step == NO_PART:
                continue
            begin = recorder.started()
            if begin:
                recorder.context.where = (*recorder.context.where[:2], number)
            self._step(step)
            recorder.record(fmt.STEP, begin)
        self._wait_sent(tuple(self._pending_sends))

    def _step(self, step: ProgramStep) -> None:
        # 1. Start all messages of the step, in segments. A step has at most one message for each peer and direction.
        buffers = {message.peer: self._receive_buffer(message, step) for message in step.receives}
        sends = [part for message in step.sends for part in self._segments(message.peer, self._send_buffer(message))]
        receives = [part for peer, buffer in buffers.items() for part in self._segments(peer, buffer.whole)]
        outgoing, incoming = self._channel.start(sends, receives)
        for message in step.sends:
            pending = [work for work, send in zip(outgoing, sends, strict=True) if send.peer == message.peer]
            for chunk in message.chunks:
                self._pending_sends.setdefault(chunk, []).extend(pending)
        # 2. Write the chunks, while further segments arrive.
        arrivals = _Arrivals(self._channel, list(zip(incoming, receives, strict=True)))
        own = self._own_operands(step)
        for write in step.writes:
            self._write(write, buffers, arrivals, own)
        arrivals.wait_all()
        # 3. Forget the chunks that no later step reads, and keep one buffer for the next step.
        self._wait_sent(step.dead)
        for chunk in step.dead:
            self.slices.pop(chunk, None)
        self._old_scratch = next((buffer.whole for buffer in buffers.values() if buffer.scratch), self._old_scratch)

    def _segments(self, peer: int, data: torch.Tensor) -> list[Transfer]:
        """Cut a message into segments, so that the first can be reduced while the others are being transferred."""
        length, segment = len(data), self._segment or max(len(data), 1)
        return [Transfer(peer, data[at : at + segment]) for at in range(0, length, segment)]

    def _send_buffer(self, message: Message) -> torch.Tensor:
        """Return the chunks of a message as one tensor: a view if they are consecutive, else a copy."""
        slices = [self.slices[chunk] for chunk in message.chunks]
        joined = _joined(slices)
        return torch.cat([chunk.view for chunk in slices]) if joined is None else joined

    def _receive_buffer(self, message: Message, step: ProgramStep) -> ReceiveBuffer:
        """Return the memory for a message: the slices of its chunks if possible, else scratch memory."""
        lengths = [self._lengths[piece] for piece in message.pieces]
        whole = self._joined_targets(message, step, lengths)
        if whole is not None:
            return ReceiveBuffer(whole, cut(whole, lengths), scratch=False)
        old, self._old_scratch, length = self._old_scratch, None, sum(lengths)
        whole = old[:length] if old is not None and len(old) >= length else self._like.new_empty(length)
        return ReceiveBuffer(whole, cut(whole, lengths), scratch=True)

    def _joined_targets(self, message: Message, step: ProgramStep, lengths: list[int]) -> torch.Tensor | None:
        """Return the user's memory if the message only replaces consecutive chunks that the step does not read."""
        chunks = set(message.chunks)
        # 1. The step neither sends these chunks nor reads them for a write.
        read_chunks = {source.index for write in step.writes for source in write.sources if source.peer == OWN}
        read_chunks |= {chunk for sent in step.sends for chunk in sent.chunks}
        # 2. It writes nothing else to them, so there is nothing to add.
        is_plain = all(len(write.sources) == 1 and write.copy for write in step.writes if write.into in chunks)
        # 3. All of them have memory that may be written, of the right length.
        slices = [self.slices.get(chunk) for chunk in message.chunks]
        writable = [chunk for chunk in slices if chunk is not None and chunk.writable]
        fits = [chunk.stop - chunk.start for chunk in writable] == lengths
        if not (is_plain and fits) or chunks & read_chunks:
            return None
        self._wait_sent(message.chunks)
        return _joined(writable)

    def _own_operands(self, step: ProgramStep) -> Mapping[int, torch.Tensor]:
        """Return the rank's own chunks that a step reads, in their state before the step."""
        written = {write.into for write in step.writes}
        local = {source.index for write in step.writes for source in write.sources if source.peer == OWN}
        return {
            chunk: self.slices[chunk].view.clone() if chunk in written else self.slices[chunk].view for chunk in local
        }

    def _write(
        self,
        write: Write,
        buffers: Mapping[int, ReceiveBuffer],
        arrivals: _Arrivals,
        own: Mapping[int, torch.Tensor],
    ) -> None:
        """Write one chunk: the sum of its sources, added to its present value or in the place of it.

        Args:
            write: the chunk and its sources.
            buffers: the received messages by sender, of which some may still arrive.
            arrivals: waits for the messages.
            own: this rank's chunks that the step reads, by number.
        """
        # 1. The operands: the present value, unless the write replaces it, and the sources. The index of a source is
        # the number of a chunk of this rank, or the place in the message of a peer.
        operands = [own[s.index] if s.peer == OWN else buffers[s.peer].parts[s.index] for s in write.sources]
        target = self.slices.get(write.into)
        current = [] if write.copy or target is None else [target.view]
        # 2. The memory of the result: the slice of the chunk if it may be written, else the buffer of an operand.
        if target is not None and target.writable and target.stop - target.start == len(operands[0]):
            self._wait_sent([write.into])
            out = target.view
        else:
            out = self._new_slice(write, operands, buffers)
        # 3. A message of one chunk that is added to the present value: each segment is added when it has arrived.
        first = write.sources[0].peer
        if len(current) == len(operands) == 1 and first != OWN and len(buffers[first].parts) == 1:
            for segment in arrivals.segments(first):
                self._fold(out[segment], [current[0][segment], operands[0][segment]], write)
            return
        # 4. Otherwise all operands must have arrived. A single operand may already be in its place.
        for source in write.sources:
            arrivals.wait(source.peer)
        if len(current) + len(operands) > 1 or out.data_ptr() != operands[0].data_ptr():
            self._fold(out, [*current, *operands], write)

    def _fold(self, out: torch.Tensor, operands: list[torch.Tensor], write: Write) -> None:
        begin = recorder.started()
        fold(self._op, out, operands, write.terms, self._ranks)
        recorder.record(fmt.COPY if len(operands) == 1 else fmt.REDUCE, begin, nbytes=out.nbytes)

    def _new_slice(
        self, write: Write, operands: list[torch.Tensor], buffers: Mapping[int, ReceiveBuffer]
    ) -> torch.Tensor:
        """Return memory for a chunk without writable memory: the buffer of its first operand, or new memory."""
        sender = write.sources[0].peer
        if sender == OWN:
            out = self._like.new_empty(self._lengths[write.piece])
        else:
            out = operands[0]
            buffers[sender].scratch = False
        self.slices[write.into] = ChunkSlice(out, 0, len(out), writable=True)
        return out

    def _wait_sent(self, chunks: Sequence[int]) -> None:
        """Wait for the sends that read these chunks."""
        for chunk in chunks:
            self._channel.wait(self._pending_sends.pop(chunk, []))


class _Arrivals:
    """The receives of one step, in segments. The executor waits for each one when it needs the data."""

    def __init__(self, channel: Channel, receives: list[tuple[Pending, Transfer]]) -> None:
        self._channel = channel
        self._by_peer: dict[int, list[tuple[Pending, torch.Tensor]]] = {}
        for pending, transfer in receives:
            self._by_peer.setdefault(transfer.peer, []).append((pending, transfer.data))

    def wait(self, peer: int) -> None:
        """Wait for the whole message of a peer. For OWN, the rank's own chunks, there is no wait."""
        for _ in self.segments(peer):
            pass

    def segments(self, peer: int) -> Iterator[slice]:
        """Yield where each segment lies in a peer's message, when it has arrived; nothing more in a second call."""
        start = 0
        for pending, data in self._by_peer.pop(peer, []):
            self._channel.wait([pending])
            yield slice(start, start + len(data))
            start += len(data)

    def wait_all(self) -> None:
        for peer in list(self._by_peer):
            self.wait(peer)
