"""Main function of a spawned rank: set the process up, run the function, report, wait for the other ranks, exit.

:mod:`.spawn_parent` starts :func:`rank_main` in each rank's process. A rank sends *notices*, small records in a pipe
that all ranks share, and a *report*, the result or the error of its function, in a file.

A rank that fails and destroys its group at once makes the other ranks fail too ("connection reset by peer"), and their
errors race with the first error to the parent. A rank therefore reports *first*. Then the rank keeps its connections
open until the parent has received the reports of all ranks, and exits or is killed. The parent acts as the barrier,
which needs no message within the group. A rank whose function has returned leaves its groups meanwhile.

The files and pipes belong to the parent, and the rank opens them through ``/proc``. The files are anonymous: they have
no name that another process could guess, other users may not open them, and the kernel frees each with its last
descriptor.
"""

import faulthandler
import gc
import io
import os
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from ..processes import die_with_parent
from ..rendezvous.secret import Secret, keep_secret_of_parent
from ..tracing.session import end_trace_of_environment
from .join import init
from .payload import Payload, packed, unpacked

__all__: list[str] = []

STARTED, RETURNED, RAISED = 0, 1, 2  # kinds of notices: the function begins, has returned, has raised
NOTICE = struct.Struct("=iiq")  # rank, kind, time in ns; smaller than PIPE_BUF, so that a write is atomic
SHOW_STACK = signal.SIGRTMIN  # SIGUSR1 is used by batch systems


@dataclass(frozen=True)
class RankSpec:
    """The parameters of a rank, as plain data that can also be sent to a fresh interpreter. Paths are texts."""

    rank: int
    size: int
    backend: str | None  # of the group; None: the rank joins none
    timeout: float | None  # of the group, in seconds; None: the default of init()
    parent: int  # the id of the parent's process
    secret: Secret  # of the ranks
    store: str  # the file for the rendezvous of the ranks
    notices: str  # the pipe for the notices of all ranks
    exit_pipe: str  # the rank exits after it has read a byte from this pipe
    report: str  # the file for the result or the error
    stack: str  # the file for the stack, after SHOW_STACK
    streams: tuple[str, ...]  # the pipes for stdout and stderr
    interactive: tuple[bool, ...]  # whether each of these streams is shown to a user at once
    collects_garbage: bool  # whether the parent has garbage collection enabled


class _Stream(io.TextIOWrapper):
    """A line-buffered stream of a rank. ``isatty()`` is true if the stream of the parent is ``interactive``."""

    def __init__(self, descriptor: int, interactive: bool) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        self._interactive = interactive

    def isatty(self) -> bool:
        return self._interactive


def rank_main(spec: RankSpec, payload: Payload) -> NoReturn:
    """Run one rank, and end the process."""
    status = 1
    try:
        _set_up(spec)
        kind, when, report = _run_function(spec, payload)
        _send_report(spec, kind, when, report)
        if kind == RETURNED:
            _leave_groups()
        with open(spec.exit_pipe, "rb", buffering=0) as pipe:
            pipe.read(1)  # the parent has the reports of all ranks
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:  # no interpreter shutdown: a forked rank would run the parent's exit handlers and destructors
        try:
            end_trace_of_environment()  # which an exit handler would do
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _set_up(spec: RankSpec) -> None:
    die_with_parent(spec.parent)
    gc.freeze()  # the destructor of an inherited object may wait for a thread that only the parent has
    if spec.collects_garbage:
        gc.enable()
    keep_secret_of_parent(spec.secret)
    streams = zip((1, 2), ("stdout", "stderr"), spec.streams, spec.interactive, strict=True)
    for descriptor, name, path, interactive in streams:
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, descriptor)  # for the output of C code as well
        os.close(pipe)
        setattr(sys, name, _Stream(descriptor, interactive))
    os.setpgid(0, 0)  # so that the parent can kill the rank together with its child processes
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # inherited handlers are for a forked parent only
        signal.signal(signal_number, signal.SIG_DFL)
    faulthandler.register(SHOW_STACK, open(spec.stack, "wb"), all_threads=True)  # noqa: SIM115 - open until the process exits
    torch.set_num_threads(1)  # the OpenMP threads of the parent did not survive the fork: waiting for them hangs
    for name in [name for name in os.environ if name.startswith(("MASTER_", "TORCHELASTIC_"))]:
        del os.environ[name]  # set by the launcher of the parent
    place = {"RANK": spec.rank, "WORLD_SIZE": spec.size, "LOCAL_RANK": spec.rank, "LOCAL_WORLD_SIZE": spec.size}
    os.environ.update({name: str(value) for name, value in place.items()}, DIST_PRIMS_RENDEZVOUS=f"file://{spec.store}")


def _run_function(spec: RankSpec, payload: Payload) -> tuple[int, int, bytes]:
    """Join the group and run the function. Return kind and time (0 without a failure) of the notice, and the report."""
    try:
        fn, args = payload.open()
        if spec.backend:
            init(spec.backend, timeout=spec.timeout)
        _notify(spec, STARTED, time.monotonic_ns())
        return RETURNED, 0, packed(fn(*args))
    except BaseException as error:
        return RAISED, time.monotonic_ns(), _pickled_error(error)


def _pickled_error(error: BaseException) -> bytes:
    """The report of a failure: the exception, packed, and its text."""
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame of this module
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:  # the exception itself is sent only if the parent can make it again
        cause = packed(error)
        unpacked(cause)  # many exceptions can be pickled but not unpickled
    except Exception:
        cause = b""
    return packed((cause, text))


def _send_report(spec: RankSpec, kind: int, when: int, report: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(spec.report, "wb") as file:
        file.write(report)
    _notify(spec, kind, when)


def _notify(spec: RankSpec, kind: int, when: int) -> None:
    with open(spec.notices, "wb", buffering=0) as notices:
        notices.write(NOTICE.pack(spec.rank, kind, when))


def _leave_groups() -> None:
    """Leave the groups of the backend, as at the end of a program: a rank that waits for this one raises at once.

    Messages that this rank has sent still arrive. A group of gloo stays until all ranks have returned, because gloo
    resets its connections when it ends, and messages would be lost.
    """
    if adapter := sys.modules.get("dist_prims._backend"):
        adapter.run_exit_actions()
