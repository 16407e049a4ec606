"""What a link between hosts carries at most: plain TCP connections between the first ranks of the hosts, in a ring."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ..agreement import gather_values
from ..rendezvous.network import listen, own_address

__all__: list[str] = []

Hosts = Sequence[Sequence[int]]  # the ranks of each host
ONE_WAY = ("broadcast", "reduce", "gather", "scatter", "round_trip")  # compared with a stream in one direction


def least_bytes(collective: str, nbytes: int, hosts: Hosts) -> int:
    """Return what the link of some host must carry at least in one direction: the maximum over hosts and directions.

    ``nbytes`` is the size of the whole: what each rank has before an all_reduce, and after an all_gather.

    >>> hosts = (0, 1, 2), (3,)
    >>> [least_bytes(each, 1200, hosts) for each in ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier")]
    [1200, 900, 900, 1200, 1]
    >>> least_bytes("all_reduce", 1200, [[0], [1], [2]]), least_bytes("all_to_all", 1200, [[0, 1], [2, 3]])
    (1600, 1200)
    >>> least_bytes("gather", 1200, hosts)  # the root is on the first host
    300
    """
    sizes = [len(ranks) for ranks in hosts]
    total = sum(sizes)
    if collective == "barrier":  # the stream carries at least one byte
        return 1
    if collective == "all_reduce":  # a reduce_scatter and an all_gather in which each host is one rank
        return 2 * nbytes * (len(sizes) - 1) // len(sizes)
    if collective == "round_trip":  # the message back leaves when the first one has come
        return 2 * nbytes
    if collective in ("gather", "scatter"):
        return nbytes * (total - sizes[0]) // total
    if collective in ONE_WAY:
        return nbytes
    if collective == "all_to_all":
        return max(nbytes * each * (total - each) // total for each in sizes)
    return max(nbytes * (total - each) // total for each in sizes)  # all_gather, reduce_scatter


@dataclass
class Stream:
    """The connections of this rank: to the first rank of the next host, and from the first rank of the host before.
    A rank that is not the first of its host has none."""

    position: int | None = None  # the number of the host; None: this rank is not its first
    to_next: socket.socket | None = None
    from_previous: socket.socket | None = None
    buffers: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    timeout: float = 0.0

    @classmethod
    @contextlib.contextmanager
    def connect(cls, hosts: Hosts, most: int, timeout: float) -> Iterator[Stream]:
        """Make the connections for up to ``most`` bytes at a time; ``timeout``: seconds. Every rank must call it."""
        rank, firsts = dist.get_rank(), [ranks[0] for ranks in hosts]
        with contextlib.ExitStack() as sockets:
            listening = sockets.enter_context(listen(own_address()))
            listening.settimeout(timeout)
            addresses: list[tuple[str, int]] = gather_values(listening.getsockname()[:2], None)
            if rank not in firsts:
                yield cls()
                return
            position = firsts.index(rank)
            after = addresses[firsts[(position + 1) % len(firsts)]]
            to_next = sockets.enter_context(socket.create_connection(after, timeout))
            from_previous = sockets.enter_context(listening.accept()[0])
            for connection in (to_next, from_previous):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)
            buffers = bytearray(b"\1" * most), bytearray(b"\1" * most)  # memory that is in use already
            yield cls(position, to_next, from_previous, buffers, timeout)

    def carry(self, nbytes: int, one_way: bool) -> None:
        """Send ``nbytes``: if ``one_way`` from the first host to the second, otherwise from every host to the next."""
        if self.to_next is None or self.from_previous is None:
            return
        outgoing, incoming = (memoryview(each)[:nbytes] for each in self.buffers)
        if one_way:
            outgoing, incoming = outgoing[: nbytes * (self.position == 0)], incoming[: nbytes * (self.position == 1)]
        while outgoing or incoming:
            readable, writable, _ = select.select(
                [self.from_previous] if incoming else [], [self.to_next] if outgoing else [], [], self.timeout
            )
            if not readable and not writable:
                raise TimeoutError(f"the stream between hosts has stopped for {self.timeout} s")
            if writable:
                outgoing = outgoing[self.to_next.send(outgoing) :]
            if readable:
                count = self.from_previous.recv_into(incoming)
                if count == 0:
                    raise ConnectionError("the first rank of the host before this one has closed its connection")
                incoming = incoming[count:]
