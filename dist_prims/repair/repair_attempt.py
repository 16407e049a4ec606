"""One rank's side of a repair: it performs what the agreement of survivors requests, up to making the new group.

The requests are what the generators of :mod:`.survivors` yield: uses of the registers, and making the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..backend.create import find_made_group, made_group, make_group
from ..backend.death_monitor import RemoteProcesses
from ..backend.origin import Origin
from ..backend.quorum_ranks import quorum_ranks
from ..errors import CommError, LeftOutError
from ..rendezvous.deadline import call_in_thread
from ..rendezvous.network import LOOPBACK, own_address, split_address
from ..rendezvous.register_server import RegisterClient
from ..rendezvous.served import open_store, served_store
from ..torch_compat import default_group
from . import survivors
from .process_probe import ProcessProbe
from .quorum import Acceptor, NoMajorityError, QuorumRegisters, Server
from .registers import Registers, SharedRegisters
from .survivors import FAILED, Record, Request, View, outcome_key

__all__: list[str] = []

_TIME_FOR_SUSPECTS = 0.3  # seconds in which a rank that is believed to be gone may enter the first round
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.0002, 0.005  # seconds between two readings of the registers
_FIRST_PROBE = 0.02  # seconds until the first probe of the processes on other hosts
_CALL_TIME = 1.0  # seconds for a server of registers to answer
_TIME_FOR_MAJORITY = 10.0  # seconds in which paused servers of registers may go on
_TIME_TO_COMPLETE = 1.0  # seconds for other ranks to complete a call of the old group that this rank has completed
_FEW_DESCRIPTORS = 16  # a process with fewer free file descriptors cannot make a group

T = TypeVar("T")


def store_prefix(attempt: str, agreement: str, round_number: int) -> str:
    """Return the prefix of the keys of a group that is made in this round of an agreement."""
    return f"repair/{attempt}/{agreement}/{round_number}"


class RepairAttempt:
    """One rank's part in making a new group that takes the place of the old group.

    All methods run on the thread that calls the repair, except two functions in :meth:`_make_group`. Ranks have the
    numbers of the old group, unless a comment says otherwise.

    Args:
        backend: of the old group.
        name: of the new group.
        timeout: in seconds, the longest time in which nothing changes.
        agreement: names the registers: each agreement of a group has registers of its own.
        newcomers: where each rank of the new group that is not in the old group listens while its process runs; an
            empty address if that is not known.
        is_remote: whether newcomers are on other hosts, which cannot reach the loopback address.
        serving: called with the address of the store for the new group, on the rank that serves the store.
        ending: the backends of groups whose calls that wait for this rank end soon, on other hosts too. Otherwise ranks
            of other hosts would take part only after their timeouts, when the others have gone on without them.
    """

    def __init__(
        self,
        backend: Any,
        name: str,
        timeout: float,
        agreement: str,
        newcomers: Sequence[str] = (),
        is_remote: bool = False,
        serving: Callable[[str], None] = lambda address: None,
        ending: Collection[Any] = (),
    ) -> None:
        self._old_backend, self._name, self._timeout = backend, name, timeout
        self._agreement, self._newcomers, self._serving = agreement, newcomers, serving
        self._ending = ending
        # The old group.
        self._old_group = made_group(backend.options.group_name)
        self._is_default = find_made_group(default_group()) is self._old_group
        self._rank: int = backend.rank()
        self._spans_hosts: bool = backend.spans_hosts
        self._is_on_several_hosts = self._spans_hosts or is_remote  # the old group, or the new one
        # What the error of the old group says: ranks that are dead, lost or late, links that do not deliver, and two
        # ranks of which one may be cut off from the others.
        self._named_ranks = frozenset(backend.named_ranks()) - {self._rank}
        self._cut_links = frozenset((min(link), max(link)) for link in backend.cut_links())
        hosts = self._old_group.hosts
        faulty_ranks = self._named_ranks.union(backend.doubtful_ranks(), *self._cut_links)
        self._faulty_hosts = {hosts[rank] for rank in faulty_ranks} - {hosts[self._rank]}
        # What this rank has found out since the error.
        self._registers = self._open_registers()
        self._began = time.monotonic()
        self._last_request: Request | None = None
        self._last_view = View({}, {})
        self._last_change = self._began  # of the view
        self._dead: set[int] = set()
        self._probe = ProcessProbe(self._old_group.addresses, _FIRST_PROBE) if self._spans_hosts else None
        self._round = 0  # that this rank has announced last
        self._error: Exception | None = None  # the last error of making the group
        # The new group, if it is made.
        self.backend: Any = None
        self.store: Any = None

    def run(self, agreement: Generator[Request, Any, T]) -> T:
        """Perform the requests of a generator of :mod:`.survivors`, and return its result.

        Its exceptions become CommError or LeftOutError. The registers are closed at the end: an attempt runs once.
        """
        try:
            request = next(agreement)
            while True:
                request = agreement.send(self._perform(request))
        except StopIteration as ended:
            result: T = ended.value
            return result
        except survivors.LeftOut as left_out:
            raise LeftOutError(
                f"rank {self._rank}: the ranks {list(left_out.members)} have gone on without this rank, "
                f"{left_out.reason}; end this process, or let it join again by dist_prims.join()"
            ) from None
        except survivors.GaveUp:
            reason = self._error or "earlier calls have failed"
            raise CommError(f"rank {self._rank}: the group could not be made: {reason}") from self._error
        except survivors.MadeBefore:
            raise LeftOutError(
                f"rank {self._rank}: the other ranks have gone on with a group that an earlier call, which has failed "
                "on this rank, was to make; end this process, or let it join again by dist_prims.join()"
            ) from None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise self._give_up_without_descriptors() from error
        except NoMajorityError:
            if _lacks_descriptors():
                raise self._give_up_without_descriptors() from None
            raise CommError(
                f"rank {self._rank}: this rank cannot reach a majority of the ranks "
                f"{quorum_ranks(self._old_group.hosts)}, so others may go on without it; end this process, or start "
                "the job again"
            ) from None
        except survivors.OtherMembers:  # this rank can take part in another call
            raise
        except BaseException:  # Ctrl-C, or the exception of another signal handler
            self._registers.close()  # the connection may have the answer to a call that was interrupted
            self._announce_departure()
            raise
        finally:
            self._registers.close()

    def _announce_departure(self) -> None:
        """Announce that this rank is gone, so that no rank waits for it, and let the group of this round fail if its
        outcome has not been decided: other ranks that make it read only the outcome.

        If this rank reaches no majority, the other ranks may read it later, on this rank's own server.
        """
        if self.backend:
            self.backend.abort()  # the others may have made the group
        with contextlib.suppress(OSError, NoMajorityError, CommError):
            self._registers.announce(Record(self._round, gone=frozenset({self._rank})).text())
            self._registers.decide(outcome_key(self._round), FAILED)

    def _give_up_without_descriptors(self) -> CommError:
        self._announce_departure()
        return CommError(
            f"rank {self._rank}: this process has no file descriptor left to repair the group; raise its limit "
            f"(`ulimit -n`), or close what it does not need, and call again; if the other ranks have gone on without "
            "this one, let it join again by dist_prims.join()"
        )

    def _open_registers(self) -> Registers:
        if not self._spans_hosts:
            return SharedRegisters(self._old_backend, self._agreement)
        group = self._old_group
        late_ranks = self._named_ranks.union(self._old_backend.doubtful_ranks()[:1])  # the first has not replied
        late_hosts = {group.hosts[rank] for rank in late_ranks} - {group.hosts[self._rank]}

        def connect(server: int) -> Server:
            is_own = server == self._rank  # these are called directly
            address = group.addresses[server]
            return group.registers if is_own else RegisterClient(address, group.attempt, group.key, _CALL_TIME)

        acceptors = [
            Acceptor(functools.partial(connect, server), is_suspected=group.hosts[server] in late_hosts)
            for server in quorum_ranks(group.hosts)
        ]
        return QuorumRegisters(acceptors, self._agreement, self._rank, self._old_backend.size())

    def _perform(self, request: Request) -> Any:
        is_repeated, self._last_request = request == self._last_request, request
        match request:
            case survivors.Look():
                return self._look(is_repeated)
            case survivors.Announce(record):
                self._round = record.round
                return self._by_majority(lambda: self._registers.announce(record.text()))
            case survivors.Decide(key, value):
                return self._by_majority(lambda: self._registers.decide(key, value))
            case survivors.Serve():
                return self._serve()
            case survivors.Make(members, store):
                return self._make_group(members, store)
            case survivors.Discard():
                self.backend.abort()
                self.backend = self.store = None
        return None

    def _look(self, wait: bool) -> View:
        """Return the view of this rank; with ``wait``, after it has changed or is late."""
        interval = _SHORTEST_INTERVAL
        while (view := self._view()) == self._last_view and wait:
            if self._ending and time.monotonic() - self._began > min(_TIME_TO_COMPLETE, self._timeout / 4):
                for backend in self._ending:
                    backend.end_on_all_hosts()
                self._ending = ()
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST_INTERVAL)
        if view != self._last_view:
            self._last_change, self._last_view = time.monotonic(), view
        return view

    def _view(self) -> View:
        texts, decisions = self._by_majority(self._registers.read)
        records = {rank: Record.parse(text) for rank, text in texts.items()}
        # No rank waits for a rank that has made the group of this round: its death does not matter.
        has_made = {rank for rank, record in records.items() if record.round == self._round and record.made}
        self._find_deaths([rank for rank in range(self._old_backend.size()) if rank not in has_made])
        now = time.monotonic()
        silent = self._probe.silent if self._probe else set()
        suspected = self._named_ranks | {rank for rank in silent if self._old_group.hosts[rank] in self._faulty_hosts}
        return View(
            records=records,
            decisions=dict(decisions),
            dead=frozenset(self._dead),
            suspected=suspected if now > self._began + _TIME_FOR_SUSPECTS else frozenset(),
            is_late=now > self._last_change + self._timeout,
            cut=self._cut_links | {(min(rank, self._rank), max(rank, self._rank)) for rank in silent},
        )

    def _by_majority(self, use_registers: Callable[[], T]) -> T:
        """Call ``use_registers``, and call it again while it raises NoMajorityError, because servers that do not answer
        may only be paused. Give up after a time, or at once when a majority of the servers' processes has ended."""
        deadline = time.monotonic() + min(self._timeout, _TIME_FOR_MAJORITY)
        servers = quorum_ranks(self._old_group.hosts) if self._spans_hosts else []
        while True:
            try:
                return use_registers()
            except NoMajorityError:
                self._find_deaths(servers)
                if sum(rank in self._dead for rank in servers) > len(servers) // 2 or time.monotonic() > deadline:
                    raise
                time.sleep(_LONGEST_INTERVAL)

    def _find_deaths(self, ranks: Iterable[int]) -> None:
        """Add to ``_dead`` the ranks of this host that have ended, and of ``ranks`` those on other hosts."""
        self._dead |= set(self._old_backend.ended()) - {self._rank}
        if self._probe:
            self._dead |= self._probe.ended([rank for rank in ranks if rank not in self._dead and rank != self._rank])

    def _serve(self) -> str:
        """Serve a store for the new group; return its address, or an empty string after an error."""
        try:
            _, address = served_store(self._own_address())
            self._serving(address)
            return address
        except (OSError, RuntimeError, ValueError) as error:
            self._note_failure(error)
            return ""

    def _own_address(self) -> str:
        if not self._is_on_several_hosts:
            return LOOPBACK
        addresses = self._old_group.addresses  # which the ranks of all other hosts have reached; none on one host
        return split_address(addresses[self._rank])[0] if addresses else own_address()

    def _note_failure(self, error: Exception) -> None:
        """Keep the error for the text of the CommError at the end. Give up on this rank if it lacks descriptors and the
        other ranks can make the group without it, which they cannot with newcomers."""
        self._error = error
        if not self._newcomers and _lacks_descriptors():
            raise OSError(errno.EMFILE, "the group cannot be made") from error

    def _make_group(self, members: tuple[int, ...], address: str) -> bool:
        """Make the new group, whose members meet at the store at ``address``; return whether this rank has made it."""
        # 1. The request for the new group. Its ranks are the members, in this order, then the newcomers.
        timeout: timedelta = self._old_backend.options._timeout
        limit = min(self._timeout, timeout.total_seconds())
        prefix = store_prefix(self._old_group.attempt, self._agreement, self._round)
        new_rank, size = members.index(self._rank), len(members) + len(self._newcomers)
        old = self._old_group.request
        global_ranks = [] if self._is_default or not old.ranks else [old.ranks[member] for member in members]

        newcomers = RemoteProcesses(
            {new: address for new, address in enumerate(self._newcomers, len(members)) if address}
        )

        guard, has_store = threading.Lock(), threading.Event()

        def ended() -> list[int]:  # as ranks of the new group
            with guard:  # both threads call it
                self._find_deaths(members)
                dead_members = [position for position, member in enumerate(members) if member in self._dead]
                return dead_members + newcomers.ended()

        def make_new_group() -> tuple[Any, Any]:
            store = dist.PrefixStore(prefix, open_store(address, size, limit))
            has_store.set()
            request = dataclasses.replace(
                old,
                store=store,
                name=self._name,
                rank=new_rank,
                size=size,
                timeout=timedelta(seconds=limit),
                ranks=global_ranks,
                origin=Origin.GROWN if self._newcomers else Origin.SURVIVED,
                inherited=old.heritage,
            )
            return make_group(request, ended), store

        def check() -> None:
            self._check_outcome()
            # TCPStore tries for seconds to connect to a process that has ended.
            if not has_store.is_set() and (dead := ended()):
                raise RuntimeError(f"the ranks {dead} of the new group have ended")

        # 2. Make it on a thread of its own, which also calls ``ended``. It is left behind if no answer comes because
        # the process of the store is stopped. This thread waits meanwhile, and looks whether another member fails.
        try:
            self.backend, self.store = call_in_thread(make_new_group, limit, lambda made: made[0].abort(), check)
        except (OSError, RuntimeError, ValueError) as error:  # also CommError
            self._note_failure(error)
            return False
        self.backend.set_timeout(timeout)
        return True

    def _check_outcome(self) -> None:
        """Raise RuntimeError if the outcome of the round has been decided: another member could not make the group, and
        makes its next call, while this rank would wait for it until the timeout."""
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
        for descriptor in opened:
            os.close(descriptor)
    return False
