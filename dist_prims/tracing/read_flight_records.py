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
    """Return a few lines for each group that has flight records in the folder."""
    remedy = "name the folder that DIST_PRIMS_DUMP had in the job, on the host where its ranks ran"
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} does not exist or is not a folder; {remedy}")
    groups: dict[str, Ranks] = defaultdict(dict)
    for path in sorted(Path(folder).glob("*.json")):
        try:
            found = json.loads(path.read_text())
            (name,) = found["pg_config"]
            groups[name][found["rank"]] = found
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a whole flight record ({error}); move it to another folder") from None
    if not groups:
        raise ValueError(f"{folder} contains no flight record: no call has failed there, or {remedy}")
    return "\n".join(line for name, ranks in groups.items() for line in _group(name, ranks))


def _group(name: str, ranks: Ranks) -> Iterator[str]:
    size = len(json.loads(next(iter(ranks.values()))["pg_config"][name]["ranks"]))
    missing = sorted(set(range(size)) - set(ranks))
    yield f"group {name}, {size} ranks" + (f"; no record of rank {_names(missing)}" if missing else "")
    made = {rank: (_last(found) or {"collective_seq_id": 0})["collective_seq_id"] for rank, found in ranks.items()}
    furthest = _furthest(made)
    for rank in sorted(rank for rank in made if made[rank] != made[furthest]):
        calls = f"{made[rank]} call{'s' * (made[rank] != 1)}"
        yield f"  rank {rank} is behind: it has made {calls}, rank {furthest} has made {made[furthest]}"
    by_number: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in sorted(ranks.items()):
        if last := _last(found):
            by_number[last["collective_seq_id"]][_text(last)].append(rank)
    for number, texts in sorted(by_number.items()):
        yield f"  call {number}: " + "; ".join(f"rank {_names(callers)} {text}" for text, callers in texts.items())
    for rank, found in sorted(ranks.items()):
        for entry in found["entries"]:
            if entry["is_p2p"] and entry["state"] != "completed":
                yield f"  message {entry['p2p_seq_id']} of rank {rank}: {_text(entry)}"


def _furthest(made: dict[int, int]) -> int:
    """The first rank that has made the most calls. Their numbers have 64 bits, and go on at 0 after 2^64 - 1."""
    furthest = next(iter(made))
    for rank, number in made.items():
        if 0 < (number - made[furthest]) % 2**64 < 2**63:
            furthest = rank
    return furthest


def _last(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((entry for entry in reversed(found["entries"]) if not entry["is_p2p"]), None)


def _text(entry: dict[str, Any]) -> str:
    what = entry["profiling_name"].removeprefix("dist_prims:")
    data = f"({entry['input_dtypes'][0]}, {entry['input_sizes'][0]})" if entry["input_dtypes"] else "()"
    return f"{what}{data} {entry['state']}"


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
