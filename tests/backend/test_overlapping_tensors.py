"""Inputs that overlap outputs: the result is that of separate tensors, on every placement.

On one host the slot exchange wrote such outputs while it read the inputs, and the results were wrong without an error.
Between hosts they were right. Over gloo the results of a schedule were wrong too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import span
from values import equal, held, summed

import dist_prims

Group = dist.ProcessGroup | None
DIRECT: dict[str, Any] = {"algorithm": "direct"}
PINNED: dict[str, Any] = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), "direct")


def check(counts: tuple[int, ...], group: Group = None, **options: Any) -> None:
    """Make all calls for blocks of so many elements, with ``options``: by default the group's own calls."""
    calls = Calls(group, options)
    for count in counts:
        for case in (calls.all_gather, calls.reduce_scatter, calls.all_to_all, calls.gather, calls.scatter):
            case(count)
        calls.uneven_all_to_all(count)
        calls.one_tensor_for_all_outputs(count)


class Calls:
    """``at``, the place of the second tensor in the memory of the first: the own block, a shift, another rank's."""

    def __init__(self, group: Group, options: dict[str, Any]) -> None:
        self.group, self.options = group, options
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def places(self, count: int) -> list[int]:
        return [self.rank * count, 1, (self.rank + 1) % self.size * count, max(self.size * count - 1, 0)]

    def all_gather(self, count: int) -> None:
        for at in self.places(count):
            memory = torch.zeros((self.size + 1) * count + 1, dtype=torch.int64)
            output, mine = memory[: self.size * count], memory[at : at + count]
            mine.copy_(held(self.rank, count))
            dist_prims.all_gather(output, mine, self.group, **self.options)
            equal(output, torch.cat([held(each, count) for each in range(self.size)]), (at, self.options))

    def reduce_scatter(self, count: int) -> None:
        whole = self.size * count
        for at in self.places(count):
            memory = held(self.rank, whole + count + 1)
            output = memory[at : at + count]
            dist_prims.reduce_scatter(output, memory[:whole], group=self.group, **self.options)
            expected = summed(self.size, whole)[self.rank * count : (self.rank + 1) * count]
            equal(output, expected, (at, self.options))

    def all_to_all(self, count: int) -> None:
        whole = self.size * count
        for at in (0, 1, count):
            memory = torch.cat([held(self.rank, whole), torch.zeros(count + 1, dtype=torch.int64)])
            output = memory[at : at + whole]
            dist_prims.all_to_all(output, memory[:whole], group=self.group, **self.options)
            mine = slice(self.rank * count, (self.rank + 1) * count)
            equal(output, torch.cat([held(each, whole)[mine] for each in range(self.size)]), (at, self.options))

    def uneven_all_to_all(self, count: int) -> None:
        """The first blocks begin in one place and differ in length, so the second output is where an input ends."""

        def length(sender: int, receiver: int) -> int:
            return count + 2 * sender + 3 * receiver

        sent = [length(self.rank, each) for each in range(self.size)]
        received = [length(each, self.rank) for each in range(self.size)]
        memory = torch.zeros(sum(sent) + sum(received), dtype=torch.int64)
        memory[: sum(sent)] = held(self.rank, sum(sent))
        output = memory[: sum(received)]
        dist_prims.all_to_all(output, memory[: sum(sent)], received, sent, self.group, **self.options)
        expected = []
        for each in range(self.size):
            lengths = [length(each, receiver) for receiver in range(self.size)]
            expected.append(held(each, sum(lengths)).split(lengths)[self.rank])
        equal(output, torch.cat(expected), self.options)

    def gather(self, count: int) -> None:
        for at in self.places(count):
            memory = torch.zeros((self.size + 1) * count + 1, dtype=torch.int64)
            blocks, mine = list(memory[: self.size * count].view(self.size, count)), memory[at : at + count]
            mine.copy_(held(self.rank, count))
            dist_prims.gather(mine, blocks if self.rank == 0 else None, 0, self.group, **self.options)
            if self.rank == 0:
                equal(torch.cat(blocks), torch.cat([held(each, count) for each in range(self.size)]), at)

    def scatter(self, count: int) -> None:
        for at in self.places(count):
            memory = held(0, (self.size + 1) * count + 1)
            blocks, mine = list(memory[: self.size * count].view(self.size, count)), memory[at : at + count]
            expected = held(0, self.size * count)[self.rank * count : (self.rank + 1) * count]
            dist_prims.scatter(mine, blocks if self.rank == 0 else None, 0, self.group, **self.options)
            equal(mine, expected, (at, self.options))

    def one_tensor_for_all_outputs(self, count: int) -> None:
        """The block of the last rank remains, on every rank."""
        tensor = held(self.rank, count)
        outputs = [tensor] * self.size
        dist_prims.all_gather(outputs, tensor, self.group, **self.options)
        equal(tensor, held(self.size - 1, count), self.options)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_one_host(size: int) -> None:
    def body() -> None:
        small_slots = dist.new_group(pg_options=dist_prims.BackendOptions(slot_bytes=1 << 14))
        check((0, 1, 5, 3000), small_slots)
        check((0, 1, 5, 3000), small_slots, **DIRECT)
        check((0, 1, 5), dist.new_group(pg_options=dist_prims.BackendOptions(**PINNED)))

    dist_prims.spawn(body, size, backend="dist_prims", timeout=100)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ["a b", "a a b"])
def test_between_hosts(hosts: str) -> None:
    def body() -> None:
        check((0, 1, 5, 30_000))
        check((1, 5), **DIRECT)

    span(hosts, body, timeout=100)


@pytest.mark.slow
def test_over_gloo() -> None:
    """By gloo's own collectives, where a call names no algorithm, and by a schedule."""

    def body() -> None:
        check((0, 1, 5, 100_000))
        check((0, 1, 5, 1031), **DIRECT)
        check((5, 1031), **DIRECT, segment_bytes=64)

    dist_prims.spawn(body, 3, backend="gloo", timeout=100)
