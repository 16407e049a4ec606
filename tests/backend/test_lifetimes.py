"""How groups end: several closes at once, callbacks that drop the last reference, errors on a thread of the group."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import run_scripts
from ranks import backend_of, span, spawn
from transports import require

import dist_prims
from dist_prims.backend import create, options, options_of
from dist_prims.backend.extension import extension
from dist_prims.errors import CommError
from dist_prims.torch_compat import default_group, group_store

LIMIT = 50  # seconds, of any wait here


def at_once(*actions: Callable[[], Any]) -> None:
    """On a thread each, the last one on this."""
    start = threading.Barrier(len(actions))

    def act(action: Callable[[], Any]) -> None:
        start.wait(LIMIT)
        action()

    threads = [threading.Thread(target=act, args=(action,), daemon=True) for action in actions[:-1]]
    for thread in threads:
        thread.start()
    act(actions[-1])
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


@pytest.mark.parametrize("under_way", [False, True], ids=["idle", "under way"])
def test_abort_beside_destroy_and_beside_itself(under_way: bool) -> None:
    def body() -> None:
        for turn in range(3 if under_way else 15):
            group = dist.new_group()
            ends = [backend_of(group).abort] * 3 + [lambda group=group: dist.destroy_process_group(group)]
            works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
            pending = []
            if under_way and dist.get_rank() == turn % 2:  # the other rank does not come
                pending = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(2)]
                pending.append(dist.irecv(torch.ones(9), 1 - dist.get_rank(), group=group))
            at_once(*ends)
            for work in pending:
                with pytest.raises(CommError):
                    work.wait()
            del ends, group, works, pending
            dist.barrier()

    spawn(body, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["collective", "message"])
@pytest.mark.parametrize("how", ["destroy", "drop"])
def test_a_callback_ends_the_group_on_its_own_thread(kind: str, how: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        for _ in range(10):
            group = dist.new_group()
            if kind == "collective":
                if rank == 1:
                    time.sleep(0.01)
                work = dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
            elif rank == 0:
                work = dist.irecv(torch.ones(4), 1, group=group)
            else:
                time.sleep(0.01)
                work = dist.isend(torch.ones(4), 0, group=group)
            last, done = [group], threading.Event()
            if how == "drop":
                forget(group)
            del group

            def end(_: Any, last: list[Any] = last, done: threading.Event = done) -> None:
                if how == "destroy":
                    dist.destroy_process_group(last[0])
                last.clear()
                gc.collect()
                done.set()

            future = work.get_future().then(end)
            del work
            assert done.wait(LIMIT)
            del future
            dist.barrier()

    spawn(body, 2)


def forget(group: Any) -> None:
    """Take the group out of all of torch's tables: the reference that is given is the last one."""
    world = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group)
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)
    dist.distributed_c10d._unregister_process_group(group.group_name)


def poll(work: Any) -> None:
    for _ in range(100 * LIMIT):
        if work.is_completed():
            return
        time.sleep(0.01)
    raise AssertionError("not completed")


def test_tensors_made_in_inference_mode_are_written_in_and_outside_of_it() -> None:
    """On any thread. Outside of inference mode the data once arrived, and the work then failed on the receiver alone,
    unless the tensor was contiguous.
    """

    def body() -> None:
        if dist.get_rank() == 0:
            for tag in range(3):
                dist.send(torch.arange(4.0), 1, tag=tag)
        else:
            with torch.inference_mode():
                made, other = torch.zeros(2, 2).t(), torch.zeros(2, 2).t()
                work = dist.irecv(made, 0)
                poll(work)
                work.wait()
                assert made.tolist() == [[0, 1], [2, 3]]
            work = dist.irecv(other, 0, tag=1)
            poll(work)
            work.wait()
            assert other.tolist() == [[0, 1], [2, 3]]
            found = torch.zeros(4)
            with pytest.raises(ValueError, match="several elements of the tensor lie in one place"):
                dist.irecv(torch.zeros(1).expand(4), 0, tag=2)
            dist.recv(found, 0, tag=2)  # the refused receive has taken nothing
            assert found.tolist() == [0, 1, 2, 3]
        for _ in range(2):
            with torch.inference_mode():
                total = torch.ones(2, 3).t()
                work = dist.all_reduce(total, async_op=True)
                poll(work)
                work.wait()
                assert total.tolist() == [[2, 2]] * 3
            dist.all_reduce(total)
            assert total.tolist() == [[4, 4]] * 3
            ordinary = torch.ones(2, 3).t()
            version = ordinary._version
            with torch.inference_mode():
                dist.all_reduce(ordinary)
            assert ordinary._version > version  # autograd sees that the tensor has changed

    spawn(body, 2)


def test_a_callback_that_raises_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        def fail(_: Any) -> None:
            raise ValueError("the callback's own")

        done = threading.Event()
        for add in ("then", "add_done_callback"):
            work = dist.all_reduce(torch.ones(3), async_op=True)
            future = work.get_future()
            kept = getattr(future, add)(fail)
            poll(work)
            work.wait()
            if add == "then":
                with pytest.raises(RuntimeError, match="the callback's own"):
                    kept.wait()
        done.set()
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0] == 2

    spawn(body, 2)
    assert not re.search("terminate called", capfd.readouterr().err)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["a a a", "a a b"])
def test_a_group_leaves_no_key_in_the_store(layout: str) -> None:
    """On one host it once left 8, and between hosts 17. Each key is there until the last rank has read it."""

    def late_extension() -> Any:
        time.sleep(0.1)
        return extension()

    def body() -> list[int]:
        found = []
        store = group_store(default_group())
        assert store is not None
        module: Any = create
        for late in (None, None, 0, 1, 2):
            module.extension = late_extension if dist.get_rank() == late else extension
            for _ in range(2):
                group = dist.new_group()
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total.item() == 3
                dist.destroy_process_group(group)
                dist.barrier()
                found.append(store.num_keys())
                dist.barrier()
        return [after - before for before, after in pairwise(found)]

    assert span(layout, body) == [[0] * 9] * 3


