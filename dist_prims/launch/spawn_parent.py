"""Parent side of spawned ranks: start them, wait for them, find the first failure, and kill all ranks at the end.

The thread that calls ``spawn`` waits for notices (:mod:`.spawn_child`), deaths and output of all ranks in one call. A
*pidfd*, the descriptor of a process, reports the death of a rank. The end of a socket or pipe is not sufficient,
because child processes of a rank inherit the descriptors and keep them open.
"""

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..rendezvous.deadline import until
from ..rendezvous.secret import Secret
from ..threads import remedy
from .output import Output, is_interactive, open_pipe
from .payload import Payload, hidden_main, unpacked
from .spawn_child import NOTICE, RAISED, RETURNED, SHOW_STACK, RankSpec, rank_main

__all__: list[str] = []

_PF_EXITING = 0x4  # linux/sched.h
_DESCRIPTORS = 7  # of a rank: two files, two pipes, a pidfd, and two of multiprocessing
_EXIT_TIME = 2.0  # seconds for a process that exits or is killed
_STACK_TIME = 1.0  # seconds for the ranks to write their stacks
_RUNNING = "running"  # the activity of the ranks while their functions run


class RankFailedError(RuntimeError):
    """The failure of a rank of ``spawn``: the first rank that raised or died, with its traceback in the message.

    ``rank`` is its number. ``__cause__`` is its exception, if the exception can be pickled.

    >>> import dist_prims
    >>> try:
    ...     dist_prims.spawn(lambda: 1 / 0, 2)
    ... except RankFailedError as error:
    ...     print(error.rank in (0, 1), type(error.__cause__).__name__)
    True ZeroDivisionError
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class Opened(contextlib.ExitStack):
    """What a call has opened, which is closed at its end, also where a further descriptor cannot be opened."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        handled = super().__exit__(kind, error, trace)
        if not isinstance(error, OSError) or error.errno != errno.EMFILE:
            return handled
        import resource  # of POSIX systems

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            errno.EMFILE,
            f"spawn: this process has no descriptors left for the ranks, about {_DESCRIPTORS} each (its limit is "
            f"{limit}); raise it with `ulimit -n`, or keep fewer files, groups and shared tensors",
        ) from None

    def add(self, descriptor: int) -> int:
        self.callback(os.close, descriptor)
        return descriptor


