"""Rounds of the comparison: each contender runs once a round in processes of its own, in an order that rotates."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..measure import iterations_for
from .launch import Failed, environment, run
from .libraries import CONTENDERS
from .program import SLOT

__all__: list[str] = []

_LEAST, _WARMUP = 3, 2
_MEMORY = Path("/dev/shm")


@dataclass
class Figures:
    """All samples of one contender at one size."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def microseconds(self) -> float:
        return statistics.median(self.seconds) * 1e6


def interleaved(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name) of every run, in an order that rotates from round to round.

    >>> [name for _, name in interleaved(["a", "b", "c"], 2)]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for round in range(rounds):
        start = round % max(len(names), 1)
        yield from ((round, name) for name in (*names[start:], *names[:start]))


def per_round(nbytes: int, rounds: int) -> int:
    """The iterations of one round: all rounds together have at least as many as the benchmark."""
    return max(_LEAST, -(-iterations_for(nbytes) // rounds))


def once(
    name: str, home: Path, ranks: int, sizes: Sequence[int], round: int, rounds: int, seconds: float
) -> tuple[dict[int, Figures], str]:
    """Run the ranks of a contender: the slowest rank's times for each completed size, and the reason of a failure."""
    contender = CONTENDERS[name]
    with tempfile.TemporaryDirectory(prefix="dist_prims_peers_", dir=_MEMORY if _MEMORY.is_dir() else None) as given:
        place = Path(given)
        (place / "page").write_bytes(bytes(SLOT * (ranks + 1)))
        shutil.copy(Path(__file__).with_name("program.py"), place)  # without its neighbours, which would shadow modules
        orders = {
            "opens": contender.opens,
            "library": str(home / contender.library),
            "place": given,
            "ranks": ranks,
            "sizes": sizes,
            "round": round,
            "iterations": {nbytes: per_round(nbytes, rounds) for nbytes in sizes},
            "warmup": _WARMUP,
            "budget": seconds / 3 / len(sizes),
            "seconds": seconds,
        }
        (place / "orders.json").write_text(json.dumps(orders))
        reason = ""
        try:
            _run_ranks(name, home, ranks, place, seconds)
        except Failed as failed:
            reason = str(failed)
        finally:
            for left in _MEMORY.glob(f"*_{place.name}_*"):  # DeepSpeed does not remove its buffers, 66 MB for each rank
                left.unlink(missing_ok=True)
        return _slowest([_read(place / f"rank-{rank}.jsonl") for rank in range(ranks)]), reason


def _run_ranks(name: str, home: Path, ranks: int, place: Path, seconds: float) -> None:
    contender = CONTENDERS[name]
    own = environment(home if contender.packages else None, contender.settings(home, ranks))
    python = str(home / "bin" / "python") if contender.packages else sys.executable
    program = [python, str(place / "program.py"), str(place / "orders.json")]
    if contender.starter:
        starter = str(home / "bin" / contender.starter[0])
        return run([[starter, *contender.starter[1:], str(ranks), *program]], seconds, [own])
    named = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": place.name}  # a name, not a port
    each = [{**own, **named, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run([program] * ranks, seconds, each)


def _read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; a rank may have been killed while it wrote one."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _slowest(ranks: list[list[dict[str, Any]]]) -> dict[int, Figures]:
    found = {}
    for lines in zip(*ranks, strict=False):
        times = [max(each) for each in zip(*(line["seconds"] for line in lines), strict=True)]
        found[lines[0]["nbytes"]] = Figures(times, sum(line["wrong"] for line in lines))
    return found
