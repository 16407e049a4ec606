"""Parts that pictures and text share: messages, a caption, and abbreviated lists of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..steps import ScheduleData, Step

__all__: list[str] = []

MOST_RANKS, MOST_STEPS = 32, 64


@dataclass(frozen=True)
class DrawnMessage:
    """A message from one rank to another in one step: its chunks, and whether they are added at the destination.

    >>> from dist_prims.schedules import build
    >>> first = next(iter(build("all_reduce", "ring", size=2).steps))
    >>> messages(first)[0] == DrawnMessage(src=0, dst=1, chunks=(0,), into=(0,), reduce=True)
    True
    """

    src: int
    dst: int
    chunks: tuple[int, ...]
    into: tuple[int, ...]
    reduce: bool


def messages(step: Step) -> list[DrawnMessage]:
    """The messages of a step: its rows grouped by source, destination and kind.

    >>> [message.chunks for message in messages(Step(src=[0, 0, 1], dst=[1, 1, 0], chunk=[2, 5, 3]))]
    [(2, 5), (3,)]
    """
    packed: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for src, dst, chunk, into, reduce in step.rows():
        packed.setdefault((src, dst, reduce), []).append((chunk, into))
    return [
        DrawnMessage(src, dst, tuple(chunk for chunk, _ in pairs), tuple(into for _, into in pairs), reduce)
        for (src, dst, reduce), pairs in packed.items()
    ]


def caption(schedule: ScheduleData) -> str:
    """One line that names and sizes the schedule.

    >>> from dist_prims.schedules import build
    >>> caption(build("broadcast", "binomial", size=7, root=2))
    'broadcast binomial, 7 ranks, 1 chunk, 3 steps, root 2'
    """
    return f"{schedule.collective} {schedule.algorithm}, {facts(schedule)}"


def facts(schedule: ScheduleData) -> str:
    """The caption without collective and algorithm."""
    counts = [(schedule.size, "rank"), (schedule.chunks, "chunk"), (len(schedule.steps), "step")]
    words = [f"{number} {noun}{'s' * (number != 1)}" for number, noun in counts]
    words += [f"root {schedule.root}"] * (schedule.root is not None)
    words += [f"{name} {value}" for name, value in schedule.parameters]
    return ", ".join(words)


def numbers(values: Iterable[int], dash: str = "-") -> str:
    """Format numbers, with consecutive runs abbreviated.

    >>> numbers((0, 1, 2, 5, 7, 8)), numbers((0, 1, 2, 4), dash="..")
    ('0-2,5,7-8', '0..2,4')
    """
    every = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
    runs = np.split(every, np.flatnonzero(np.diff(every) != 1) + 1)
    ends = [(run[0], run[-1]) for run in runs if len(run)]
    return ",".join(str(first) if first == last else f"{first}{dash}{last}" for first, last in ends)


def svg_file(path: str | Path) -> Path:
    """The path of a picture to write; ValueError if its suffix is not .svg.

    >>> svg_file("ring.svg").name
    'ring.svg'
    >>> svg_file("ring.png")
    Traceback (most recent call last):
    ValueError: ring.png: pictures are written as SVG only; name the file ring.svg
    """
    found = Path(path)
    if found.suffix.lower() != ".svg":
        raise ValueError(f"{found}: pictures are written as SVG only; name the file {found.stem or 'picture'}.svg")
    return found


def refuse_unreadable(schedule: ScheduleData) -> None:
    """Raise ValueError for a schedule too large for a readable picture."""
    if schedule.size > MOST_RANKS or len(schedule.steps) > MOST_STEPS:
        raise ValueError(
            f"draw: {schedule.collective} {schedule.algorithm} has {schedule.size} ranks and {len(schedule.steps)} "
            f"steps; a picture shows at most {MOST_RANKS} ranks and {MOST_STEPS} steps; build it for fewer ranks"
        )
