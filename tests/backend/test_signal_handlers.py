"""Signal handlers that use the group whose wait they interrupt. Python runs them on the waiting thread, inside it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import run_scripts
from ranks import backend_of, span, spawn, store

import dist_prims
from dist_prims.backend.multi_host import MultiHostSchedules
from dist_prims.errors import CommError

LIMIT = 50  # seconds, of any wait here


@contextmanager
def handled(handler: Callable[[], Any]) -> Iterator[list[Any]]:
    """A signal interrupts the call in the block, once. What the handler returns is in the list."""
    returned: list[Any] = []
    outside = sys._getframe(2)

    def on_signal(_: int, frame: FrameType | None) -> None:
        if frame is outside:  # the call has not begun
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            returned.append(handler())

    before = signal.signal(signal.SIGALRM, on_signal)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        yield returned
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pinned() -> Any:
    return dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="ring"), backend="dist_prims")


def queued(group: Any) -> None:
    """A thread of the queue runs the first collective, and this thread waits for the second."""
    works = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(2)]
    works[1].wait()


WAITS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 20), group=group),
    "direct": lambda group: dist_prims.all_reduce(torch.ones(9), group=group),
    "async": lambda group: dist.all_reduce(torch.ones(9), group=group, async_op=True).wait(),
    "queued": queued,
    "with a limit": lambda group: dist.barrier(group=group, async_op=True).wait(timedelta(seconds=LIMIT)),
    "recv": lambda group: dist.recv(torch.ones(4), 1, group=group),
    "irecv": lambda group: dist.irecv(torch.ones(4), 1, group=group).wait(),
    "send": lambda group: dist.send(torch.ones(1 << 20), 1, group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(timedelta(seconds=LIMIT)),
}
ENDS: dict[str, Callable[[Any], Any]] = {
    "destroy": dist.destroy_process_group,
    "abort": lambda group: backend_of(group).abort(),
}


def interrupt(group: Any, wait: str, end: str, schedule: str = "any schedule") -> None:
    """Rank 0 waits for ranks that do not come; a handler ends the group."""
    over = f"over {wait} {end} {schedule}"
    print(f"rank {dist.get_rank()}: {over}", flush=True)
    if dist.get_rank() == 0:
        with handled(lambda: ENDS[end](group)) as ended:
            with pytest.raises((CommError, ValueError)) as caught:
                WAITS[wait](group)
            # torch logs the failed call, and for that looks up the group that is destroyed.
            error = caught.value if isinstance(caught.value, CommError) else caught.value.__context__
            # Across hosts Python may still choose the schedule, and the call finds the group destroyed.
            assert isinstance(error, CommError) or "the group has been destroyed" in str(error), (wait, end)
            assert "rank 0" in str(error), (wait, end)
            assert ended == [None], (wait, end)
        with pytest.raises((RuntimeError, ValueError), match=r"destroyed|Invalid process group|not initialized"):
            dist.all_reduce(torch.ones(9), group=group)
        store().set(over, "")
    else:
        store().wait([over], timedelta(seconds=LIMIT))


PAIRS = [*itertools.product(WAITS, ENDS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [PAIRS[::4] + PAIRS[3::4], pytest.param(PAIRS[1::4] + PAIRS[2::4], marks=pytest.mark.slow)],
    ids=["", "more"],
)
def test_a_handler_ends_the_group_that_it_interrupts(pairs: list[tuple[str, str]]) -> None:
    def body() -> None:
        for wait, end in pairs:
            interrupt(dist.new_group(), wait, end)
        interrupt(pinned(), "all_reduce", "destroy", "ring")

    spawn(body, 2)


def test_a_python_collective_in_a_handler_inside_another_is_refused() -> None:
    """It waited for the one that it interrupts."""

    def in_handler() -> str:
        with pytest.raises(RuntimeError, match="inside another collective of the same group") as caught:
            dist_prims.scan(torch.ones(3))
        store().set("handled", "")
        return str(caught.value)

    def body() -> None:
        tensor = torch.ones(1 << 20)
        dist_prims.scan(torch.ones(1 << 20))  # the next one waits soon after it begins, and for long
        if dist.get_rank() == 0:
            with handled(in_handler) as errors:
                dist_prims.scan(tensor)
            assert "scan (" in errors[0]
        else:
            store().wait(["handled"], timedelta(seconds=LIMIT))
            dist_prims.scan(tensor)
        dist_prims.scan(tensor)
        assert tensor[0] == (1, 3)[dist.get_rank()]

    spawn(body, 2)


@pytest.mark.slow
def test_a_handler_ends_a_group_across_hosts() -> None:
    """The ranks of the other hosts get an error at their next call."""

    def body() -> None:
        for wait in ("all_reduce", "async", "monitored_barrier"):
            group = dist.new_group()
            # Python chooses the schedule now. A handler that comes while it chooses ends no call that others know of.
            WAITS["all_reduce"](group)
            interrupt(group, wait, "destroy")
            if dist.get_rank() == 2:
                with pytest.raises(CommError, match=r"rank 0 on host a"):
                    WAITS["all_reduce"](group)
            dist.barrier()  # rank 1 leaves its groups after its last iteration, and would be named

    span("a b b", body, group=2 * LIMIT, timeout=90)


def test_a_collective_in_a_handler_is_refused_and_the_interrupted_one_goes_on() -> None:
    def in_handler(group: Any, other: Any, wait: str) -> str:
        dist.all_reduce(torch.ones(9), group=other)  # another group is free
        texts = []
        for call in ("all_reduce", "direct", "async", "with a limit"):
            with pytest.raises(RuntimeError) as refused:
                WAITS[call](group)
            texts.append(str(refused.value))
        store().set(f"refused in {wait}", "")
        return "\n".join(texts)

    def check(wait: str) -> None:
        group, other = dist.new_group(), dist.new_group()
        if dist.get_rank() == 0:
            with handled(lambda: in_handler(group, other, wait)) as texts:
                WAITS[wait](group)
            for line, call in zip(
                texts[0].split("\n"), ("all_reduce", "all_reduce", "all_reduce", "barrier"), strict=True
            ):
                expected = f"rank 0, dist_prims:{call}: a signal handler or a finalizer makes this call"
                assert line.startswith(expected), (wait, line)
                assert "inside dist_prims:all_reduce of the same group" in line, (wait, line)
                assert "set a flag there" in line, (wait, line)
        else:
            dist.all_reduce(torch.ones(9), group=other)
            store().wait([f"refused in {wait}"], timedelta(seconds=LIMIT))
            WAITS[wait](group)
        total = torch.ones(9)
        dist.all_reduce(total, group=group)  # the numbers of the calls still agree
        assert total[0] == 2, wait

    def body() -> None:
        for wait in ("all_reduce", "direct", "async", "queued"):
            check(wait)

    spawn(body, 2)


def test_a_handler_may_send_and_reduce_inside_a_receive() -> None:
    def body() -> None:
        found, total = torch.zeros(3), torch.ones(3)
        if dist.get_rank() == 0:
            with handled(lambda: (dist.all_reduce(total), dist.send(total, 1))):
                dist.recv(found, 1)
            assert found.tolist() == [4, 4, 4]
        else:
            dist.all_reduce(total)
            dist.recv(found, 0)
            dist.send(2 * found, 0)
        assert total.tolist() == [2, 2, 2]

    spawn(body, 2)


def test_a_handler_may_ask_for_a_schedule_while_one_is_chosen() -> None:
    """Across hosts Python chooses the schedule, and there a handler may run that needs one itself."""

    def body() -> None:
        asked: list[str] = []
        choose = MultiHostSchedules.choose

        def and_ask(self: MultiHostSchedules, collective: str, nbytes: int, root: int, is_even: bool) -> Any:
            if not asked:
                asked.append("")
                asked[0] = backend_of(group).algorithm(nbytes)
            return choose(self, collective, nbytes, root, is_even)

        MultiHostSchedules.choose = and_ask  # type: ignore[method-assign, assignment]
        group = dist.new_group()
        total = torch.ones(1 << 16)
        dist.all_reduce(total, group=group)
        assert total[0] == 2
        assert asked[0]

    span("a b", body, group=LIMIT, timeout=90)


@pytest.mark.slow
def test_exit_in_a_handler_ends_the_process_with_its_code(tmp_path: Path) -> None:
    """With the default group: destroyed by the handler first, or left to the end of the process."""
    program = """