class RankProcesses:
    """The rank processes of one call. No process, and no file shared with one, outlives the context of ``opened``."""

    def __init__(
        self,
        size: int,
        start_timeout: float,
        timeout: float | None,
        prefix: bool | None,
        min_ranks: int,
        opened: Opened,
    ) -> None:
        """The parameters are described at :func:`dist_prims.spawn`; ``size`` is the number of ranks."""
        self.start_timeout, self.timeout, self.min_ranks = start_timeout, timeout, min_ranks
        self.store = opened.add(_anonymous_file("store"))
        self.notices = opened.add(open_pipe())  # the parent reads, the ranks write
        self.exit_pipe = opened.add(open_pipe())  # the ranks read, the parent writes
        self.ranks = [_Rank(number, size, prefix, opened) for number in range(size)]
        opened.callback(self._end)

    def _end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.close()

    def start(self, method: str, fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> None:
        """Start all ranks. Return when every rank has joined the group and is about to call the function.

        Without ``backend`` the ranks join no group.
        """
        deadline = time.monotonic() + self.start_timeout
        context: Any = multiprocessing.get_context(method)
        payload, secret = Payload(fn, args), Secret.of_launcher("spawn")
        for rank in self.ranks:
            with hidden_main(not payload.by_name), _garbage_collection_disabled() as collects_garbage:
                spec = RankSpec(
                    rank=rank.number,
                    size=len(self.ranks),
                    backend=backend,
                    # Longer than the timeout of the parent, whose error shows the stacks of the ranks.
                    timeout=None if self.timeout is None else self.start_timeout + self.timeout,
                    parent=os.getpid(),
                    secret=secret,
                    store=_path(self.store),
                    notices=_path(self.notices),
                    exit_pipe=_path(self.exit_pipe),
                    report=_path(rank.report),
                    stack=_path(rank.stack),
                    streams=tuple(_path(output.descriptor) for output in rank.outputs),
                    interactive=tuple(is_interactive(stream) for stream in (sys.stdout, sys.stderr)),
                    collects_garbage=collects_garbage,
                )
                rank.start(context.Process(target=rank_main, args=(spec, payload)))
        self._watch(lambda rank: rank.kind is not None, "starting", deadline, f"start_timeout={self.start_timeout:g}")

    def results(self) -> list[Any]:
        """Wait until the function has returned on all ranks. Return the results by rank, None for a lost one."""
        began = max(rank.when for rank in self.ranks) / 1e9  # when the last function began: the notice STARTED
        deadline = None if self.timeout is None else began + self.timeout
        self._watch(lambda rank: rank.kind == RETURNED, _RUNNING, deadline, f"timeout={self.timeout}")
        return [None if rank.is_lost else unpacked(_content(rank.report)) for rank in self.ranks]

    def finish(self) -> None:
        """Let the ranks destroy their group and exit. Return when all have exited."""
        os.write(self.exit_pipe, bytes(len(self.ranks)))
        deadline = time.monotonic() + self.start_timeout
        limit = f"start_timeout={self.start_timeout:g}"
        self._watch(lambda rank: rank.exitcode == 0, "destroying their group", deadline, limit)

    def _watch(self, done: Callable[["_Rank"], bool], activity: str, deadline: float | None, limit: str) -> None:
        """Wait until all ranks are done or lost; forward their output; raise the first failure.

        Args:
            done: whether a rank has completed the activity.
            activity: what the ranks do, for the error.
            deadline: on the clock of time.monotonic(), or None.
            limit: the option of spawn that sets the deadline, for the error.
        """
        outputs = {output.descriptor: output for rank in self.ranks for output in rank.outputs}
        while busy := [rank for rank in self.ranks if not (rank.is_lost or done(rank))]:
            left_ranks = [rank for rank in self.ranks if not rank.is_lost]
            watched = [rank.pidfd for rank in left_ranks if rank in busy or rank.exitcode is None]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([self.notices, *watched, *outputs], left)
            if not ready or left == 0:
                raise TimeoutError(self._timeout_text(busy, activity, limit))
            for descriptor in ready:
                if descriptor in outputs:
                    outputs[descriptor].forward()
            self._read_notices()
            self._raise_first_failure()

    def _read_notices(self) -> None:
        while wait([self.notices], 0):
            number, kind, when = NOTICE.unpack(os.read(self.notices, NOTICE.size))
            self.ranks[number].kind, self.ranks[number].when = kind, when

    def _raise_first_failure(self) -> None:
        """Raise the first failure, if there is one. A death comes before an exception, which it has probably caused."""
        # 1. Ranks that have died or raised. A rank may have sent its notice just before it ended, so look twice.
        ended = [rank for rank in self.ranks if rank.has_died()]
        if ended:
            self._read_notices()
        raised = sorted((rank for rank in self.ranks if rank.kind == RAISED), key=lambda rank: rank.when)
        ended = [rank for rank in ended if rank.has_died()]
        # 2. If ``min_ranks`` are left, the others go on after deaths in the function. A rank that has died before it
        # had joined the group fails the call, because the others would wait for it.
        died_later = all(rank.kind is not None for rank in ended)
        if died_later and not raised and len(self.ranks) - len(ended) >= self.min_ranks:
            for rank in ended:
                rank.is_lost = True
            return
        # 3. Otherwise the call fails with the first failure, and lists the others.
        if failed := ended + raised:
            first, *others = failed
            raise first.failure([other.failure_text() for other in others])

    def _timeout_text(self, busy: list["_Rank"], activity: str, limit: str) -> str:
        """The error at a deadline, with the stacks of the ``busy`` ranks, which a signal makes them write."""
        for rank in busy:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.pidfd, SHOW_STACK)
        with contextlib.suppress(TimeoutError):
            shown = time.monotonic() + _STACK_TIME
            until(lambda: all(_content(rank.stack) for rank in busy), shown, "the stacks")
        time.sleep(0.05)  # a stack is written line by line
        numbers = ", ".join(str(rank.number) for rank in busy)
        stacks = "\n".join(
            f"\nStack of rank {rank.number}:\n{_content(rank.stack).decode(errors='replace') or '(no stack)'}"
            for rank in busy
        )
        returned = ", ".join(str(rank.number) for rank in self.ranks if rank.kind == RETURNED and rank not in busy)
        others = (
            f" (the function has returned on rank {returned}, for which they may wait)"
            if returned and activity == _RUNNING
            else ""
        )
        return (
            f"spawn: with {limit} s these of {len(self.ranks)} ranks were still {activity}: {numbers}{others}. "
            f"Give a longer time if they need it\n{stacks}"
        )


