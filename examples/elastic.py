"""Elasticity: under torchrun a rank is killed in some step; the final weights have the same bits.

Rank 0 starts a separate job with ``torchrun --max-restarts 1`` and as many ranks as here. One rank of the job kills
itself with SIGKILL in a random step. Meanwhile the ranks here run the same training undisturbed. The steps of the job
are counted: only those since the last checkpoint run twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._console import Console
from ._elastic_worker import train

__all__: list[str] = []

_LAST, _EVERY = 20, 4


def run(console: Console) -> None:
    made = tempfile.TemporaryDirectory() if console.rank == 0 else contextlib.nullcontext("")
    with made as name:
        box: list[Any] = [name, random.randrange(dist.get_world_size()), random.randrange(1, _LAST)]
        dist.broadcast_object_list(box, 0)
        _show(console, Path(box[0]), box[1], box[2])
        dist.barrier()


def _show(console: Console, folder: Path, rank: int, step: int) -> None:
    size = dist.get_world_size()
    job = _start(folder, size, f"{rank}@{step}") if console.rank == 0 else None
    try:
        wanted = train(folder / "undisturbed", _LAST, _EVERY)
        ended = job.wait(120) if job else 0
    finally:
        if job:
            _end(job)
    if ended:
        console.say((folder / "output.txt").read_text())
    console.check(ended == 0, f"the job succeeds although its rank {rank} is killed in step {step}")

    attempts = _attempts(folder / "log.jsonl") if console.rank == 0 else []
    ends = [attempts[0][0], *(each[-1] for each in attempts)] if attempts else []
    console.table(
        ("attempt", "steps", "from", "to", "seconds since the previous step"),
        [
            (number + 1, len(each), each[0]["step"], each[-1]["step"], f"{each[0]['at'] - end['at']:.1f}")
            for number, (each, end) in enumerate(zip(attempts, ends, strict=False))
        ],
    )
    saved = step - step % _EVERY
    resumed = console.rank > 0 or (
        0 < len(attempts) < 3 and [line["step"] for line in attempts[-1]] == list(range(saved, _LAST))
    )
    console.check(resumed, f"the job resumed after step {saved}, its last checkpoint")
    found = torch.load(folder / "weights.pt") if console.rank == 0 and ended == 0 else torch.zeros(0)
    console.check(console.rank > 0 or torch.equal(found, wanted), "its weights have the bits of an undisturbed run")


def _attempts(log: Path) -> list[list[dict[str, Any]]]:
    """The steps that rank 0 of each attempt logged."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        about = json.loads(line)
        steps.setdefault(about["pid"], []).append(about)
    return list(steps.values())


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job. Its ranks have their own sessions, so only torchrun can end them: terminate torchrun first."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _start(folder: Path, size: int, die: str) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own, so that the whole job can be killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", f"{__package__}._elastic_worker"]
    command += [str(folder / "job"), "--last", str(_LAST), "--every", str(_EVERY), "--die", die]
    launched = ("DIST_PRIMS_RENDEZVOUS", "OMPI_", "PMI", "MPI_", "TORCHELASTIC", "SLURM_")  # a separate job
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    environ |= {"OMP_NUM_THREADS": "1", "DIST_PRIMS_QUIET": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen([*command], env=environ, stdout=output, stderr=output, start_new_session=True)
