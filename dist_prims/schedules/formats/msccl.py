"""MSCCL algorithms: the XML files of microsoft/msccl, read as operations.

A GPU has thread blocks that run their steps in order. A thread block sends to one peer and receives from one peer on
one channel; what one GPU sends to another on a channel arrives in the order of the sends. ``depid`` and ``deps`` name
a thread block and a step of it that must be done first. Its flag is set by steps with ``hasdep`` only, but for nop, so
the wait ends with the first such step from ``deps`` on.

    type   meaning                                                            type   meaning
    s      send src                                                           cpy    dst = src
    r      receive dst                                                        re     dst += src
    rcs    receive dst, and send it                                           nop    waits for its dependency only
    rrc    dst = src + what is received
    rrs    send src + what is received
    rrcs   dst = src + what is received, and send it
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..schedule_error import ScheduleError
from .buffers import NamedBuffers, collective_of
from .happens_before import Operation, OperationGraph, Place, TransferRow

__all__: list[str] = []

_TYPES = ("s", "r", "rcs", "rrc", "rrs", "rrcs", "cpy", "re", "nop")
# The sends that a connection holds before they are received: half of the 8 slots of NCCL are one chunk of Simple.
_SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
_REMEDY = "let the later one depend on the earlier one (depid and deps, and hasdep of the earlier one)"


@dataclass
class _Sent:
    """What an operation has put into a connection."""

    number: int
    places: list[Place]


@dataclass
class _Connection:
    """The sends from one GPU to another on one channel, and the receives with the places to add or None."""

    sends: list[_Sent] = field(default_factory=list)
    receives: list[tuple[int, list[TransferRow]]] = field(default_factory=list)
    ends: set[tuple[str, int]] = field(default_factory=set)  # the thread blocks


def read_msccl(text: str) -> tuple[str, OperationGraph]:
    """The name of an algorithm and its operations; ValueError for a file that contains none."""
    if "<!" in text.replace("<!--", ""):
        raise ValueError("the file has a declaration (<!...>), which may define entities; remove it")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"the file is not XML: {error}") from error
    if root.tag != "algo":
        raise ValueError(f"the root is <{root.tag}>; an MSCCL algorithm has <algo>")
    gpus = {_int(gpu, "id"): gpu for gpu in root.iter("gpu")}
    size, chunks = _int(root, "ngpus"), _int(root, "nchunksperloop")
    if sorted(gpus) != list(range(size)) or len(root.findall("gpu")) != size:
        raise ValueError(f"ngpus={size}, but the ids of the GPUs are {sorted(gpus)}")
    scratch = [_int(gpus[rank], "s_chunks") for rank in range(size)]
    in_place = _int(root, "inplace") != 0
    buffers = NamedBuffers(collective_of(_text(root, "coll")), size, chunks, in_place, scratch)
    slots = _SLOTS.get(_text(root, "proto"))
    if slots is None:
        raise ValueError(f"proto={_text(root, 'proto')!r}: it must be one of {', '.join(_SLOTS)}")
    graph = OperationGraph(buffers, _REMEDY)
    reader = _Reader(graph)
    for rank in range(size):
        reader.read_gpu(rank, gpus[rank])
    reader.connect(slots)
    return _text(root, "name"), graph


def _text(element: ElementTree.Element, name: str) -> str:
    if (value := element.get(name)) is None:
        raise ValueError(f"<{element.tag} {' '.join(f'{k}={v!r}' for k, v in element.items())}> has no {name}")
    return value


def _int(element: ElementTree.Element, name: str) -> int:
    value = _text(element, name)
    if not value.removeprefix("-").isdecimal() or len(value) > 12:
        raise ValueError(f"<{element.tag}>: {name}={value!r:.50} is not a number")
    return int(value)


def _flags(block: ElementTree.Element) -> list[bool]:
    """Whether each step of a thread block announces that it is done."""
    return [_int(step, "hasdep") != 0 and _text(step, "type") != "nop" for step in block.findall("step")]


class _Reader:
    """Adds the steps of the GPUs to a graph."""

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self.connections: dict[tuple[int, int, int], _Connection] = defaultdict(_Connection)

    def read_gpu(self, rank: int, gpu: ElementTree.Element) -> None:
        blocks = {_int(block, "id"): block for block in gpu.findall("tb")}
        if sorted(blocks) != list(range(len(gpu.findall("tb")))):
            raise ValueError(f"rank {rank}: the ids of the thread blocks are {sorted(blocks)}; they must be 0, 1, ...")
        numbers = {at: self._read_block(rank, at, blocks[at]) for at in blocks}
        for at, block in blocks.items():
            for step, element in enumerate(block.findall("step")):
                if (other := _int(element, "depid")) >= 0:
                    name = self.graph.operations[numbers[at][step]].name
                    flags = _flags(blocks[other]) if other in blocks else []
                    if (first := _int(element, "deps")) < 0:
                        raise ValueError(f"{name}: depid={other}, but deps={first} is not a step")
                    flagged = next((each for each in range(first, len(flags)) if flags[each]), None)
                    if flagged is None:
                        raise ScheduleError(
                            f"deadlock: {name} waits for step {first} of thread block {other}, but no step of it from "
                            f"{first} on has hasdep=1, so nothing announces that it is done"
                        )
                    self.graph.order(numbers[other][flagged], numbers[at][step])

    def _read_block(self, rank: int, at: int, block: ElementTree.Element) -> list[int]:
        """The numbers of the operations of a thread block."""
        numbers: list[int] = []
        for step, element in enumerate(block.findall("step")):
            kind = _text(element, "type")
            name = f"rank {rank}, thread block {at}, step {step} ({kind})"
            if _int(element, "s") != step:
                raise ValueError(f"{name}: it is numbered s={_text(element, 's')}; steps are 0, 1, ... in order")
            if kind not in _TYPES:
                raise ValueError(f"{name}: this type cannot be proved; those that can: {', '.join(_TYPES)}")
            try:
                numbers.append(self._read_step(rank, at, block, element, Operation(name), numbers[-1:]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return numbers

    def _read_step(
        self,
        rank: int,
        at: int,
        block: ElementTree.Element,
        element: ElementTree.Element,
        operation: Operation,
        after: Sequence[int],
    ) -> int:
        kind = _text(element, "type")
        if kind == "nop":
            return self.graph.add(operation, after)
        src = [] if kind in ("r", "rcs") else self._places(rank, element, "src")
        dst = [] if kind in ("s", "rrs") else self._places(rank, element, "dst")
        if dst and src and dst != src and set(dst) & set(src):
            raise ValueError("its source and its destination overlap, so the result is not determined")
        receives, sends = kind.startswith("r") and kind != "re", kind.endswith("s")
        if kind == "rrs":
            dst = [(rank, self.graph.buffers.value(rank)) for _ in src]
        operation.reads += src + (dst if kind == "re" else [])
        operation.writes += dst if kind != "s" else []
        operation.sends_result = kind != "s"
        number = self.graph.add(operation, after)
        local = [
            TransferRow(rank, place[1], rank, into[1], kind == "re") for place, into in zip(src, dst, strict=False)
        ]
        if kind in ("cpy", "re"):
            operation.rows += local
        if receives:
            # Where the source is the destination, the data received is added to it.
            rows = [] if src == dst else local
            adds = kind.startswith("rr")
            rows = [*rows, *(TransferRow(-1, -1, rank, into, adds) for _, into in dst)]
            self._connection("recv", rank, at, block).receives.append((number, rows))
        if sends:
            self._connection("send", rank, at, block).sends.append(_Sent(number, src if kind == "s" else dst))
        return number

    def _places(self, rank: int, element: ElementTree.Element, end: str) -> list[Place]:
        buffer, first, count = _text(element, f"{end}buf"), _int(element, f"{end}off"), _int(element, "cnt")
        if not 0 < count < 1 << 16:
            raise ValueError(f"cnt={count}: it must be positive")
        return [(rank, self.graph.buffers.chunk(rank, buffer, first + each)) for each in range(count)]

    def _connection(self, side: str, rank: int, at: int, block: ElementTree.Element) -> _Connection:
        peer, channel = _int(block, side), _int(block, "chan")
        if peer == rank or not 0 <= peer < self.graph.buffers.size:
            raise ValueError(f"the thread block has {side}={peer}, which is not another rank")
        connection = self.connections[(rank, peer, channel) if side == "send" else (peer, rank, channel)]
        connection.ends.add((side, at))
        if sum(each == side for each, _ in connection.ends) > 1:
            raise ValueError(
                f"another thread block has {side}={peer} on channel {channel}; the order is not determined"
            )
        return connection

    def connect(self, slots: int) -> None:
        """Match the sends of each connection with the receives, in order."""
        for (src, dst, channel), connection in sorted(self.connections.items()):
            sends, receives = connection.sends, connection.receives
            if len(sends) != len(receives):
                counts = f"rank {src} sends {len(sends)} times to rank {dst}, which receives {len(receives)} times"
                raise ScheduleError(f"deadlock: on channel {channel} {counts}")
            for sent, (number, rows) in zip(sends, receives, strict=True):
                operation = self.graph.operations[number]
                received = [row for row in rows if row.src < 0]
                if len(received) != len(sent.places):
                    what = f"receives {len(received)} chunks, but {self.graph.operations[sent.number].name} sends"
                    raise ScheduleError(f"{operation.name} {what} {len(sent.places)}")
                operation.rows += [row for row in rows if row.src >= 0]
                for (rank, chunk), row in zip(sent.places, received, strict=True):
                    operation.rows.append(row._replace(src=rank, chunk=chunk, sent_by=sent.number))
                self.graph.order(sent.number, number)
            for later, (number, _) in zip(sends[slots:], receives, strict=False):
                self.graph.wait(number, later.number)  # the connection is full
