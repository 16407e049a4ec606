"""Executor of a rank's program over a channel, on the memory of the user.

A chunk is a slice of a flat tensor.

- A received chunk that replaces another is received in its slice.
- A received chunk that is to be added is received in a scratch buffer and added from there.
- Where the target is read-only (an input of an out-of-place operation), the executor adds *into* the scratch buffer,
  which becomes the memory of the chunk.

The executor therefore copies no whole buffer, and needs one chunk of scratch memory for each receive in progress.

By definition every transfer of a step reads the state before the step. The executor therefore does not write a slice
before the sends from it have completed, and does not read a slice in a step after it has written the slice.
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
    """Elements start..stop of a flat tensor. ``writable`` is False for an input that must not change."""

    flat: torch.Tensor
    start: int
    stop: int
    writable: bool

    @property
    def view(self) -> torch.Tensor:
        return self.flat[self.start : self.stop]


@dataclass
class ReceiveBuffer:
    """The memory of a received message: as a whole, by chunk, and whether it is scratch memory of this step."""

    whole: torch.Tensor
    parts: list[torch.Tensor]
    scratch: bool


def _joined(slices: Sequence[ChunkSlice]) -> torch.Tensor | None:
    """Return one view of slices that are consecutive in one tensor, else None."""
    consecutive = all(a.flat is b.flat and a.stop == b.start for a, b in itertools.pairwise(slices))
    return slices[0].flat[slices[0].start : slices[-1].stop] if consecutive else None


class Executor:
    """Runs one program once.

    ``lengths``: the number of elements of each piece. ``ranks`` is the size of the group, which a mean needs.
    ``segment`` is the number of elements of a segment; 0 sends messages in one piece.
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
        self._pending_sends: dict[int, list[Pending]] = {}  # sends in progress, by the chunk that they read
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
        buffers = {message.peer: self._buffer(message, step) for message in step.receives}
        sends = [piece for message in step.sends for piece in self._cut(message.peer, self._packed(message))]
        receives = [piece for peer, buffer in buffers.items() for piece in self._cut(peer, buffer.whole)]
        outgoing, incoming = self._channel.start(sends, receives)
        for message in step.sends:
            pending = [each for each, send in zip(outgoing, sends, strict=True) if send.peer == message.peer]
            for chunk in message.chunks:
                self._pending_sends.setdefault(chunk, []).extend(pending)
        arrived = _Receives(self._channel, list(zip(incoming, receives, strict=True)))
        own = self._own_operands(step)
        for write in step.writes:
            self._write(write, buffers, arrived, own)
        arrived.wait_all()
        self._drop(step.dead)
        self._old_scratch = next((buffer.whole for buffer in buffers.values() if buffer.scratch), self._old_scratch)

    def _cut(self, peer: int, data: torch.Tensor) -> list[Transfer]:
        """Cut a message into segments, so that the first can be reduced while the others are being transferred."""
        length, segment = len(data), self._segment or max(len(data), 1)
        return [Transfer(peer, data[at : at + segment]) for at in range(0, length, segment)]

    def _packed(self, message: Message) -> torch.Tensor:
        slices = [self.slices[chunk] for chunk in message.chunks]
        joined = _joined(slices)
        return torch.cat([each.view for each in slices]) if joined is None else joined

    def _buffer(self, message: Message, step: ProgramStep) -> ReceiveBuffer:
        lengths = [self._lengths[piece] for piece in message.pieces]
        in_place = self._in_place(message, step, lengths)
        whole = self._scratch(sum(lengths)) if in_place is None else in_place
        return ReceiveBuffer(whole, cut(whole, lengths), scratch=in_place is None)

    def _scratch(self, length: int) -> torch.Tensor:
        old, self._old_scratch = self._old_scratch, None
        return old[:length] if old is not None and len(old) >= length else self._like.new_empty(length)

    def _in_place(self, message: Message, step: ProgramStep, lengths: list[int]) -> torch.Tensor | None:
        """Return the user's memory if the message only replaces consecutive chunks that the step does not read."""
        chunks = set(message.chunks)
        slices = [self.slices.get(chunk) for chunk in message.chunks]
        busy = {source.index for write in step.writes for source in write.sources if source.peer == OWN}
        busy |= {chunk for sent in step.sends for chunk in sent.chunks}
        plain = all(len(w.sources) == 1 and w.copy for w in step.writes if w.into in chunks)
        usable = [each for each in slices if each is not None and each.writable]
        fits = [each.stop - each.start for each in usable] == lengths
        if not (plain and fits) or chunks & busy:
            return None
        self._wait_sent(message.chunks)
        return _joined(usable)

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
        arrived: _Receives,
        own: Mapping[int, torch.Tensor],
    ) -> None:
        operands = [own[s.index] if s.peer == OWN else buffers[s.peer].parts[s.index] for s in write.sources]
        target = self.slices.get(write.into)
        current = [] if write.copy or target is None else [target.view]
        if target is not None and target.writable and target.stop - target.start == len(operands[0]):
            self._wait_sent([write.into])
            out = target.view
        else:
            out = self._new_slice(write, operands, buffers)
        first = write.sources[0].peer
        if len(current) == len(operands) == 1 and first != OWN and len(buffers[first].parts) == 1:
            for part in arrived.parts(first):
                self._fold(out[part], [current[0][part], operands[0][part]], write)
            return
        for source in write.sources:
            arrived.wait(source.peer)
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
        for chunk in chunks:
            self._channel.wait(self._pending_sends.pop(chunk, []))

    def _drop(self, chunks: Sequence[int]) -> None:
        self._wait_sent(chunks)
        for chunk in chunks:
            self.slices.pop(chunk, None)


class _Receives:
    """The receives of one step. The executor waits for each one when it needs the data."""

    def __init__(self, channel: Channel, receives: list[tuple[Pending, Transfer]]) -> None:
        self._channel = channel
        self._by_peer: dict[int, list[tuple[Pending, torch.Tensor]]] = {}
        for pending, transfer in receives:
            self._by_peer.setdefault(transfer.peer, []).append((pending, transfer.data))

    def wait(self, peer: int) -> None:
        """Wait for the whole message of a peer. For OWN, the rank's own chunks, there is no wait."""
        for _ in self.parts(peer):
            pass

    def parts(self, peer: int) -> Iterator[slice]:
        """Yield the slices of a peer's message, each when it has arrived."""
        start = 0
        for pending, data in self._by_peer.pop(peer, []):
            self._channel.wait([pending])
            yield slice(start, start + len(data))
            start += len(data)

    def wait_all(self) -> None:
        for peer in list(self._by_peer):
            self.wait(peer)
