"""Reader of flight records: reports which rank of a group is behind, and in which call.

The files have the format of PyTorch's flight recorder. The backend writes one file for each rank and group when a call
fails, if ``DIST_PRIMS_DUMP`` names a folder, or when ``dist_prims.backend.dump`` is called.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__: list[str] = []

Ranks = dict[int, dict[str, Any]]


def read(folder: Path | str) -> str:
    """Return a report of each group with flight records in the folder.

    It contains the ranks that are behind, the last call of each rank, and the messages that have not ended.
    """
    remedy = "name the folder that was in DIST_PRIMS_DUMP when the job ran, on the host of its ranks"
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} does not exist or is not a folder; {remedy}")
    groups: dict[str, Ranks] = defaultdict(dict)
    for path in sorted(Path(folder).glob("*.json")):
        try:
            record = json.loads(path.read_text())
            (name,) = record["pg_config"]  # a file has one group
            groups[name][record["rank"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a whole flight record ({error}); move it to another folder") from None
    if not groups:
        raise ValueError(f"{folder} contains no flight record: no call has failed there, or {remedy}")
    return "\n".join(line for name, ranks in groups.items() for line in _report(name, ranks))


def _report(name: str, ranks: Ranks) -> Iterator[str]:
    # 1. The size of the group. PyTorch's format has its ranks as text.
    size = len(json.loads(next(iter(ranks.values()))["pg_config"][name]["ranks"]))
    missing = sorted(set(range(size)) - set(ranks))
    yield f"group {name}, {size} ranks" + (f"; no record of rank {_names(missing)}" if missing else "")
    # 2. The ranks that have made fewer calls than others. The number of the last call is the number of calls.
    calls = {rank: (_last(record) or {"collective_seq_id": 0})["collective_seq_id"] for rank, record in ranks.items()}
    furthest = _furthest(calls)
    for rank in sorted(rank for rank in calls if calls[rank] != calls[furthest]):
        count = f"{calls[rank]} call{'s' * (calls[rank] != 1)}"
        yield f"  rank {rank} is behind: it has made {count}, rank {furthest} has made {calls[furthest]}"
    # 3. The last call of each rank; ranks with the same call are in one line.
    by_number: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in sorted(ranks.items()):
        if last := _last(record):
            by_number[last["collective_seq_id"]][_text(last)].append(rank)
    for number, texts in sorted(by_number.items()):
        yield f"  call {number}: " + "; ".join(f"rank {_names(callers)} {text}" for text, callers in texts.items())
    # 4. The messages that have not ended.
    for rank, record in sorted(ranks.items()):
        for entry in record["entries"]:
            if entry["is_p2p"] and entry["state"] != "completed":
                yield f"  message {entry['p2p_seq_id']} of rank {rank}: {_text(entry)}"


def _furthest(calls: dict[int, int]) -> int:
    """The first rank that has made the most calls. A number of calls has 64 bits; 0 follows 2^64 - 1."""
    furthest = next(iter(calls))
    for rank, number in calls.items():
        if 0 < (number - calls[furthest]) % 2**64 < 2**63:
            furthest = rank
    return furthest


def _last(record: dict[str, Any]) -> dict[str, Any] | None:
    """The last collective of a rank."""
    return next((entry for entry in reversed(record["entries"]) if not entry["is_p2p"]), None)


def _text(entry: dict[str, Any]) -> str:
    what = entry["profiling_name"].removeprefix("dist_prims:")
    data = f"({entry['input_dtypes'][0]}, {entry['input_sizes'][0]})" if entry["input_dtypes"] else "()"
    return f"{what}{data} {entry['state']}"


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
