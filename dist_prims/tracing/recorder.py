"""The recorder makes the file of a trace of this process, and writes the events of Python to it (see ``format.py``).

C++ maps the same file and writes to slots of its own, so neither has to wait for the other. While the trace is active,
all of the file is reserved. At its end a file without the unused slots replaces it. A process that is killed leaves the
whole file, which can be read, too. Any thread may record; times are nanoseconds of ``time.monotonic_ns()``.

``active`` is the recorder of the innermost trace, or None: a hook reads it, and does nothing without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from . import format as fmt

__all__: list[str] = []

EVENTS = 1 << 18  # of C++ by default: 16 MiB
_RESERVED_FOR_TEXTS = 1024
_MOST_NUMBERS = 2**32 - 1  # of groups: afterwards the numbers begin again
_POPULATE = 23  # MADV_POPULATE_WRITE, for which the mmap module has no name
_CORE = Path(__file__).parents[1] / "lib" / "libdist_prims_core.so"

active: TraceRecorder | None = None
_open: list[TraceRecorder] = []  # the innermost is the last
_lock = threading.RLock()  # reentrant: a signal handler may begin or end a trace
_numbers = itertools.count(1)  # of the traces of this process
_groups: WeakKeyDictionary[Any, dict[str, tuple[int, str]]] = WeakKeyDictionary()  # number and description, by counter
_group_numbers = itertools.count(1)


class Context(threading.local):
    """The collective that a thread executes: ``collectives/traced_call.py`` sets it, and events of Python take it."""

    where = (0, 0, -1)  # the number of the group, the number of the call in the group, and the step of its schedule

    def __init__(self) -> None:
        self.thread = threading.get_native_id()  # a system call, so once for each thread


context = Context()


class TraceRecorder:
    """The file of one trace."""

    def __init__(self, folder: Path, events: int, began_by: str) -> None:
        self.owner = os.getpid()
        self.folder = folder
        self._python_slots = max(events // 4, 1024) + _RESERVED_FOR_TEXTS
        self._cpp_offset = fmt.HEADER_BYTES + fmt.SLOT * self._python_slots
        self._taken = itertools.count()  # the next slot for an event of Python; taking one is atomic
        self._text_slots = self._dropped = 0
        self._names: dict[str, int] = {}  # the numbers of the names of events
        self._described: set[int] = set()  # the numbers of the groups whose descriptions are in the file
        self._guard = threading.RLock()  # of texts and of the count of dropped events; reentrant for signal handlers
        self.path, self._memory = self._make_file(events)
        try:
            self._native = _open_native(self.path)  # the number of the file in C++; 0 without the native core
        except OSError:
            self.path.unlink()
            raise
        self.number = next(_numbers)
        self.closers: list[Callable[[], None]] = []  # called when the trace ends, before its file is finished
        self.text(fmt.PROCESS, self.number, json.dumps(_describe_process(self.number, began_by)))

    def _make_file(self, events: int) -> tuple[Path, mmap.mmap]:
        """Make a new file with its header, reserve its space, and map it."""
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        for number in itertools.count():
            path = self.folder / f"{host}-{os.getpid()}-{number}.trace"
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                break
            except FileExistsError:  # an earlier trace
                continue
        try:
            size = self._cpp_offset + fmt.SLOT * events
            os.posix_fallocate(file, 0, size)  # a full disk is an error here, not a SIGBUS at the first access
            memory = mmap.mmap(file, size)
            with contextlib.suppress(OSError):  # Linux before 5.14: the pages come one by one, each at its first event
                memory.madvise(_POPULATE, 0, self._cpp_offset // mmap.PAGESIZE * mmap.PAGESIZE)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        header = fmt.HEADER.pack(
            *fmt.TraceHeader(fmt.MAGIC, fmt.VERSION, events, self._cpp_offset, 0, 0, self._python_slots, ended=0)
        )
        memory[8 : len(header)] = header[8:]
        memory[:8] = header[:8]  # last: a file with this number has a whole header
        return path, memory

    def event(
        self,
        kind: int,
        begin: int,
        end: int,
        *,
        nbytes: int = 0,
        peer: int = -1,
        name: str = "",
        collective: int = 0,
        failed: bool = False,
        where: tuple[int, int, int] | None = None,
    ) -> None:
        """Add an event.

        Args:
            kind, collective: as ``format.py`` numbers them.
            begin, end: times.
            peer: the other rank of the group; -1: none.
            where: group, call and step, as in :class:`Context`; None: the context of the thread.
        """
        slot = next(self._taken)
        if slot >= self._python_slots - _RESERVED_FOR_TEXTS:
            self._drop()
            return
        group, sequence, step = where or context.where
        fmt.EVENT.pack_into(
            self._memory,
            fmt.HEADER_BYTES + fmt.SLOT * slot,
            *(begin, end, nbytes, sequence, peer, step, context.thread, group, self._number_of_name(name)),
            *(0, collective, 0, 0, failed, kind),
        )

    def text(self, kind: int, number: int, text: str) -> None:
        """Add a text. Texts fill Python's slots from their end, which is reserved: events cannot take their space."""
        slots = fmt.text_slots(kind, number, text)
        with self._guard:
            if self._text_slots + len(slots) > _RESERVED_FOR_TEXTS:
                self._drop()
                return
            for slot in slots:
                self._text_slots += 1
                start = self._cpp_offset - fmt.SLOT * self._text_slots
                self._memory[start : start + fmt.SLOT - 1] = slot[:-1]  # the kind comes last, see format.py
                self._memory[start + fmt.SLOT - 1] = slot[-1]

    def _drop(self) -> None:
        with self._guard:
            self._dropped += 1
            fmt.COUNTER.pack_into(self._memory, fmt.DROPPED_BY_PYTHON, self._dropped)

    def _number_of_name(self, name: str) -> int:
        """The number of a name, whose text is added at its first use; 0 for an empty name."""
        number = self._names.get(name) if name else 0
        if number is None:
            with self._guard:
                number = self._names.setdefault(name, len(self._names) + 1)
                if number == len(self._names):
                    self.text(fmt.NAME, number, name)
        return number

    def describe_group(self, number: int, description: str) -> None:
        """Add the description of a group, once."""
        with self._guard:
            if number not in self._described:
                self._described.add(number)
                self.text(fmt.GROUP, number, description)

    def select(self) -> None:
        """Let C++ write to this file."""
        if self._native:
            _core().dist_prims_trace_select(self._native)

    def finish(self) -> None:
        """Replace the file by one without the unused slots. C++ must not write to it any more."""
        if self._native:
            _core().dist_prims_trace_close(self._native)
        header = fmt.TraceHeader(*fmt.HEADER.unpack_from(self._memory))
        events, texts = min(next(self._taken), self._python_slots - _RESERVED_FOR_TEXTS), self._text_slots
        python_slots, cpp_slots = events + texts, min(header.cpp_taken, header.cpp_slots)
        cpp_offset = fmt.HEADER_BYTES + fmt.SLOT * python_slots
        header = header._replace(cpp_slots=cpp_slots, cpp_offset=cpp_offset, python_slots=python_slots, ended=1)
        new = self.path.with_suffix(".unfinished")
        with new.open("wb") as file:
            file.write(fmt.HEADER.pack(*header).ljust(fmt.HEADER_BYTES, b"\0"))
            file.write(self._memory[fmt.HEADER_BYTES : fmt.HEADER_BYTES + fmt.SLOT * events])
            file.write(self._memory[self._cpp_offset - fmt.SLOT * texts : self._cpp_offset + fmt.SLOT * cpp_slots])
        new.replace(self.path)


