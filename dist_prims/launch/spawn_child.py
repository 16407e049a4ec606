"""What a spawned rank does: become a rank, run the function, report, wait for the others, leave.

A rank that fails and tears its group down at once makes the others fail too ("connection reset by peer"), and their
errors race with its own to the parent. So a rank reports *first* and then holds still, its connections open, until the
parent has heard everyone: then it leaves, or is killed. The parent is the barrier; no message of the group is needed.

Whatever parent and rank share (rendezvous, reports, stacks, pipes) is an anonymous file of the parent, which the rank
opens through ``/proc``: no name to guess, nobody else may open it, and the kernel frees it with its last descriptor.
"""

import ctypes
import faulthandler
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

from .join import init
from .payload import Payload, packed, unpacked

__all__ = ["NOTICE", "RAISED", "RETURNED", "SHOW_STACK", "STARTED", "Orders", "rank_main"]

STARTED, RETURNED, RAISED = 0, 1, 2
NOTICE = struct.Struct("=iiq")  # rank, one of these, when; far below PIPE_BUF, so a write of one is never torn
SHOW_STACK = signal.SIGRTMIN  # no program that we know of uses it; SIGUSR1 is taken by batch systems

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Orders:
    """All that a rank needs to know, as plain data: it also travels to a process that shares no memory."""

    rank: int
    size: int
    backend: str
    timeout: float | None  # of the group
    join: bool
    parent: int
    store: str
    notices: str
    gate: str
    report: str
    stack: str
    streams: tuple[str, ...]  # stdout and stderr
    watched: tuple[bool, ...]  # whether a person reads them as they come


class _Stream(io.TextIOWrapper):
    """A stream of a rank: whole lines, and a terminal for those that ask if the parent's is one."""

    def __init__(self, number: int, watched: bool) -> None:
        raw = io.FileIO(number, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        self._watched = watched

    def isatty(self) -> bool:
        return self._watched


def rank_main(orders: Orders, payload: Payload) -> NoReturn:
    status = 1
    try:
        _become_rank(orders)
        _report(orders, *_outcome(orders, payload))
        _wait_for_the_others(orders)
        if dist.is_initialized():
            dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:  # no interpreter shutdown: a forked rank would run the parent's exit handlers and destructors
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_rank(orders: Orders) -> None:
    _die_with(orders.parent)
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), orders.streams, strict=True), start=1):
        pipe = os.open(path, os.O_WRONLY)
        os.dup2(pipe, number)  # what C writes goes there as well
        os.close(pipe)
        setattr(sys, name, _Stream(number, orders.watched[number - 1]))
    os.setpgid(0, 0)  # so that the parent can end the rank together with whatever the rank starts
    for number in (signal.SIGINT, signal.SIGTERM):  # handlers of a forked parent speak for the parent
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(SHOW_STACK, open(orders.stack, "wb"), all_threads=True)  # noqa: SIM115 - open until we exit
    torch.set_num_threads(1)  # the OpenMP threads of the parent did not survive the fork: waiting for them hangs
    for name in [name for name in os.environ if name.startswith(("MASTER_", "TORCHELASTIC_"))]:
        del os.environ[name]  # of a launcher that started the parent
    local = {"RANK": orders.rank, "WORLD_SIZE": orders.size, "LOCAL_RANK": orders.rank, "LOCAL_WORLD_SIZE": orders.size}
    os.environ.update(
        {name: str(value) for name, value in local.items()}, DIST_PRIMS_RENDEZVOUS=f"file://{orders.store}"
    )


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _outcome(orders: Orders, payload: Payload) -> tuple[int, int, bytes]:
    try:
        fn, args = payload.open()
        if orders.join:
            init(orders.backend, timeout=orders.timeout)
        _notify(orders, STARTED, time.monotonic_ns())
        return RETURNED, 0, packed(fn(*args))
    except BaseException as error:
        return RAISED, time.monotonic_ns(), _pickled_error(error)


def _pickled_error(error: BaseException) -> bytes:
    frames = error.__traceback__ and error.__traceback__.tb_next  # without ours: the reader looks for their function
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        cause = packed(error)
        unpacked(cause)  # many exceptions pickle but cannot be made again
    except Exception:
        cause = b""
    return packed((cause, text))


def _report(orders: Orders, kind: int, when: int, payload: bytes) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(orders.report, "wb") as report:
        report.write(payload)
    _notify(orders, kind, when)


def _notify(orders: Orders, kind: int, when: int) -> None:
    with open(orders.notices, "wb", buffering=0) as notices:
        notices.write(NOTICE.pack(orders.rank, kind, when))


def _wait_for_the_others(orders: Orders) -> None:
    with open(orders.gate, "rb", buffering=0) as gate:
        gate.read(1)
