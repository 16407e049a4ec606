"""MSCCL algorithms: the XML files of microsoft/msccl, read as operations.

A GPU has thread blocks that run their steps in order. A thread block sends to one peer and receives from one peer on
one channel; what one GPU sends to another on a channel arrives in the order of the sends. ``depid`` and ``deps`` name
a thread block and a step of it that must be done first. Only steps with ``hasdep``, other than nop, announce that they
are done, so the wait ends with the first such step from ``deps`` on.

    type   meaning                                                            type   meaning
    s      send src                                                           cpy    dst = src
    r      receive dst                                                        re     dst += src
    rcs    receive dst, and send it                                           nop    waits for its dependency only
    rrc    dst = src + what is received
    rrs    send src + what is received
    rrcs   dst = src + what is received, and send it

For large data, a runtime does a step with ``cnt`` chunk by chunk, so each chunk is an operation, and a send of ``cnt``
chunks needs ``cnt`` slots of its connection. Successive steps ``re`` with one destination become one, with one count.
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
# The chunks that a connection holds before they are received: a chunk of Simple takes 4 of the 8 slots of NCCL.
_SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
_REMEDY = "let the later one depend on the earlier one (depid and deps, and hasdep of the earlier one)"


@dataclass
class _Connection:
    """The steps that send from one GPU to another on one channel, and those that receive.

    A step has an operation for each chunk, with what it puts into the connection, or with the rows that it receives.
    """

    sends: list[list[tuple[int, Place]]] = field(default_factory=list)
    receives: list[list[tuple[int, list[TransferRow]]]] = field(default_factory=list)
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
    if not len(gpus) == len(root.findall("gpu")) == size or sorted(gpus) != list(range(size)):
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


def _awaited_step(element: ElementTree.Element, flags: Sequence[bool], name: str) -> int:
    """The step whose flag ends the wait of a step: the first one from ``deps`` on, of another block's ``flags``."""
    other, first = _int(element, "depid"), _int(element, "deps")
    if first < 0:
        raise ValueError(f"{name}: depid={other}, but deps={first} is not a step")
    awaited = next((step for step in range(first, len(flags)) if flags[step]), None)
    if awaited is None:
        raise ScheduleError(
            f"deadlock: {name} waits for step {first} of thread block {other}, but no step of it from {first} on has "
            "hasdep=1, so nothing announces that it is done"
        )
    return awaited


def _check_fusion(before: ElementTree.Element | None, element: ElementTree.Element) -> None:
    """Refuse two successive sums with one destination and different counts: a runtime does both with one count."""
    if before is None or {_text(before, "type"), _text(element, "type")} != {"re"}:
        return
    is_fused = all(_text(before, name) == _text(element, name) for name in ("srcbuf", "dstbuf"))
    is_fused &= _int(before, "dstoff") == _int(element, "dstoff")
    counts = _int(before, "cnt"), _int(element, "cnt")
    if is_fused and _int(before, "hasdep") == 0 and _int(element, "depid") == -1 and counts[0] != counts[1]:
        what = f"it adds cnt={counts[1]} chunks, and the re before it, which has the same destination, cnt={counts[0]}"
        raise ValueError(f"{what}; a runtime adds equally many for both: give them one cnt, or hasdep=1 to the first")