import signal
destroys, async_op = number & 2, bool(number & 4)
dist.init_process_group("dist_prims", init_method=f"file://{folder}/{number // 2}", rank=number % 2, world_size=2)
def handler(*_):
    if destroys:
        dist.destroy_process_group()
    sys.exit(3)
if number % 2:
    await_end(number - 1)
    dist.destroy_process_group()
else:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    work = dist.all_reduce(torch.ones(1 << 20), async_op=async_op)
    work.wait() if async_op else None
"""
    assert run_scripts(program, 8, tmp_path) == ["3: ", "0: "] * 4


def test_ctrl_c_comes_soon_while_a_receive_is_pending() -> None:
    """The carrier, which moves the pending message, once looked for signals in place of the main thread."""

    def body() -> float:
        rank, slowest = dist.get_rank(), 0.0
        for turn in range(3):
            group = dist.new_group()
            if rank == 0:
                dist.irecv(torch.ones(4), 1, group=group)
                pressed: list[float] = []

                def press(when: list[float] = pressed) -> None:
                    when.append(time.monotonic())
                    os.kill(os.getpid(), signal.SIGINT)

                signal.signal(signal.SIGINT, signal.default_int_handler)
                timer = threading.Timer(0.2, press)
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    dist.all_reduce(torch.ones(9), group=group)
                slowest = max(slowest, time.monotonic() - pressed[0])
                timer.join()
                store().set(f"over {turn}", "")
            else:
                store().wait([f"over {turn}"], timedelta(seconds=LIMIT))
            dist.destroy_process_group(group)
        return slowest

    assert spawn(body, 2)[0] < 5