def group_number(group: Any, counter: str, describe: Callable[[], Mapping[str, Any]]) -> int:
    """The number of a group in the traces of Python, whose description is added to the active trace.

    A group has a number for each ``counter``: what counts its calls, such as the executor of schedules or a pipeline.
    ``describe()`` is called once for each of them.
    """
    described = _groups.get(group, {}).get(counter)
    if described is None:
        description = json.dumps(describe())  # without the lock, because it may ask a store
        with _lock:
            number = next(_group_numbers) % _MOST_NUMBERS or _MOST_NUMBERS  # 32 bits, and not 0
            described = _groups.setdefault(group, {}).setdefault(counter, (number, description))
    number, description = described
    if (recorder := active) is not None:
        recorder.describe_group(number, description)
    return number


def started() -> int:
    """The time at which an event begins; 0 without a trace."""
    return time.monotonic_ns() if active is not None else 0


def record(kind: int, begin: int, **facts: Any) -> None:
    """Add an event that has ended now. ``begin`` is the result of :func:`started`; without a trace nothing happens.
    ``facts``: the keyword arguments of :meth:`TraceRecorder.event`."""
    recorder = active
    if begin and recorder is not None:
        recorder.event(kind, begin, time.monotonic_ns(), **facts)


class TracedWork:
    """A message whose event ends when this rank has waited for it. Make it when the message has been posted, while a
    trace is active. ``work``: what torch has returned for the message; ``kind``: SEND or RECEIVE."""

    def __init__(self, work: Any, kind: int, peer: int, nbytes: int) -> None:
        self._work, self._kind, self._peer, self._nbytes = work, kind, peer, nbytes
        self._where, self._posted = context.where, started()

    def wait(self, *arguments: Any) -> Any:
        """Wait as the work does; record the wait, and the message as well."""
        begin = started()
        result = self._work.wait(*arguments)
        record(fmt.WAIT, begin, peer=self._peer, nbytes=self._nbytes)
        record(self._kind, self._posted, where=self._where, peer=self._peer, nbytes=self._nbytes)
        return result


