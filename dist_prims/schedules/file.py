"""Schedules as files: JSON with named fields, so that they can be saved, compared and shipped, and other formats.

Equal schedules have equal files. A step is a line with the columns of :class:`~.steps.Step`:

    {"format": "dist_prims schedule 1", "collective": "broadcast", "algorithm": "binomial", "size": 2, "chunks": 1,
     "scratch": 0, "root": 0, "same_bits": true, "parameters": {}, "steps": [
    {"src": [0], "dst": [1], "chunk": [0], "into": [0], "reduce": [false]}
    ]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .contract import COLLECTIVES, ROOTED, contract
from .formats.msccl import read_msccl
from .formats.msccl_writer import write_msccl
from .formats.mscclpp import read_mscclpp
from .formats.mscclpp_writer import write_mscclpp
from .proof import verify
from .schedule_error import ScheduleError
from .steps import COLUMNS, ScheduleData, Step, Steps, most_steps

__all__: list[str] = []

_FORMAT = "dist_prims schedule 1"
_KINDS: dict[str, Any] = {
    "collective": str,
    "algorithm": str,
    "size": int,
    "chunks": int,
    "scratch": int,
    "root": int | None,
    "same_bits": bool,
    "parameters": dict,
    "steps": list,
}


_FORMATS: dict[str, Callable[[ScheduleData], str]] = {"msccl": write_msccl, "mscclpp": write_mscclpp}


def write_schedule(schedule: ScheduleData, path: str | Path, format: str | None = None) -> Path:
    """Write a schedule as JSON of this library, or in another format, which is then proved; return the path."""
    if format not in (None, *_FORMATS):
        raise ValueError(f"format={format!r}: it must be None or one of {', '.join(_FORMATS)}")
    text = _text(schedule) if format is None else _FORMATS[format](schedule)
    if format is not None:
        try:
            _read(text)
        except ValueError as error:
            raise ValueError(f"the schedule is not written as {format}, whose reader refuses it: {error}") from error
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def _text(schedule: ScheduleData) -> str:
    steps = [{name: getattr(step, name).tolist() for name in COLUMNS} for step in schedule.steps]
    fields = {
        "format": _FORMAT,
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "size": schedule.size,
        "chunks": schedule.chunks,
        "scratch": schedule.contract.total - schedule.data_chunks,
        "root": schedule.root,
        "same_bits": schedule.contract.same_bits,
        "parameters": dict(schedule.parameters),
    }
    lines = ",\n".join(map(json.dumps, steps))
    return f'{json.dumps(fields)[:-1]}, "steps": [\n{lines}\n]}}\n'


def read_schedule(path: str | Path) -> ScheduleData:
    """Read the schedule of a file, in the format that its content has, and prove it.

    ScheduleError for a wrong schedule; ValueError if the file does not contain one.
    """
    try:
        return _read(Path(path).read_text(encoding="utf-8"))
    except ScheduleError:
        raise
    except (ValueError, RecursionError) as error:  # the latter for lists in lists in lists
        raise ValueError(f"{path}: {error}") from error


def _read(text: str) -> ScheduleData:
    if text.lstrip().startswith("<"):
        name, operations = read_msccl(text)
        return operations.prove(name)
    fields = json.loads(text)
    if isinstance(fields, dict) and "gpus" in fields:
        name, operations = read_mscclpp(fields)
        return operations.prove(name)
    schedule = _schedule(fields)
    verify(schedule)
    return schedule


def _schedule(fields: Any) -> ScheduleData:
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f'the file has no field "format" of the value "{_FORMAT}"')
    for name, kind in _KINDS.items():
        if name not in fields:
            raise ValueError(f"the field {name!r} is missing")
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name}={fields[name]!r:.50}: it must be {getattr(kind, '__name__', kind)}")
    collective, size, chunks, root = (fields[name] for name in ("collective", "size", "chunks", "root"))
    if collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {collective!r}")
    if size < 1 or fields["scratch"] < 0 or (root in range(size)) != (collective in ROOTED):
        raise ValueError(f"size={size}, scratch={fields['scratch']}, root={root}: they do not fit {collective}")
    own = contract(collective, size, chunks, root, fields["scratch"], same_bits=fields["same_bits"])
    rows = [_step(number, step) for number, step in enumerate(fields["steps"])]
    steps = Steps(lambda: iter(rows), most_steps(size))
    parameters = fields["parameters"].items()
    given = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in parameters)
    return ScheduleData(collective, fields["algorithm"], size, chunks, own, steps, root, given)


def _step(number: int, columns: Mapping[str, Any]) -> Step:
    try:
        arrays = {name: np.asarray(columns[name], bool if name == "reduce" else None) for name in COLUMNS}
        if {each.shape for each in arrays.values()} != {(len(columns["src"]),)}:
            raise ValueError("its columns differ in length")
        return Step(**arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"step {number}: {error}; it must have the columns {', '.join(COLUMNS)}") from error
