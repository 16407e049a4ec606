"""``shrink()``: the survivors of a group form a smaller one, without a restart."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..autoload import NAME
from ..backend.create import MadeGroup, made_group, make_repaired
from ..backend.quorum_ranks import quorum_ranks
from ..backend.tcp_endpoint import own_address
from ..collectives.call import group_of
from ..errors import CommError, LeftOutError
from ..launch.deadline import call_in_thread
from ..launch.network import LOOPBACK
from ..launch.register_server import RegisterClient
from ..launch.served import open_store, refused, served_store
from ..torch_compat import backend_of, replace_group, timeout_of
from .quorum import Acceptor, NoMajorityError, QuorumRegisters
from .registers import Registers, SharedRegisters
from .survivors import (
    Announce,
    Decide,
    Discard,
    GaveUp,
    LeftOut,
    Look,
    Make,
    Record,
    Request,
    Serve,
    View,
    survive,
)

__all__: list[str] = []

_CPU = torch.device("cpu")
_TIME_FOR_SUSPECTS = 0.3  # seconds for a rank that is believed to be gone to show that it is not
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.0002, 0.005  # seconds between looks
_FIRST_PROBE, _BETWEEN_PROBES, _PROBE_TIME = 0.02, 0.1, 0.1  # seconds, of the processes on other hosts
_CALL_TIME = 1.0  # seconds for a server of registers to answer


def shrink(group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> dist.ProcessGroup:
    """Form a group of the ranks that are left, after a failure, and return it. All of them must call this.

    >>> import os, signal, dist_prims
    >>> def sum_of_survivors():
    ...     if dist.get_rank() == 1:
    ...         os.kill(os.getpid(), signal.SIGKILL)
    ...     total = torch.ones(1)
    ...     try:
    ...         dist.all_reduce(total)
    ...     except dist_prims.CommError:
    ...         dist_prims.shrink()
    ...         total = torch.ones(1)
    ...         dist.all_reduce(total)
    ...     return dist.get_rank(), total.item()
    >>> dist_prims.spawn(sum_of_survivors, 3, backend="dist_prims", timeout=60, min_ranks=2)
    [(0, 2.0), None, (1, 2.0)]

    The ranks keep their order and get new numbers. If ``group`` is the default group, the new group takes its place,
    and all other groups are destroyed. Otherwise only ``group`` is replaced. The old group ends: its unfinished calls
    raise :class:`PeerLeftError`.

    A rank is waited for until its process has ended or ``timeout`` seconds have passed, by default the timeout of the
    group. A rank that the error of the group names as late is waited for 0.3 s. A rank that calls ``shrink`` when the
    others have gone on without it raises :class:`LeftOutError`. If further ranks die meanwhile, the others agree again.

    Between hosts a majority of up to five ranks must be left, at first the first rank of each host; ranks on the
    smaller side of a network that is cut in two raise :class:`CommError`.
    """
    old = group_of(group, "shrink")
    backend = _backend_of(old)
    made = made_group(old.group_name)
    limit = timeout_of(old, _CPU).total_seconds() if timeout is None else timeout
    name = next_name(old.group_name)
    agreement = _Agreement(backend, made, name, limit)
    agreement.run(survive(backend.rank(), range(backend.size())))
    return replace_group(old, agreement.backend, agreement.store, agreement.members, name)


def shrink_backend(backend: Any, excluded: Collection[int]) -> Any:
    """Return the backend of a group without these ranks; called by C++ for ``torch.distributed.shrink_group``."""
    name = backend.options.group_name
    made = made_group(name)
    agreement = _Agreement(backend, made, next_name(name), made.request.timeout.total_seconds())
    agreement.run(survive(backend.rank(), range(backend.size()), frozenset(excluded)))
    expected = tuple(rank for rank in range(backend.size()) if rank not in excluded)
    if agreement.members != expected:
        agreement.backend.abort()
        raise CommError(
            f"rank {backend.rank()}: shrink_group: of the ranks {list(expected)} that are not excluded only "
            f"{list(agreement.members)} are left; exclude the others as well, or call dist_prims.shrink()"
        )
    return agreement.backend


def next_name(name: str) -> str:
    """Return the name of the group that takes the place of one with this name; all ranks form the same.

    >>> next_name("0"), next_name("0.1")
    ('0.1', '0.2')
    """
    base, _, number = name.rpartition(".")
    return f"{base}.{int(number) + 1}" if base and number.isdigit() else f"{name}.1"


def _backend_of(group: dist.ProcessGroup) -> Any:
    if dist.get_backend(group) != NAME:
        raise TypeError(
            f"shrink: the group has the backend {dist.get_backend_config(group)}; only groups of the backend {NAME} "
            "alone can be repaired"
        )
    return backend_of(group, _CPU)


class _Agreement:
    """Performs the requests of :func:`survive` for a group on one of its ranks."""

    def __init__(self, backend: Any, made: MadeGroup, name: str, timeout: float) -> None:
        self._old, self._made, self._name, self._timeout = backend, made, name, timeout
        self._rank: int = backend.rank()
        self._spans_hosts: bool = backend.spans_hosts
        self._registers = self._make_registers()
        self._named = frozenset(backend.named_ranks()) - {self._rank}
        self._began = time.monotonic()
        self._last_request: Request | None = None
        self._last_view = View({}, {})
        self._changed = self._began
        self._dead: set[int] = set()
        self._next_probe = self._began + _FIRST_PROBE
        self._round = 0
        self._error: Exception | None = None
        self.backend: Any = None
        self.store: Any = None
        self.members: tuple[int, ...] = ()

    def run(self, steps: Any) -> None:
        """Return when the survivors have made the group."""
        self._old.abort()  # this rank makes no further calls in the old group, and says so to ranks that wait for it
        try:
            request = next(steps)
            while True:
                request = steps.send(self._perform(request))
        except StopIteration as ended:
            self.members = ended.value
        except LeftOut as left_out:
            raise LeftOutError(
                f"rank {self._rank}: the ranks {list(left_out.members)} have gone on without this rank, which did not "
                "call shrink() in time; end this process, or let it join again by dist_prims.join()"
            ) from None
        except GaveUp:
            raise CommError(f"rank {self._rank}: shrink: the group could not be made: {self._error}") from self._error
        except NoMajorityError:
            raise CommError(
                f"rank {self._rank}: shrink: this rank cannot reach a majority of the ranks "
                f"{quorum_ranks(self._made.hosts)}, so others may go on without it; end this process, or start the job "
                "again"
            ) from None

    def _make_registers(self) -> Registers:
        if not self._spans_hosts:
            return SharedRegisters(self._old)
        addresses = [self._made.addresses[each] for each in quorum_ranks(self._made.hosts)]
        clients = [functools.partial(RegisterClient, each, self._made.attempt, _CALL_TIME) for each in addresses]
        acceptors = [Acceptor(lambda client=client: client().call) for client in clients]  # type: ignore[misc]
        return QuorumRegisters(acceptors, self._rank, self._old.size())

    def _perform(self, request: Request) -> Any:
        is_repeated, self._last_request = request == self._last_request, request
        match request:
            case Look():
                return self._look(is_repeated)
            case Announce(record):
                self._round = record.round
                return self._registers.announce(record.text())
            case Decide(key, value):
                return self._registers.decide(key, value)
            case Serve():
                return self._serve()
            case Make(members, store):
                return self._make(members, store)
            case Discard():
                self.backend.abort()
                self.backend = self.store = None
        return None

    def _look(self, wait: bool) -> View:
        """Return what there is to see, or wait until it has changed."""
        interval = _SHORTEST_INTERVAL
        while (view := self._view()) == self._last_view and wait:
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST_INTERVAL)
        if view != self._last_view:
            self._changed, self._last_view = time.monotonic(), view
        return view

    def _view(self) -> View:
        records, decisions = self._registers.read()
        now = time.monotonic()
        self._dead |= set(self._old.ended()) - {self._rank}
        if self._spans_hosts and now > self._next_probe:
            self._probe([rank for rank in range(self._old.size()) if rank not in records])
        return View(
            records={rank: Record.parse(text) for rank, text in records.items()},
            decisions=dict(decisions),
            dead=frozenset(self._dead),
            suspected=self._named if now > self._began + _TIME_FOR_SUSPECTS else frozenset(),
            is_late=now > self._changed + self._timeout,
        )

    def _probe(self, ranks: list[int]) -> None:
        """Look whether the processes of these ranks have ended."""
        gone = refused([self._made.addresses[rank] for rank in ranks], _PROBE_TIME)
        self._dead |= {rank for rank in ranks if self._made.addresses[rank] in gone}
        self._next_probe = time.monotonic() + _BETWEEN_PROBES

    def _serve(self) -> str:
        try:
            return served_store(own_address() if self._spans_hosts else LOOPBACK)[1]
        except (OSError, RuntimeError, ValueError) as error:
            self._error = error
            return ""

    def _make(self, members: tuple[int, ...], address: str) -> bool:
        """Make the group. A store whose process is stopped answers nothing: a thread waits for it, and can be left."""
        timeout = self._made.request.timeout
        limit = min(self._timeout, timeout.total_seconds())
        name = f"repair/{self._made.attempt}/{self._round}"
        rank, size = members.index(self._rank), len(members)

        def make() -> tuple[Any, Any]:
            store = dist.PrefixStore(name, open_store(address, size, limit))
            options, seconds = self._made.request.given, timedelta(seconds=limit)
            return make_repaired(options, store, self._name, rank, size, seconds), store

        try:
            self.backend, self.store = call_in_thread(make, limit, discard=lambda made: made[0].abort())
        except (OSError, RuntimeError, ValueError) as error:  # also CommError
            self._error = error
            return False
        self.backend.set_timeout(timeout)
        return True