def begin(folder: Path | str, events: int = EVENTS, began_by: str = "program") -> TraceRecorder:
    """Begin a trace in ``folder``, with space for ``events`` events of C++. The trace that was active pauses until this
    one has ended. ``began_by``: what the description of the process says: the program, or an environment variable."""
    global active
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _lock:
        recorder = TraceRecorder(path, events, began_by)
        _open.append(recorder)
        active = recorder
        recorder.select()
    return recorder


def end(recorder: TraceRecorder) -> None:
    """End a trace; in a forked child, nothing."""
    global active
    if recorder.owner != os.getpid():
        return
    for close in recorder.closers:
        close()
    with _lock:
        if recorder not in _open:
            return
        _open.remove(recorder)
        active = _open[-1] if _open else None
        if active is not None:
            active.select()
        elif recorder._native:
            _core().dist_prims_trace_select(0)
        recorder.finish()


def _forget() -> None:
    """In a forked child: the file belongs to the parent."""
    global active, _lock
    _lock = threading.RLock()
    active = None
    _open.clear()
    context.thread = threading.get_native_id()


os.register_at_fork(after_in_child=_forget)


def _describe_process(number: int, began_by: str) -> dict[str, Any]:
    """What a reader must know of this process; ``number``: of the trace in this process."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "clock": clock_domain(),
        "rank": os.environ.get("RANK"),
        "number": number,
        "began_by": began_by,
        "began": time.time_ns(),
        "monotonic": time.monotonic_ns(),
    }


def clock_domain() -> str:
    """A name that two processes share if and only if they have the same monotonic clock: boot id and time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # no time namespaces before Linux 5.6, or no /proc
        return socket.gethostname()


_library: Any = None


def _core() -> Any:
    """The native core; None where the package has none."""
    global _library
    if _library is None and _CORE.exists():
        _library = ctypes.CDLL(str(_CORE))
    return _library


def _open_native(path: Path) -> int:
    """Let C++ map the file. Return its number there; 0 without the native core."""
    core = _core()
    if core is None:
        return 0
    error = ctypes.c_int(0)
    number = int(core.dist_prims_trace_open(os.fsencode(path), ctypes.byref(error)))
    if number < 0:
        raise OSError(error.value, os.strerror(error.value), str(path))
    return number