def _fill(operation: Operation, kind: str, src: Sequence[Place], dst: Sequence[Place]) -> list[TransferRow]:
    """What an operation on one chunk accesses and moves; the rows of what it receives have no source yet."""
    operation.reads += [*src, *(dst if kind == "re" else [])]
    operation.writes += dst if kind != "s" else []
    operation.sends_result = kind != "s"
    local = [TransferRow(*place, *into, kind == "re") for place, into in zip(src, dst, strict=False)]
    if kind in ("cpy", "re"):
        operation.rows += local
    # Where the source is the destination, the data received is added to it.
    rows = [] if src == dst else local
    return [*rows, *(TransferRow(-1, -1, *into, kind.startswith("rr")) for into in dst)]


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
        flags = {at: _flags(block) for at, block in blocks.items()}
        for at, block in blocks.items():
            for element, operations in zip(block.findall("step"), numbers[at], strict=True):
                if (other := _int(element, "depid")) >= 0:
                    step = _awaited_step(element, flags.get(other, []), self.graph.operations[operations[0]].name)
                    self.graph.order(numbers[other][step][-1], operations[0])

    def _read_block(self, rank: int, at: int, block: ElementTree.Element) -> list[list[int]]:
        """The numbers of the operations of each step of a thread block."""
        numbers: list[list[int]] = []
        before: ElementTree.Element | None = None  # the last step that moves data
        for step, element in enumerate(block.findall("step")):
            kind = _text(element, "type")
            name = f"rank {rank}, thread block {at}, step {step}"
            if _int(element, "s") != step:
                raise ValueError(
                    f"{name} ({kind}): it is numbered s={_text(element, 's')}; steps are 0, 1, ... in order"
                )
            if kind not in _TYPES:
                raise ValueError(f"{name} ({kind}): this type cannot be proved; those that can: {', '.join(_TYPES)}")
            try:
                _check_fusion(before, element)
                before = element if kind != "nop" else before
                numbers.append(self._read_step(rank, at, block, element, name, numbers[-1][-1:] if numbers else []))
            except ValueError as error:
                raise ValueError(f"{name} ({kind}): {error}") from error
        return numbers

    def _read_step(
        self, rank: int, at: int, block: ElementTree.Element, element: ElementTree.Element, name: str, after: list[int]
    ) -> list[int]:
        """Add an operation for each chunk of a step."""
        kind = _text(element, "type")
        if kind == "nop":
            return [self.graph.add(Operation(f"{name} (nop)"), after)]
        # 1. The places that it reads and writes in buffers; what rrs adds up is in no buffer.
        src = [] if kind in ("r", "rcs") else self._places(rank, element, "src")
        dst = [] if kind in ("s", "rrs") else self._places(rank, element, "dst")
        if dst and src and dst != src and set(dst) & set(src):
            raise ValueError("its source and its destination overlap, so the result is not determined")
        if kind == "rrs":
            dst = [(rank, self.graph.buffers.value(rank)) for _ in src]
        # 2. Its operations, one for each chunk.
        numbers: list[int] = []
        received = []
        for chunk in range(max(len(src), len(dst))):
            part = f", chunk {chunk}" if max(len(src), len(dst)) > 1 else ""
            operation = Operation(f"{name}{part} ({kind})", continues=chunk > 0)
            rows = _fill(operation, kind, src[chunk : chunk + 1], dst[chunk : chunk + 1])
            numbers.append(self.graph.add(operation, numbers[-1:] or after))
            received.append((numbers[-1], rows))
        # 3. What its connections carry: connect() gives the received rows their sources.
        if kind.startswith("r") and kind != "re":
            self._connection("recv", rank, at, block).receives.append(received)
        if kind.endswith("s"):
            places = src if kind == "s" else dst
            self._connection("send", rank, at, block).sends.append(list(zip(numbers, places, strict=True)))
        return numbers

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
            for sent, received in zip(sends, receives, strict=True):
                if len(received) != len(sent):
                    names = [self.graph.operations[each].name for each in (received[0][0], sent[0][0])]
                    raise ScheduleError(f"{names[0]} receives {len(received)} chunks, but {names[1]} sends {len(sent)}")
            chunks = [each for step in sends for each in step]
            arrivals = [each for step in receives for each in step]
            for (sender, (rank, chunk)), (number, rows) in zip(chunks, arrivals, strict=True):
                self.graph.operations[number].rows += [
                    row if row.src >= 0 else row._replace(src=rank, chunk=chunk, sent_by=sender) for row in rows
                ]
                self.graph.order(sender, number)
            for (later, _), (number, _) in zip(chunks[slots:], arrivals, strict=False):
                self.graph.wait(number, later)  # the connection is full
