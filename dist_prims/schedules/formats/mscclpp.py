"""MSCCL++ execution plans: the JSON files of microsoft/mscclpp, read as operations.

A GPU has thread blocks that run their operations in order, and read and write the memory of their peers. What orders
two operations is less than the order of the file:

- Threads of a block run ahead of each other. Only ``nop`` and ``barrier`` make all of them wait. A signal or a wait
  with several channels is done by one thread for each of them.
- A signal happens before the wait of the same number on the other end of the channel. The k-th channel from one rank
  to another belongs to the k-th one back. A relaxed signal says that its rank has begun, and nothing of what it did.
- A port channel has a proxy that puts and signals later, in order. ``flush`` waits for it.
- Packets carry flags: the reader of a packet waits for its writer, so a plan may write each packet only once. The next
  call of the writer's rank writes the packet again, unless the calls use two scratch buffers in turn.
- The buffers of a rank may be accessed after its start and before its end only: its memory is then used by others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..schedule_error import ScheduleError
from .buffers import NamedBuffers, collective_of
from .happens_before import Operation, OperationGraph, Place, TransferRow
from .mscclpp_state import REMEDY, PlanState, element, field, field_list

__all__: list[str] = []

_PAIRS = {"put", "pws", "pwsf", "get", "copy", "cpkt", "upkt", "ppkt", "rppkt"}  # each source goes to a destination
_SUMS = {"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"}  # the first destination holds the sum
_FROM_PACKETS = {"upkt", "rppkt"}
_TO_PACKETS = {"cpkt", "ppkt", "rppkt"}
_CONTROL = {"signal", "rlxsignal", "wait", "rlxwait", "flush", "sem_release", "sem_acquire", "nop", "barrier"}


class _Block:
    """Adds the operations of a thread block to the graph.

    ``sync``: the operation at which all threads met last. ``since``: the operations since then. ``last_of_thread``:
    the last operation of each thread that signals or waits. ``last``: the operations after which the next
    one starts. Their accesses may complete later, unless the order of the plan says otherwise.
    """

    def __init__(self, reader: PlanState, rank: int, number: int, block: Any) -> None:
        self.reader, self.graph, self.rank, self.number, self.block = reader, reader.graph, rank, number, block
        self.sync, self.since, self.last_of_thread = reader.start[rank], list[int](), dict[int, int]()
        self.last: list[int] = []
        self.rounds: dict[int, int] = defaultdict(int)

    def read(self) -> None:
        for number, op in enumerate(field(self.block, "ops", list)):
            where = f"rank {self.rank}, thread block {self.number}, operation {number}"
            try:
                kind = field(op, "name", str)
                self._read_operation(kind, op, f"{where} ({kind})")
            except ScheduleError:
                raise
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        for each in (self.sync, *self.since):
            self.graph.order(each, self.reader.end[self.rank])

    def _read_operation(self, kind: str, op: Any, name: str) -> None:
        if kind not in _PAIRS | _SUMS | _CONTROL or "tbg_info" in op or op.get("channel_type") == "switch":
            what = (
                "groups of thread blocks"
                if "tbg_info" in op
                else f"{kind!r} with {op.get('channel_type', 'no')} channels"
            )
            raise ValueError(f"{what} cannot be proved; plans without switches, loops and groups of thread blocks can")
        if kind == "nop":
            self._meet(self.graph.add(Operation(name)))
        elif kind == "barrier":
            key = self.rank, field(op, "barrier_id", int), self.rounds[op["barrier_id"]]
            self.rounds[op["barrier_id"]] += 1
            if key not in self.reader.barriers:
                self.reader.barriers[key] = self.graph.add(Operation(f"barrier {key[1]} of rank {self.rank}")), []
            number, counts = self.reader.barriers[key]
            counts.append(field(op, "num_threadblocks", int))
            self._meet(number)
        elif kind.startswith("sem_"):
            for thread, index in enumerate(field_list(op, "semaphore_ids", int)):
                ends = self.reader.signals if kind == "sem_release" else self.reader.waits
                ends["semaphore", self.rank, index].append((self._control(name, thread), False))
        elif kind in _CONTROL:
            for thread, index in enumerate(field_list(op, "channel_ids", int)):
                self._signal_or_wait(kind, self._channel(op, index), thread, name)
        elif op.get("channel_type") == "port":
            self._put_by_proxy(kind, op, name)
        else:
            self._move(kind, op, name)

    def _meet(self, number: int) -> None:
        """All threads wait for each other in an operation."""
        for each in (self.sync, *self.since):
            self.graph.order(each, number)
        self.sync, self.since, self.last_of_thread, self.last = number, [], {}, [number]

    def _control(self, name: str, thread: int, after: Iterable[int] = ()) -> int:
        """Add an operation of one thread."""
        number = self.graph.add(Operation(name), [self.last_of_thread.get(thread, self.sync), *after], awaits=self.last)
        self.last_of_thread[thread] = number
        self.since.append(number)
        self.last = [number]
        return number

    def _channel(self, op: Any, index: int) -> tuple[str, int, int, int]:
        """(type, rank, peer, number) of a channel of the thread block."""
        kind = field(op, "channel_type", str)
        lists = [each for each in field(self.block, "channels", list) if field(each, "channel_type", str) == kind]
        ids = [each for one in lists for each in field_list(one, "channel_ids", int)]
        return kind, *self.reader.channel(self.rank, kind, element(ids, index, f"{kind} channel"))

    def _signal_or_wait(self, kind: str, channel: tuple[str, int, int, int], thread: int, name: str) -> None:
        channel_type, rank, peer, number = channel
        relaxed = kind.startswith("rlx") and channel_type == "memory"  # a proxy knows no relaxed signals
        if kind.endswith("wait"):
            self.reader.waits[channel_type, peer, rank, number].append((self._control(name, thread), relaxed))
        elif kind == "flush":
            self._control(name, thread, [self.reader.proxies[channel]] if channel in self.reader.proxies else [])
        elif channel_type == "port":
            self._proxy(channel, self._control(name, thread), Operation(name), signals=True)
        else:
            self.reader.signals[channel].append((self._control(name, thread), relaxed))

    def _proxy(self, channel: tuple[str, int, int, int], issue: int, operation: Operation, *, signals: bool) -> None:
        """Add an operation of the proxy of a port channel."""
        earlier = [self.reader.proxies[channel]] if channel in self.reader.proxies else []
        number = self.reader.proxies[channel] = self.graph.add(operation, [issue, *earlier])
        if signals:
            self.reader.signals[channel].append((number, False))

    def _put_by_proxy(self, kind: str, op: Any, name: str) -> None:
        sources, targets = self._places(op, "src_buff"), self._places(op, "dst_buff")
        channels = field_list(op, "channel_ids", int)
        if kind not in ("put", "pws", "pwsf") or not len(sources) == len(targets) == len(channels):
            raise ValueError(
                "over a port, only put, pws and pwsf with a channel for each pair of buffers can be proved"
            )
        for thread, (src, dst, index) in enumerate(zip(sources, targets, channels, strict=True)):
            channel = self._channel(op, index)
            if {rank for rank, _ in dst} != {channel[2]}:
                raise ValueError(f"the channel is connected to rank {channel[2]}, the buffer is on rank {dst[0][0]}")
            self._proxy(channel, self._control(name, thread), self._moved(name, [(src, dst)]), signals=False)
            if kind != "put":
                self._proxy(channel, self.last_of_thread[thread], Operation(name), signals=True)
            if kind == "pwsf":
                self._control(name, thread, [self.reader.proxies[channel]])
            self.reader.plain_scratch.update(self._scratch([*src, *dst]))

    def _places(self, op: Any, name: str) -> list[list[Place]]:
        """The chunks of each buffer that an operation names."""
        found = []
        for buffer in field(op, name, list):
            rank, kind = self.rank, buffer.get("type") if isinstance(buffer, dict) else None
            if kind is None:  # a buffer of a peer, by its number among the remote buffers of the thread block
                access = field(op, "channel_type", str)
                refs = field(self.block, "remote_buffer_refs", list)
                refs = [each for each in refs if field(each, "access_channel_type", str) == access]
                ids = [each for one in refs for each in field_list(one, "remote_buffer_ids", int)]
                index = element(ids, field(buffer, "buffer_id", int), "remote buffer")
                remote = element(field(self.reader.gpus[self.rank], "remote_buffers", list), index, "remote buffer")
                rank, kind = field(remote, "rank", int), field(remote, "type", str)
                if rank not in self.reader.gpus:
                    raise ValueError(f"remote buffer {index} is on rank {rank}, which does not exist")
            first, count = field(buffer, "index", int), field(buffer, "size", int)
            if not 0 < count < 1 << 16:
                raise ValueError(f"size={count} is not a number of chunks")
            found.append([(rank, self.graph.buffers.chunk(rank, kind, first + each)) for each in range(count)])
        if not found or len({len(each) for each in found}) > 1:
            raise ValueError(f"{name} must name buffers of one size")
        return found

    def _scratch(self, places: Iterable[Place]) -> list[Place]:
        return [place for place in places if self.graph.buffers.name(*place).startswith("s")]

    def _move(self, kind: str, op: Any, name: str) -> None:
        """Add an operation that all threads do together."""
        # 1. Its buffers.
        sources, targets = self._places(op, "src_buff"), self._places(op, "dst_buff")
        if kind == "rppkt":
            sources = sources[:1] * len(targets)
        if len(sources[0]) != len(targets[0]) or (kind in _PAIRS and len(sources) != len(targets)):
            raise ValueError("src_buff and dst_buff do not fit together")
        has_packets = kind.endswith("pkt")
        sums = kind in _SUMS
        if sums:
            self.reader.reductions.add(field(op, "reduce_op", str))
        # 2. Which buffers hold packets? The first source and the first target of a sum are plain memory of this rank.
        read = sources if kind in _FROM_PACKETS else sources[1:] if sums and has_packets else []
        written = targets if kind in _TO_PACKETS else targets[1:] if sums and has_packets else []
        for each in (*sources, *targets):
            if not any(each is one for one in (*read, *written)):
                self.reader.plain_scratch.update(self._scratch(each))
            elif len(self._scratch(each)) < len(each):
                raise ValueError("packets are in the buffer s only")
        # 3. Add the operations: one for each packet; without packets one for all chunks.
        last = []
        for part in [[at] for at in range(len(sources[0]))] if has_packets else [range(len(sources[0]))]:
            src, dst = ([[places[at] for at in part] for places in each] for each in (sources, targets))
            if sums and has_packets:
                src = [*src[1:], src[0]]  # the order in which they are added
            pairs = [(each, dst[0]) for each in src] if sums else list(zip(src, dst, strict=True))
            first = self._moved(name, pairs, sums)
            numbers = [self.graph.add(first, [self.sync], awaits=self.last)]
            if sums and len(dst) > 1:  # the sum is also sent to the other targets
                forward = self._moved(name, [(dst[0], each) for each in dst[1:]])
                numbers.append(self.graph.add(forward, numbers))
            self.reader.packet_readers += [(numbers[0], places[at]) for places in read for at in part]
            for place in (places[at] for places in written for at in part):
                if place in self.reader.packet_writers:
                    other = self.graph.operations[self.reader.packet_writers[place][0]].name
                    raise ScheduleError(
                        f"race: {other} and {name} write packets to {self.graph.buffers.name(*place)} of "
                        f"rank {place[0]}, and a reader cannot tell which it has read"
                    )
                self.reader.packet_writers[place] = numbers[-1], self.rank
            last += numbers
        self.since += last
        self.last = last

    def _moved(
        self, name: str, pairs: Sequence[tuple[Sequence[Place], Sequence[Place]]], sums: bool = False
    ) -> Operation:
        """The operation that copies each source to its destination, or adds all sources up in one destination."""
        operation = Operation(name)
        for number, (src, dst) in enumerate(pairs):
            rows = [TransferRow(*one, *two, sums and number > 0) for one, two in zip(src, dst, strict=True)]
            operation.rows += [row for row in rows if row.reduce or row[:2] != row[2:4]]
            operation.reads += src
            operation.writes += dst if number == 0 or not sums else []
        written_twice = len(set(operation.writes)) < len(operation.writes)
        # The threads of a block work on different elements of a buffer, and independently.
        element_written = {place: at for _, dst in pairs for at, place in enumerate(dst)}
        crosses_threads = any(element_written.get(place, at) != at for src, _ in pairs for at, place in enumerate(src))
        copies = {(row.dst, row.into): (row.src, row.chunk) for row in operation.rows if not sums}
        reads_copies = not copies.keys().isdisjoint(copies.values())
        if written_twice or crosses_threads or reads_copies:
            raise ValueError("its buffers overlap, so the result is not determined")
        return operation


def read_mscclpp(plan: dict[str, Any]) -> tuple[str, OperationGraph]:
    """The name of a plan and its operations; ValueError for a plan that cannot be proved."""
    gpus = {field(gpu, "id", int): gpu for gpu in field(plan, "gpus", list)}
    size = len(gpus)
    if sorted(gpus) != list(range(len(plan["gpus"]))):
        raise ValueError(f"the ids of the GPUs are {sorted(gpus)}; they must be 0, 1, ...")
    collective = collective_of(field(plan, "collective", str))
    counts = [(field(gpu, "input_chunks", int), field(gpu, "output_chunks", int)) for gpu in gpus.values()]
    chunks = max((count[collective == "all_gather"] for count in counts), default=0)
    scratch = [field(gpus[rank], "scratch_chunks", int) for rank in range(size)]
    buffers = NamedBuffers(collective, size, chunks, field(plan, "inplace", bool), scratch or [0])
    lengths = buffers.lengths["i"], buffers.lengths["o"]
    if wrong := [each for each in counts if any(one not in (0, two) for one, two in zip(each, lengths, strict=True))]:
        raise ValueError(f"input_chunks and output_chunks of a GPU are {wrong[0]}, which do not fit {collective}")
    graph = OperationGraph(buffers, REMEDY)
    reader = PlanState(graph, gpus)
    for rank in range(size):
        for number, block in enumerate(field(gpus[rank], "threadblocks", list)):
            if field(block, "id", int) != number:
                raise ValueError(f"rank {rank}: thread block {block['id']} is number {number} of the list")
            _Block(reader, rank, number, block).read()
    reader.connect(plan)
    return field(plan, "name", str), graph