def test_a_process_keeps_no_options_of_groups_that_have_ended() -> None:
    def body() -> list[int]:
        kept = []
        for with_options in (True, False):
            for _ in range(5):
                given = dist_prims.BackendOptions(all_reduce="ring") if with_options else None
                group = dist.new_group(pg_options=given)
                assert options_of(group) is given
                del given
                dist.barrier(group)
                dist.destroy_process_group(group)
                del group
            gc.collect()
            kept.append(len(options._options))
        return kept

    assert spawn(body, 2) == [[0, 0]] * 2


ENDS = """
import contextlib
hosts, status = sys.argv[3 + number // 3].split(":")
rank, status, meeting = number % 3, int(status), folder / f"meeting{number // 3}"
os.environ["DIST_PRIMS_HOST_ID"] = hosts[rank]
dist.init_process_group("dist_prims", init_method=f"file://{meeting}", rank=rank, world_size=3)
if rank == 0:
    try:
        senders = [dist.recv(torch.zeros(3)) for _ in range(2)]
        meeting.with_suffix(".received").touch()
        print(*sorted(senders), dist.recv(torch.zeros(3)), flush=True)
    except dist_prims.PeerDiedError as error:
        print(error, flush=True)
    os._exit(0)
dist.send(torch.ones(3), 0)
if rank == 1:
    await_path(meeting.with_suffix(".received"))
    sys.exit(status)
if status == 0:
    await_end(number - 1)
    time.sleep(1)  # the end of rank 1 would be taken for its death by now
    dist.send(torch.ones(3), 0)
else:
    with contextlib.suppress(dist_prims.errors.CommError):  # until rank 0 has ended the group
        dist.recv(torch.ones(3), 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "cases"),
    [
        ("tcp", ["aaa:0", "abc:0", "aaa:1", "abc:1"]),
        pytest.param("ucx", ["abc:0", "abc:1"], marks=pytest.mark.slow),
    ],
)
def test_a_program_that_ends_well_leaves_its_groups(
    transport: str, cases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many programs do not destroy their groups. The end of such a rank was taken for its death, and a receive from any
    rank failed; with another exit status than 0 it still does."""
    require(transport)
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", transport)
    found = run_scripts(ENDS, 3 * len(cases), tmp_path, {**os.environ}, cases)
    for case, (first, second, third) in zip(cases, zip(found[::3], found[1::3], found[2::3], strict=True), strict=True):
        status = int(case[-1])
        expected = r"0: rank 0: rank 1 .* in recv\(12 bytes from any rank" if status else r"0: 1 2 2\n$"
        assert re.match(expected, first), (case, found)
        assert (second, third) == (f"{status}: ", "0: "), (case, found)


UNAWAITED = """
import threading
hosts, what = sys.argv[3 + number // 2].split(":")
os.environ["DIST_PRIMS_HOST_ID"] = hosts[number % 2]
dist.init_process_group("dist_prims", init_method=f"file://{folder}/store{number // 2}", rank=number % 2, world_size=2)
begun = threading.Event()
def callback(_future):
    begun.set()
    time.sleep(0.2)
if what == "callback":
    dist.all_reduce(torch.ones(3), async_op=True).get_future().then(callback)
    begun.wait(20)
elif what == "calls":
    for _ in range(4):
        work = dist.all_reduce(torch.ones(2_000_000), async_op=True)
        work.get_future().then(lambda _: sum(range(1000)))
else:
    dist.isend(torch.ones(1_000_000), 1 - number % 2)
    dist.irecv(torch.ones(1_000_000), 1 - number % 2)
    dist.irecv(torch.ones(3), 1 - number % 2)
"""


def test_a_program_that_awaits_nothing_at_its_end(tmp_path: Path) -> None:
    """Such programs were aborted: a thread of the group waited for the GIL, in a callback or to destroy a tensor, while
    Python shut down."""
    cases = [f"{hosts}:{what}" for hosts in ("aa", "ab") for what in ("callback", "calls", "messages")]
    assert run_scripts(UNAWAITED, 2 * len(cases), tmp_path, None, cases) == ["0: "] * (2 * len(cases))


def test_a_worker_of_multiprocessing_that_ends_well_leaves_its_groups(tmp_path: Path) -> None:
    """A forked worker ends by os._exit(), at which no action of the C library runs."""
    context = multiprocessing.get_context("fork")
    received, ended = context.Event(), context.Event()

    def body(rank: int) -> None:
        os.environ["DIST_PRIMS_HOST_ID"] = "abc"[rank]
        dist.init_process_group("dist_prims", init_method=f"file://{tmp_path}/store", rank=rank, world_size=3)
        if rank == 0:
            assert {dist.recv(torch.zeros(3)), dist.recv(torch.zeros(3))} == {1, 2}
            received.set()
            assert dist.recv(torch.zeros(3)) == 2
            return
        dist.send(torch.ones(3), 0)
        assert received.wait(LIMIT)
        if rank == 2:
            assert ended.wait(LIMIT)
            time.sleep(1)  # the end of rank 1 would be taken for its death by now
            dist.send(torch.ones(3), 0)

    workers = [context.Process(target=body, args=(rank,)) for rank in range(3)]
    for worker in workers:
        worker.start()
    try:
        workers[1].join(LIMIT)
        ended.set()
        for worker in workers:
            worker.join(LIMIT)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
