"""Training that goes on when ranks die, leave and join; torchrun is the real one."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from elastic import train
from hypothesis import given, settings
from hypothesis import strategies as st

import dist_prims
from dist_prims.training.data import GlobalBatches

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1"]
ROOT = Path(__file__).parents[2]
WORKER = str(ROOT / "tests/helpers/elastic_worker.py")


def shares(size: int, steps: int, count: int, batch: int) -> list[list[tuple[list[int], float]]]:
    """Per step, what each rank gets, without ranks."""
    by_rank = []
    for rank in range(size):
        batches = GlobalBatches(range(count), batch, seed=4)
        batches.resize(dist.ProcessGroup(dist.HashStore(), rank, size))
        by_rank.append([(items.tolist(), weight) for items, weight in (next(batches) for _ in range(steps))])
    return [list(each) for each in zip(*by_rank, strict=True)]


@pytest.mark.usefixtures("alone")
@settings(deadline=None, max_examples=50)
@given(size=st.integers(2, 7), count=st.integers(1, 30), batch=st.integers(1, 12))
def test_the_samples_and_their_order_do_not_depend_on_the_ranks(size: int, count: int, batch: int) -> None:
    steps = 2 * -(-count // batch)  # two epochs
    one = [step[0][0] for step in shares(1, steps, count, batch)]
    for epoch in (one[: steps // 2], one[steps // 2 :]):
        assert sorted(itertools.chain(*epoch)) == list(range(count))
    for wanted, by_rank in zip(one, shares(size, steps, count, batch), strict=True):
        assert list(itertools.chain(*(items for items, weight in by_rank if weight))) == wanted
        for items, weight in by_rank:
            assert weight in (0, pytest.approx(len(items) * size / len(wanted)))
            assert len(items) == 1 or weight


@pytest.mark.usefixtures("alone")
def test_batches_go_on_and_refuse_another_data_set() -> None:
    pairs = [(torch.tensor([float(number)]), number) for number in range(10)]
    batches = GlobalBatches(pairs, 4)
    x, _, weight = next(batches)
    assert (x.shape, weight, batches.step, batches.epoch, len(batches)) == ((4, 1), 1.0, 1, 0, 3)
    again = GlobalBatches(pairs, 4)
    again.load_state_dict(batches.state_dict())
    for _ in range(5):
        assert next(batches)[1].tolist() == next(again)[1].tolist()
    with pytest.raises(ValueError, match="the state has batch=4, and here it is 5"):
        GlobalBatches(pairs, 5).load_state_dict(batches.state_dict())
    for data, batch in (([], 1), (pairs, 0)):
        with pytest.raises(ValueError, match="at least one of each"):
            GlobalBatches(data, batch)


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(backend: str, tmp_path: Path) -> None:
    def body(signalled: int) -> tuple[list[int], Any]:
        before, steps = signal.getsignal(signal.SIGTERM), []

        def note(step: int) -> None:
            steps.append(step)
            if dist.get_rank() == 1 and step == signalled:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            train(tmp_path, 12, 100, before=note)
        except SystemExit as left:
            return steps, left.code
        assert signal.getsignal(signal.SIGTERM) == before
        return steps, 0

    assert dist_prims.spawn(body, 3, (7,), backend=backend, timeout=60) == [(list(range(8)), 143)] * 3
    assert dist_prims.spawn(body, 3, (11,), backend=backend, timeout=60) == [([8, 9, 10, 11], 0)] * 3


def test_a_forked_process_ends_as_it_would_have(tmp_path: Path) -> None:
    """It had the handler of the training, which only notes: Pool.terminate() waited for its workers without end."""

    def body() -> None:
        here, there = multiprocessing.Pipe()

        def sleep() -> None:
            there.send("I run")
            time.sleep(100)

        def terminate_a_child(step: int) -> None:
            child = multiprocessing.get_context("fork").Process(target=sleep)
            child.start()
            assert here.poll(50)
            child.terminate()
            child.join(50)
            assert child.exitcode == -signal.SIGTERM

        train(tmp_path, 1, 1, before=terminate_a_child)

    dist_prims.spawn(body, 1, timeout=60)


@pytest.mark.timeout(300)
def test_the_number_of_ranks_may_change_at_every_checkpoint(tmp_path: Path) -> None:
    """The parameters are those of one rank but for the order of additions; the moments of Adam follow."""

    def body(folder: str, last: int) -> torch.Tensor:
        return train(tmp_path / folder, last, 2, dropout=0)

    (alone,) = dist_prims.spawn(body, 1, ("alone", 6), backend="dist_prims", timeout=60)
    for size, last in ((2, 2), (1, 4), (3, 6)):
        by_rank = dist_prims.spawn(body, size, ("changing", last), backend="dist_prims", timeout=60)
        assert all(torch.equal(each, by_rank[0]) for each in by_rank)
    torch.testing.assert_close(by_rank[0], alone, atol=2e-5, rtol=1e-4)


def log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher with its ranks, of which none is left behind."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DIST_PRIMS_QUIET": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # its ranks have sessions of their own: only the launcher can end them
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def wait_for(what: Callable[[], bool], job: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert job.poll() is None, job.stdout.read() if job.stdout else ""
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_joins_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --nnodes 1:2: one agent alone, then two, then one again; no step is lost, none is done twice."""
    monkeypatch.setenv(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"
    )  # or who joins waits for an address that was said before
    last, every = 800, 10_000
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives both agents
    agent = [*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-id", "job"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--local-addr", "127.0.0.1"]
    agent += ["--rdzv-conf", "last_call_timeout=2,join_timeout=100,keep_alive_interval=2,keep_alive_max_attempt=5"]
    agent += [WORKER, str(tmp_path), str(last), str(every)]
    with started(*agent) as stays:
        wait_for(lambda: len(log(tmp_path)) > 2, stays)
        with started(*agent) as leaves:
            wait_for(lambda: sum(each["ranks"] == 2 for each in log(tmp_path)) > 2, stays)
            leaves.send_signal(signal.SIGTERM)
            leaves.wait(60)
        wait_for(lambda: log(tmp_path)[-1]["ranks"] == 1, stays)
        (tmp_path / "hurry").touch()
        said, _ = stays.communicate(timeout=200)
    assert stays.returncode == 0, said
    assert [each["step"] for each in log(tmp_path)] == list(range(last))
    phases = [(size, len(list(each))) for size, each in itertools.groupby(each["ranks"] for each in log(tmp_path))]
    assert [size for size, _ in phases] == [1, 2, 1]
    until = 0
    for size, steps in phases:  # the same without torchrun
        until += steps
        wanted = dist_prims.spawn(train, size, (tmp_path / "u", until, every), backend="dist_prims", timeout=100)[0]
    assert torch.equal(torch.load(tmp_path / "weights.pt"), wanted)
