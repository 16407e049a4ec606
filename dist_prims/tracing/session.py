"""``trace()``, and the trace that ``DIST_PRIMS_TRACE`` asks for."""

from __future__ import annotations

import multiprocessing.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._output import print_notice
from . import clock, recorder

__all__: list[str] = []

_VARIABLE = "DIST_PRIMS_TRACE"
_EXIT_PRIORITY = -100  # after the finalizers of the program

_of_environment: recorder.TraceRecorder | None = None
_process_of_environment = 0  # the process that has looked at the variable; a forked child has another id


@contextmanager
def trace(path: Path | str, *, events: int = recorder.EVENTS) -> Iterator[None]:
    """Record the communication of this process in the folder ``path`` until the block ends, also by an exception.

    Every rank calls it, but it is not a collective. A file of ``path`` has space for ``events`` events of C++, of 64
    bytes each, and a quarter as many of Python; further ones are counted and dropped. If another trace is active, it
    pauses: the innermost one records. ``python -m dist_prims trace report PATH`` prints where the time went.

    >>> import tempfile, torch, dist_prims
    >>> from dist_prims.tracing.reader import read
    >>> def traced(folder):
    ...     with dist_prims.trace(folder):
    ...         torch.distributed.all_reduce(torch.ones(4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = dist_prims.spawn(traced, 2, (folder,), backend="dist_prims", timeout=60)
    ...     [(call.what, call.nbytes, sorted(call.parts)) for call in read(folder).calls()]
    [('all_reduce', 16, [0, 1])]
    """
    if events < 1:
        raise ValueError(f"trace: events={events} must be at least 1")
    recording = recorder.begin(path, events)
    clock.attach(recording)
    try:
        yield
    finally:
        recorder.end(recording)


def begin_trace_of_environment() -> None:
    """Begin the trace that the variable asks for; called when a group is made. It ends with the process."""
    global _of_environment, _process_of_environment
    if _process_of_environment == os.getpid():
        return
    _process_of_environment = os.getpid()
    _of_environment = None
    folder = os.environ.get(_VARIABLE)
    if not folder:
        return
    try:
        _of_environment = recorder.begin(folder, began_by=_VARIABLE)
    except OSError as error:  # the program matters more
        print_notice(f"{_VARIABLE}={folder}: nothing is traced: {error}")
        return
    multiprocessing.util.Finalize(None, end_trace_of_environment, exitpriority=_EXIT_PRIORITY)


def end_trace_of_environment() -> None:
    """End the trace of the environment; for processes that end without the interpreter's exit handlers, too."""
    if _of_environment is None:
        return
    try:
        recorder.end(_of_environment)
    except OSError as error:  # a full disk; the program matters more
        folder = _of_environment.folder
        print_notice(f"{_VARIABLE}={folder}: the trace of process {os.getpid()} is not finished: {error}")
