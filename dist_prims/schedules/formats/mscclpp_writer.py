"""Schedules as MSCCL++ execution plans.

In a step, a rank puts what it sends into scratch of the receivers, signals them, waits for its senders, and then copies
or adds from scratch. Each transfer has scratch of its own, so nothing is overwritten that a peer still reads. At first
the ranks signal each other that they have begun. An executor runs 64 operations of a thread block at most, so a long
plan has several thread blocks, which go on one after the other at a barrier. Other limits of the executor are checked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..steps import ScheduleData
from .buffers import named_lengths, places
from .msccl_writer import Transfer, merged_transfers

__all__: list[str] = []

_MOST_OPERATIONS = 64
_MOST_CHANNELS = 8  # of an operation
_MOST_SOURCES = 10  # of an operation
_MOST_PEERS = 16  # of a thread block
_MOST_BARRIERS = 16  # of a rank
_NOP = {"name": "nop"}
Place = tuple[str, int]


class _Rank:
    """The thread blocks of a rank."""

    def __init__(self, peers: Sequence[int]) -> None:
        self.peers = list(peers)
        self.blocks: list[list[dict[str, Any]]] = [[]]
        self.slots = 0  # scratch that transfers use

    def begin_step(self, operations: int) -> None:
        """Go on in another thread block if this one has no place for ``operations`` operations more."""
        if len(self.blocks[-1]) + operations + 1 > _MOST_OPERATIONS:
            barrier = {"name": "barrier", "barrier_id": len(self.blocks) - 1, "num_threadblocks": 2}
            self.blocks[-1].append(barrier)
            self.blocks.append([barrier])

    def add(self, *operations: dict[str, Any]) -> None:
        self.blocks[-1] += operations

    def check_limits(self) -> None:
        """Raise ValueError for what the arrays of the executor do not hold."""
        sources = [len(operation.get("src_buff", [])) for block in self.blocks for operation in block]
        for what, count, most in (
            ("source buffers of an operation", max(sources, default=0), _MOST_SOURCES),
            ("channels of a thread block", len(self.peers), _MOST_PEERS),
            ("barriers of a rank", len(self.blocks) - 1, _MOST_BARRIERS),
            ("operations of a thread block", max(map(len, self.blocks)), _MOST_OPERATIONS),
        ):
            if count > most:
                remedy = "export a schedule with fewer peers or steps"
                raise ValueError(f"there are {count} {what}, and an executor of MSCCL++ holds {most}; {remedy}")

    def control(self, name: str, peers: Sequence[int]) -> list[dict[str, Any]]:
        ids = [self.peers.index(peer) for peer in peers]
        parts = [ids[first : first + _MOST_CHANNELS] for first in range(0, len(ids), _MOST_CHANNELS)]
        return [{"name": name, "channel_ids": part, "channel_type": "memory"} for part in parts]


class _Writer:
    """Collects the operations of all ranks, step by step. ``scratch``: the number of the first slot of the transfers,
    behind the scratch of the schedule."""

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule, self.places = schedule, places(schedule)
        self.scratch = schedule.contract.total - schedule.data_chunks
        pairs = {pair for step in schedule.steps for pair in zip(step.src.tolist(), step.dst.tolist(), strict=True)}
        pairs |= {(dst, src) for src, dst in pairs}
        size = range(schedule.size)
        self.ranks = [_Rank([peer for peer in size if (rank, peer) in pairs and peer != rank]) for rank in size]
        for rank in self.ranks:
            rank.add(*rank.control("rlxsignal", rank.peers), *rank.control("rlxwait", rank.peers), _NOP)

    def add_step(self, rows: Sequence[Transfer]) -> None:
        # 1. What each rank does before its signals (puts and copies into slots) and after its waits (copies and sums).
        arrivals: dict[int, list[Transfer]] = defaultdict(list)
        for row in rows:
            if row[0] != row[1] or row[4] or row[2] != row[3]:
                arrivals[row[1]].append(row)
        before: dict[int, list[dict[str, Any]]] = defaultdict(list)
        after: dict[int, list[dict[str, Any]]] = {}
        for dst, into in arrivals.items():
            after[dst] = self._writes(into, before)
        # 2. Its operations in their order; all threads of the block meet at each nop.
        for number, rank in enumerate(self.ranks):
            targets = sorted({dst for src, dst, *_ in rows if src == number != dst})
            sources = sorted({src for src, dst, *_ in rows if dst == number != src})
            signals, waits = rank.control("signal", targets), rank.control("wait", sources)
            first, last = before.get(number, []), after.get(number, [])
            operations = [*first, _NOP, *signals, *waits, _NOP, *last, _NOP]
            if first or last:
                rank.begin_step(len(operations))
                rank.add(*operations)

    def _writes(self, rows: Sequence[Transfer], before: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The operations of a rank after its waits. Appends to ``before`` what brings the operands to its scratch."""
        # 1. Each transfer goes to slots of its own.
        operands: dict[int, list[Place]] = {}  # of each chunk that is written: what is added up, or copied
        for (src, dst, chunk, into, reduce), count in merged_transfers(rows, self.places, self.schedule.contract.total):
            slot = self.scratch + self.ranks[dst].slots
            self.ranks[dst].slots += count
            source, target = _buffer([self.places[chunk]], count), _buffer([("s", slot)], count)
            if src == dst:
                before[dst].append({"name": "copy", "src_buff": source, "dst_buff": target})
            else:
                remote = [{"buffer_id": self.ranks[src].peers.index(dst), "index": slot, "size": count}]
                before[src].append({"name": "put", "src_buff": source, "dst_buff": remote, "channel_type": "memory"})
            for each in range(count):
                own = [self.places[into + each]] if reduce else []
                operands.setdefault(into + each, own).append(("s", slot + each))
        # 2. Neighbours whose operands are neighbours are one operation.
        writes: list[dict[str, Any]] = []
        for written, names, count in _runs([(self.places[into], names) for into, names in operands.items()]):
            name = "re" if len(names) > 1 else "copy"
            write = {"name": name, "src_buff": _buffer(names, count), "dst_buff": _buffer([written], count)}
            writes.append({**write, "reduce_op": "sum"} if name == "re" else write)
        return writes

    def text(self) -> str:
        schedule = self.schedule
        name, inputs, outputs = named_lengths(schedule)
        scratch = self.scratch + max(rank.slots for rank in self.ranks)
        gpus = [
            {
                "id": number,
                "input_chunks": inputs,
                "output_chunks": outputs,
                "scratch_chunks": scratch,
                "threadblocks": [_block(at, ops, rank.peers) for at, ops in enumerate(rank.blocks)],
                "channels": [{"channel_type": "memory", "connected_to": rank.peers}],
                "remote_buffers": [
                    {"rank": peer, "type": "s", "access_channel_types": ["memory"]} for peer in rank.peers
                ],
                "semaphores": [],
            }
            for number, rank in enumerate(self.ranks)
        ]
        fields = {
            "name": schedule.algorithm,
            "collective": name,
            "protocol": "Simple",
            "inplace": schedule.collective != "all_to_all",
            "reuse_resources": False,
            "gpus": gpus,
            "num_threads_per_block": 1024,
            "use_double_scratch_buffer": False,
            "buffer_alignment": 16,
            "min_message_size": 0,
            "max_message_size": 2**64 - 1,
        }
        return json.dumps(fields, indent=2) + "\n"


