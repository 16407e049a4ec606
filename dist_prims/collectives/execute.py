"""The executor: a rank's program over the channels of a group, on the user's own memory.

Chunks are *places*: slices of flat tensors. A received chunk that replaces another lands in its place; one that is to
be added lands in a buffer of its own and is added from there; one whose target may not be written (an input of an
operation out of place) is added *into* that buffer, which then is the chunk. So no buffer is copied as a whole, and
what a chunk needs beyond the user's memory is one chunk for each receive that is under way.

A place is not written before what was sent from it has left, and not read within a step after it was written: that
is what "every transfer of a step reads the state before the step" takes in real memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..schedules.program import Action, Message, Program, Write
from .channel import Channel, Pending, Transfer
from .flat import cut
from .reduction import fold

__all__ = ["Executor", "Place"]


@dataclass(frozen=True)
class Place:
    """Elements start..stop of a flat tensor; ``writable`` unless they belong to an input that must stay."""

    flat: torch.Tensor
    start: int
    stop: int
    writable: bool

    @property
    def view(self) -> torch.Tensor:
        return self.flat[self.start : self.stop]


@dataclass
class Landing:
    """Where a message is received: as a whole, chunk by chunk, and whether that is memory for this step only."""

    whole: torch.Tensor
    parts: list[torch.Tensor]
    scratch: bool


def _joined(places: Sequence[Place]) -> torch.Tensor | None:
    """One view over places that follow each other in one tensor, else None."""
    follows = all(a.flat is b.flat and a.stop == b.start for a, b in itertools.pairwise(places))
    return places[0].flat[places[0].start : places[-1].stop] if follows else None


class Executor:
    """Runs one program once. ``length``: elements of a piece; ``ranks``: of the group, for a mean; ``segment``:
    elements of a segment, 0 for no cut."""

    def __init__(
        self,
        channel: Channel,
        places: dict[int, Place],
        length: Callable[[int], int],
        like: torch.Tensor,
        op: dist.ReduceOp.RedOpType,
        ranks: int,
        segment: int = 0,
    ) -> None:
        self._channel = channel
        self.places = places
        self._length = length
        self._like = like
        self._op = op
        self._ranks = ranks
        self._segment = segment
        self._leaving: dict[int, list[Pending]] = {}  # sends under way, by the chunk that they read
        self._spare: torch.Tensor | None = None  # scratch of an earlier step: new pages cost as much as a copy

    def run(self, program: Program) -> None:
        for action in program.actions:
            self._step(action)
        self._wait_sent(tuple(self._leaving))

    def _step(self, action: Action) -> None:
        landings = {message.peer: self._landing(message, action) for message in action.receives}
        sends = [piece for message in action.sends for piece in self._cut(message.peer, self._packed(message))]
        receives = [piece for peer, landing in landings.items() for piece in self._cut(peer, landing.whole)]
        outgoing, incoming = self._channel.start(sends, receives)
        for message in action.sends:
            pending = [each for each, send in zip(outgoing, sends, strict=True) if send.peer == message.peer]
            for chunk in message.chunks:
                self._leaving.setdefault(chunk, []).extend(pending)
        arrived = _Arrivals(self._channel, list(zip(incoming, receives, strict=True)))
        own = self._own_operands(action)
        for write in action.writes:
            self._write(write, landings, arrived, own)
        arrived.wait_all()
        self._forget(action.dead)
        self._spare = next((landing.whole for landing in landings.values() if landing.scratch), self._spare)

    def _cut(self, peer: int, data: torch.Tensor) -> list[Transfer]:
        """A message as segments, so that the first can be reduced while the others are on their way."""
        length, segment = len(data), self._segment or max(len(data), 1)
        return [Transfer(peer, data[at : at + segment]) for at in range(0, length, segment)]

    def _packed(self, message: Message) -> torch.Tensor:
        places = [self.places[chunk] for chunk in message.chunks]
        joined = _joined(places)
        return torch.cat([place.view for place in places]) if joined is None else joined

    def _landing(self, message: Message, action: Action) -> Landing:
        lengths = [self._length(piece) for piece in message.pieces]
        in_place = self._in_place(message, action, lengths)
        whole = self._scratch(sum(lengths)) if in_place is None else in_place
        return Landing(whole, cut(whole, lengths), scratch=in_place is None)

    def _scratch(self, length: int) -> torch.Tensor:
        spare, self._spare = self._spare, None
        return spare[:length] if spare is not None and len(spare) >= length else self._like.new_empty(length)

    def _in_place(self, message: Message, action: Action, lengths: list[int]) -> torch.Tensor | None:
        """The user's memory, where all that the message does is replace neighbouring chunks that nothing reads."""
        chunks = set(message.chunks)
        places = [self.places.get(chunk) for chunk in message.chunks]
        busy = {source.index for write in action.writes for source in write.sources if source.peer is None}
        busy |= {chunk for sent in action.sends for chunk in sent.chunks}
        plain = all(len(w.sources) == 1 and w.copy for w in action.writes if w.into in chunks)
        usable = [place for place in places if place is not None and place.writable]
        fits = [place.stop - place.start for place in usable] == lengths
        if not (plain and fits) or chunks & busy:
            return None
        self._wait_sent(message.chunks)
        return _joined(usable)

    def _own_operands(self, action: Action) -> Mapping[int, torch.Tensor]:
        """The rank's own chunks that a step reads, as they are before it."""
        written = {write.into for write in action.writes}
        local = {source.index for write in action.writes for source in write.sources if source.peer is None}
        return {
            chunk: self.places[chunk].view.clone() if chunk in written else self.places[chunk].view for chunk in local
        }

    def _write(
        self,
        write: Write,
        landings: Mapping[int, Landing],
        arrived: _Arrivals,
        own: Mapping[int, torch.Tensor],
    ) -> None:
        operands = [own[s.index] if s.peer is None else landings[s.peer].parts[s.index] for s in write.sources]
        target = self.places.get(write.into)
        held = [] if write.copy or target is None else [target.view]
        if target is not None and target.writable and target.stop - target.start == len(operands[0]):
            self._wait_sent([write.into])
            out = target.view
        else:
            out = self._new_place(write, operands, landings)
        first = write.sources[0].peer
        if len(held) == len(operands) == 1 and first is not None and len(landings[first].parts) == 1:
            for part in arrived.parts(first):
                fold(self._op, out[part], [held[0][part], operands[0][part]], write.terms, self._ranks)
            return
        for source in write.sources:
            arrived.wait(source.peer)
        if len(held) + len(operands) > 1 or out.data_ptr() != operands[0].data_ptr():
            fold(self._op, out, [*held, *operands], write.terms, self._ranks)

    def _new_place(self, write: Write, operands: list[torch.Tensor], landings: Mapping[int, Landing]) -> torch.Tensor:
        """A chunk without writable memory lives where its first addend was received, or else in memory of its own."""
        sender = write.sources[0].peer
        if sender is None:
            out = self._like.new_empty(self._length(write.piece))
        else:
            out = operands[0]
            landings[sender].scratch = False
        self.places[write.into] = Place(out, 0, len(out), writable=True)
        return out

    def _wait_sent(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._channel.wait(self._leaving.pop(chunk, []))

    def _forget(self, chunks: Sequence[int]) -> None:
        self._wait_sent(chunks)
        for chunk in chunks:
            self.places.pop(chunk, None)


class _Arrivals:
    """The receives of one step, waited for when they are needed."""

    def __init__(self, channel: Channel, receives: list[tuple[Pending, Transfer]]) -> None:
        self._channel = channel
        self._by_peer: dict[int | None, list[tuple[Pending, torch.Tensor]]] = {}
        for pending, transfer in receives:
            self._by_peer.setdefault(transfer.peer, []).append((pending, transfer.data))

    def wait(self, peer: int | None) -> None:
        """Until all of a peer's message is here; a rank's own chunks (None) are."""
        for _ in self.parts(peer):
            pass

    def parts(self, peer: int | None) -> Iterator[slice]:
        """The slices of a peer's message, each as soon as it is here."""
        start = 0
        for pending, data in self._by_peer.pop(peer, []):
            self._channel.wait([pending])
            yield slice(start, start + len(data))
            start += len(data)

    def wait_all(self) -> None:
        for peer in list(self._by_peer):
            self.wait(peer)
