"""The report on the flight records of a group."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dist_prims
from dist_prims.backend import dump
from dist_prims.tracing.read_flight_records import read


def write_record(folder: Path, rank: int, number: int) -> None:
    """Write the record of one of three ranks whose last call has this number."""
    call = {
        "collective_seq_id": number % 2**64,
        "is_p2p": False,
        "state": "started",
        "profiling_name": "dist_prims:all_reduce",
        "input_dtypes": ["float32"],
        "input_sizes": [[4]],
    }
    record = {"rank": rank, "pg_config": {"0": {"ranks": "[0, 1, 2]"}}, "entries": [call]}
    (folder / f"{rank}.json").write_text(json.dumps(record))


@pytest.mark.parametrize("last", [7, 2**64 - 1, 2**64, 2**64 + 1])
def test_flight_records_over_the_wrap_of_call_numbers(last: int, tmp_path: Path) -> None:
    """At the wrap, rank 1 once seemed to be the furthest."""
    for rank, number in enumerate((last, last - 2, last)):
        write_record(tmp_path, rank, number)
    lines = read(tmp_path).splitlines()
    late, first = (last - 2) % 2**64, last % 2**64
    assert lines[1] == f"  rank 1 is behind: it has made {late} calls, rank 0 has made {first}"
    assert sorted(lines[2:]) == sorted(
        [
            f"  call {late}: rank 1 all_reduce(float32, [4]) started",
            f"  call {first}: rank 0, 2 all_reduce(float32, [4]) started",
        ]
    )


@pytest.mark.parametrize(("backend", "tensors"), [("dist_prims", 1), ("dist_prims", 3), ("gloo", 1)])
def test_errors_and_flight_records_number_calls_alike(backend: str, tensors: int, tmp_path: Path) -> None:
    """Errors counted calls from 0, flight records from 1. Now the first call has the number 1 everywhere.

    A call of three tensors had the number of its first tensor in errors, and of its last one in flight records.
    """

    def all_reduce(count: int) -> None:
        if tensors == 1:
            dist_prims.all_reduce(torch.ones(count), algorithm=None if backend == "dist_prims" else "ring")
        else:
            dist.group.WORLD.allreduce_coalesced([torch.ones(count)] * tensors).wait()

    def body() -> str:
        if tensors == 1:
            all_reduce(1)
            all_reduce(2)
        with pytest.raises(dist_prims.MismatchError) as caught:
            all_reduce(3 + dist.get_rank())
        if backend == "dist_prims":
            dump(str(tmp_path / f"{dist.get_rank()}.json"))
        return str(caught.value)

    number = 3 if tensors == 1 else 1
    for text in dist_prims.spawn(body, 2, backend=backend, timeout=60):
        assert re.search(rf"Rank 0 calls all_reduce\(.*3 elements.*\) as call number {number}; rank 1", text)
    if backend == "dist_prims":
        lines = f"  call {number}: rank 0 all_reduce(float32, [3]) failed; rank 1 all_reduce(float32, [4]) failed"
        assert read(tmp_path).splitlines()[1:] == [lines]
