"""The report on the flight records of a group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_prims.launch.read_flight_records import read


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