def _block(number: int, operations: list[dict[str, Any]], peers: Sequence[int]) -> dict[str, Any]:
    ids = list(range(len(peers)))
    return {
        "id": number,
        "ops": operations,
        "channels": [{"channel_type": "memory", "channel_ids": ids}],
        "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": ids}],
    }


def _buffer(names: Sequence[Place], count: int) -> list[dict[str, Any]]:
    return [{"type": kind, "index": index, "size": count} for kind, index in names]


def _runs(writes: Sequence[tuple[Place, list[Place]]]) -> list[tuple[Place, list[Place], int]]:
    """(the first chunk written, its operands, the number of chunks), where all buffers go on by a chunk each."""
    runs: list[tuple[Place, list[Place], int]] = []
    for into, names in writes:
        if runs:
            target, first, count = runs[-1]
            if [(kind, index + count) for kind, index in (target, *first)] == [into, *names]:
                runs[-1] = target, first, count + 1
                continue
        runs.append((into, names, 1))
    return runs


def write_mscclpp(schedule: ScheduleData) -> str:
    """The JSON of a schedule; ValueError for what the format does not describe or its executor does not hold."""
    writer = _Writer(schedule)
    for step in schedule.steps:
        writer.add_step(step.rows())
    for rank in writer.ranks:
        rank.check_limits()
    return writer.text()
