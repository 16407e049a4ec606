"""Performs the requests of the survivors' agreement on one rank: registers, processes, stores, and the new group."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import time
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..backend.create import find_made_group, made_group, make_group
from ..backend.origin import Origin
from ..backend.quorum_ranks import quorum_ranks
from ..errors import CommError, LeftOutError
from ..rendezvous.deadline import call_in_thread
from ..rendezvous.network import LOOPBACK, own_address, split_address
from ..rendezvous.register_server import GroupRegisters, RegisterClient
from ..rendezvous.served import open_store, served_store
from ..torch_compat import default_group
from .process_probe import ProcessProbe
from .quorum import Acceptor, NoMajorityError, QuorumRegisters, Server
from .registers import Registers, SharedRegisters
from .survivors import (
    Announce,
    Decide,
    Discard,
    GaveUp,
    LeftOut,
    Look,
    MadeBefore,
    Make,
    Record,
    Request,
    Serve,
    View,
    outcome_key,
)

__all__: list[str] = []

_TIME_FOR_SUSPECTS = 0.3  # seconds for a rank that is believed to be gone to show that it is not
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.0002, 0.005  # seconds between looks
_FIRST_PROBE = 0.02  # seconds until the first probe of the processes on other hosts
_CALL_TIME = 1.0  # seconds for a server of registers to answer
_TIME_FOR_MAJORITY = 10.0  # seconds for paused servers of registers to go on
_TIME_TO_COMPLETE = 1.0  # seconds for other ranks to complete a call of the old group that this rank has completed
_FEW_DESCRIPTORS = 16  # fewer are left where a call has failed for want of one: it has closed what it had opened

T = TypeVar("T")


def store_prefix(attempt: str, agreement: str, number: int) -> str:
    """Return the prefix of the keys of a group that is made in this round of an agreement."""
    return f"repair/{attempt}/{agreement}/{number}"


class RepairAttempt:
    """One rank's part in making the group that takes the place of ``backend``'s.

    ``name`` is the name of the new group. ``timeout`` is in seconds: the longest time in which nothing happens.
    ``agreement`` names the registers: each agreement of a group has its own. ``newcomers`` is the number of further
    ranks of the new group; ``is_remote``: some of them are on other hosts, which cannot reach the loopback address.
    ``serving`` is called with the address of the store on the rank that serves it. ``ends_old_group``: calls of the old
    group that wait for this rank end soon. Otherwise ranks of other hosts would take part only after their timeouts,
    when the others have gone on without them.
    """

    def __init__(
        self,
        backend: Any,
        name: str,
        timeout: float,
        agreement: str,
        newcomers: int = 0,
        is_remote: bool = False,
        serving: Callable[[str], None] = lambda address: None,
        ends_old_group: bool = False,
    ) -> None:
        self._old, self._name, self._timeout = backend, name, timeout
        self._agreement, self._newcomers, self._serving = agreement, newcomers, serving
        self._made = made_group(backend.options.group_name)
        self._is_default = find_made_group(default_group()) is self._made
        self._rank: int = backend.rank()
        self._spans_hosts: bool = backend.spans_hosts
        self._serves_hosts = self._spans_hosts or is_remote
        self._named = frozenset(backend.named_ranks()) - {self._rank}
        self._cut = frozenset((min(link), max(link)) for link in backend.cut_links())
        hosts = self._made.hosts
        self._faulty = {hosts[each] for each in self._named.union(*self._cut)} - {hosts[self._rank]}
        self._registers = self._make_registers()
        self._began = time.monotonic()
        self._last_request: Request | None = None
        self._last_view = View({}, {})
        self._changed = self._began
        self._dead: set[int] = set()
        self._probe = ProcessProbe(self._made.addresses, _FIRST_PROBE) if self._spans_hosts else None
        self._round = 0
        self._error: Exception | None = None
        self._ends_old_group = ends_old_group
        self.backend: Any = None  # of the new group
        self.store: Any = None

    def run(self, steps: Generator[Request, Any, T]) -> T:
        """Perform what the generator of an agreement requests, and return its result."""
        try:
            request = next(steps)
            while True:
                request = steps.send(self._perform(request))
        except StopIteration as ended:
            result: T = ended.value
            return result
        except LeftOut as left_out:
            raise LeftOutError(
                f"rank {self._rank}: the ranks {list(left_out.members)} have gone on without this rank, "
                f"{left_out.reason}; end this process, or let it join again by dist_prims.join()"
            ) from None
        except GaveUp:
            reason = self._error or "earlier calls have failed"
            raise CommError(f"rank {self._rank}: the group could not be made: {reason}") from self._error
        except MadeBefore:
            raise LeftOutError(
                f"rank {self._rank}: the other ranks have gone on with a group that an earlier call, which has failed "
                "on this rank, was to make; end this process, or let it join again by dist_prims.join()"
            ) from None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._without_descriptors() from error
        except NoMajorityError:
            if _lacks_descriptors():
                raise self._without_descriptors() from None
            raise CommError(
                f"rank {self._rank}: this rank cannot reach a majority of the ranks "
                f"{quorum_ranks(self._made.hosts)}, so others may go on without it; end this process, or start the job "
                "again"
            ) from None
        finally:
            self._registers.close()

    def _without_descriptors(self) -> CommError:
        """Announce that the other ranks need not wait for this one, if it reaches the registers; return its error."""
        if self.backend:
            self.backend.abort()  # the others may have made the group
        remedy = "and call again"
        with contextlib.suppress(OSError, NoMajorityError):
            self._registers.announce(Record(self._round, gone=frozenset({self._rank})).text())
            remedy += "; if the other ranks have gone on without this one, let it join again by dist_prims.join()"
        return CommError(
            f"rank {self._rank}: this process has no file descriptor left to repair the group; raise its limit "
            f"(`ulimit -n`), or close what it does not need, {remedy}"
        )

    def _make_registers(self) -> Registers:
        if not self._spans_hosts:
            return SharedRegisters(self._old, self._agreement)
        made = self._made
        late = {made.hosts[each] for each in self._named} - {made.hosts[self._rank]}

        def connect(server: int) -> Server:
            if server == self._rank:
                own: GroupRegisters = made.registers
                return own
            return RegisterClient(made.addresses[server], made.attempt, made.key, _CALL_TIME)

        acceptors = [
            Acceptor(functools.partial(connect, each), is_suspected=made.hosts[each] in late)
            for each in quorum_ranks(made.hosts)
        ]
        return QuorumRegisters(acceptors, self._agreement, self._rank, self._old.size())

    def _perform(self, request: Request) -> Any:
        is_repeated, self._last_request = request == self._last_request, request
        match request:
            case Look():
                return self._look(is_repeated)
            case Announce(record):
                self._round = record.round
                return self._by_majority(lambda: self._registers.announce(record.text()))
            case Decide(key, value):
                return self._by_majority(lambda: self._registers.decide(key, value))
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
            if self._ends_old_group and time.monotonic() - self._began > min(_TIME_TO_COMPLETE, self._timeout / 4):
                self._old.end_on_all_hosts()
                self._ends_old_group = False
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST_INTERVAL)
        if view != self._last_view:
            self._changed, self._last_view = time.monotonic(), view
        return view

    def _by_majority(self, act: Callable[[], T]) -> T:
        """Use the registers. Servers that do not answer for a while may only be paused: try again, unless a majority of
        their processes has ended."""
        limit = time.monotonic() + min(self._timeout, _TIME_FOR_MAJORITY)
        servers = quorum_ranks(self._made.hosts) if self._spans_hosts else []
        while True:
            try:
                return act()
            except NoMajorityError:
                self._find_deaths(servers)
                if sum(each in self._dead for each in servers) > len(servers) // 2 or time.monotonic() > limit:
                    raise
                time.sleep(_LONGEST_INTERVAL)

    def _view(self) -> View:
        texts, decisions = self._by_majority(self._registers.read)
        records = {rank: Record.parse(text) for rank, text in texts.items()}
        done = {rank for rank, each in records.items() if each.round == self._round and each.made}
        self._find_deaths([rank for rank in range(self._old.size()) if rank not in done])
        now = time.monotonic()
        silent = self._probe.silent if self._probe else set()
        quiet = {each for each in silent if self._made.hosts[each] in self._faulty}
        return View(
            records=records,
            decisions=dict(decisions),
            dead=frozenset(self._dead),
            suspected=self._named | quiet if now > self._began + _TIME_FOR_SUSPECTS else frozenset(),
            is_late=now > self._changed + self._timeout,
            cut=self._cut | {(min(each, self._rank), max(each, self._rank)) for each in silent},
        )

    def _find_deaths(self, ranks: Iterable[int]) -> None:
        """Look which processes have ended; processes of other hosts at intervals, and only of these ranks."""
        self._dead |= set(self._old.ended()) - {self._rank}
        if self._probe:
            self._dead |= self._probe.ended([rank for rank in ranks if rank not in self._dead and rank != self._rank])

    def _serve(self) -> str:
        try:
            _, address = served_store(self._own_address())
            self._serving(address)
            return address
        except (OSError, RuntimeError, ValueError) as error:
            self._note_failure(error)
            return ""

    def _note_failure(self, error: Exception) -> None:
        """Keep the error for the text of another one. A rank without descriptors gives up, so that the other ranks can
        make the group."""
        self._error = error
        if not self._newcomers and _lacks_descriptors():
            raise OSError(errno.EMFILE, "the group cannot be made") from error

    def _own_address(self) -> str:
        if not self._serves_hosts:
            return LOOPBACK
        own = self._made.addresses  # which all ranks of other hosts have reached
        return split_address(own[self._rank])[0] if own else own_address()

    def _make(self, members: tuple[int, ...], address: str) -> bool:
        """Make the group. A store whose process is stopped answers nothing: a thread waits for it, and can be left."""
        timeout: timedelta = self._old.options._timeout
        limit = min(self._timeout, timeout.total_seconds())
        name = store_prefix(self._made.attempt, self._agreement, self._round)
        rank, size = members.index(self._rank), len(members) + self._newcomers
        old = self._made.request
        ranks = [] if self._is_default or not old.ranks else [old.ranks[each] for each in members]

        def ended() -> list[int]:
            self._find_deaths(members)
            return [place for place, each in enumerate(members) if each in self._dead]

        def make() -> tuple[Any, Any]:
            store = dist.PrefixStore(name, open_store(address, size, limit))
            new = dataclasses.replace(
                old,
                store=store,
                name=self._name,
                rank=rank,
                size=size,
                timeout=timedelta(seconds=limit),
                ranks=ranks,
                origin=Origin.GROWN if self._newcomers else Origin.SURVIVED,
                inherited=old.heritage,
            )
            return make_group(new, ended), store

        try:
            self.backend, self.store = call_in_thread(make, limit, lambda made: made[0].abort(), self._check_outcome)
        except (OSError, RuntimeError, ValueError) as error:  # also CommError
            self._note_failure(error)
            return False
        self.backend.set_timeout(timeout)
        return True

    def _check_outcome(self) -> None:
        """Raise RuntimeError if another member could not make the group: this rank would wait for it until the timeout,
        while the other one makes the next call."""
        with contextlib.suppress(NoMajorityError):
            if outcome_key(self._round) in self._registers.read()[1]:
                raise RuntimeError("another rank could not make it")


def _lacks_descriptors() -> bool:
    """Whether this process has so few descriptors left that it cannot take part in a repair."""
    opened: list[int] = []
    try:
        while len(opened) < _FEW_DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for each in opened:
            os.close(each)
    return False