class _Rank:
    """One rank, on the side of the parent."""

    def __init__(self, number: int, size: int, prefix: bool | None, opened: Opened) -> None:
        self.number, self._opened = number, opened
        self.process: BaseProcess | None = None
        self.pidfd = -1
        self.report = opened.add(_anonymous_file("report"))
        self.stack = opened.add(_anonymous_file("stack"))
        self.outputs: list[Output] = []
        for name in ("stdout", "stderr"):
            has_prefix = size > 1 and is_interactive(getattr(sys, name)) if prefix is None else prefix
            self.outputs.append(opened.enter_context(contextlib.closing(Output(name, number, has_prefix))))
        self.kind: int | None = None  # of its last notice: STARTED, then RETURNED or RAISED
        self.when = 0  # the time in its last notice, in ns
        self.is_lost = False  # whether it has died, and the others go on without it

    def start(self, process: BaseProcess) -> None:
        with warnings.catch_warnings():  # Python 3.12 warns of a fork with threads, for which rank_main is made
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except BlockingIOError as error:
                text = f"spawn: rank {self.number}: its process cannot start ({error.strerror}); {remedy()}"
                raise RuntimeError(text) from None
        self.process = process
        self.pidfd = self._opened.add(os.pidfd_open(process.pid or 0))

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode if self.process else None

    def has_died(self) -> bool:
        """Whether the rank has exited, or is exiting, neither after an exception nor after a normal return."""
        if self.process and self.exitcode is None and _is_exiting(self.process.pid):
            self.process.join(_EXIT_TIME)
        normal = (None, 0) if self.kind == RETURNED else (None,)
        return self.kind != RAISED and self.exitcode not in normal

    def failure(self, others: list[str]) -> RankFailedError:
        """The error that the parent raises. ``others`` are the texts of later failures."""
        cause, text = self._exception() if self.kind == RAISED else (None, "")
        this_rank = f"rank {self.number} raised\n\n{text}" if text else self.failure_text()
        failure = RankFailedError("\n".join([this_rank, *(f"Afterwards {other}" for other in others)]), self.number)
        failure.__cause__ = cause
        return failure

    def failure_text(self) -> str:
        """The failure in one line."""
        if self.kind == RAISED:
            return f"rank {self.number} raised {self._exception()[1].strip().splitlines()[-1]}"
        code = self.exitcode or 0
        signal_name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        manner = f"was killed by {signal_name}" if code < 0 else f"exited with status {code}"
        moments = {None: "before its function began", RETURNED: "while it destroyed its group"}
        moment = moments.get(self.kind, "before its function returned")
        return f"rank {self.number} {manner} {moment}"

    def _exception(self) -> tuple[BaseException | None, str]:
        """The exception of the rank, if it can be made here, and its traceback."""
        cause, text = unpacked(_content(self.report))
        try:
            return unpacked(cause) if cause else None, text
        except Exception:  # a class that only the rank can create
            return None, text

    def kill(self) -> None:
        if self.process and self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the rank and its child processes
            self.process.kill()  # a rank that has not called setpgid yet

    def close(self) -> None:
        if self.process:
            self.process.join(_EXIT_TIME)
            with contextlib.suppress(ValueError):  # the process has not exited
                self.process.close()


@contextlib.contextmanager
def _garbage_collection_disabled() -> Iterator[bool]:
    """Context of a fork: without it, garbage collection in the forked rank would destroy objects of the parent.

    The context yields whether garbage collection was enabled. The setting belongs to the process, so only one thread at
    a time may change it.
    """
    with _garbage_collection_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield was_enabled
        finally:
            if was_enabled:
                gc.enable()


def _replace_lock() -> None:
    global _garbage_collection_lock
    _garbage_collection_lock = threading.Lock()


_garbage_collection_lock = threading.Lock()
os.register_at_fork(after_in_child=_replace_lock)  # the lock may be held by a thread of the parent


def _anonymous_file(name: str) -> int:
    return os.memfd_create(f"dist_prims:{name}")


def _path(descriptor: int) -> str:
    """The path by which other processes open a file of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _is_exiting(pid: int | None) -> bool:
    """Whether the kernel has begun to end the process, which it does before it closes the sockets that peers watch."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(after_name[6]) & _PF_EXITING)
