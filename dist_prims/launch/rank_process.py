"""What a spawned rank does: become a rank, run the function, report, wait for the others, leave.

A rank that fails and tears its group down at once makes the others fail too ("connection reset by peer"), and their
errors race with its own to the parent. So a rank reports *first* and then holds still, its connections open, until the
parent has heard everyone: then it leaves, or is killed. The parent is the barrier; no message of the group is needed.

Whatever parent and rank share (rendezvous, reports, stacks, pipes) is an anonymous file of the parent, which the rank
opens through ``/proc``: no name to guess, nobody else may open it, and the kernel frees it with its last descriptor.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .join import init

__all__ = ["NOTICE", "RAISED", "RETURNED", "SHOW_STACK", "Orders", "rank_main"]

RETURNED, RAISED = 0, 1
NOTICE = struct.Struct("=iiq")  # rank, RETURNED or RAISED, when; far below PIPE_BUF, so a write of one is never torn
SHOW_STACK = signal.SIGRTMIN  # no program that we know of uses it; SIGUSR1 is taken by batch systems

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Orders:
    """All that a rank needs to know, as plain data: it also travels to a process that shares no memory."""

    rank: int
    size: int
    backend: str
    timeout: float
    join: bool
    parent: int
    store: str
    notices: str
    gate: str
    report: str
    stack: str


def rank_main(orders: Orders, fn: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    status = 1
    try:
        _become_rank(orders)
        _report(orders, *_outcome(orders, fn, args))
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


def _outcome(orders: Orders, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int, bytes]:
    try:
        if orders.join:
            init(orders.backend, timeout=orders.timeout)
        return RETURNED, 0, pickle.dumps(fn(*args))
    except BaseException as error:
        return RAISED, time.monotonic_ns(), _pickled_error(error)


def _pickled_error(error: BaseException) -> bytes:
    frames = error.__traceback__ and error.__traceback__.tb_next  # without ours: the reader looks for their function
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        cause = pickle.dumps(error)
        pickle.loads(cause)  # many exceptions pickle but cannot be made again
    except Exception:
        cause = b""
    return pickle.dumps((cause, text))


def _report(orders: Orders, kind: int, when: int, payload: bytes) -> None:
    with open(orders.report, "wb") as report:
        report.write(payload)
    with open(orders.notices, "wb", buffering=0) as notices:
        notices.write(NOTICE.pack(orders.rank, kind, when))


def _wait_for_the_others(orders: Orders) -> None:
    with open(orders.gate, "rb", buffering=0) as gate:
        gate.read(1)
