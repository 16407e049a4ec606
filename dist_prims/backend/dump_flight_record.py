"""Writer of flight records (the last calls of a rank); :mod:`..tracing.read_flight_records` reads them."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._output import print_notice
from ..torch_compat import backend_of, default_group

__all__: list[str] = []


def dump(path: Path | str, group: dist.ProcessGroup | None = None) -> None:
    """Write the last calls of this rank to a file, in the format of PyTorch's flight recorder.

    ``python -m dist_prims doctor --dump`` reads the files of all ranks and reports which rank is behind.

    >>> import json, tempfile
    >>> import dist_prims
    >>> def calls_of_this_rank():
    ...     dist.all_reduce(torch.ones(2))
    ...     dist.barrier()
    ...     with tempfile.NamedTemporaryFile() as file:
    ...         dump(file.name)
    ...         return [entry["profiling_name"] for entry in json.loads(Path(file.name).read_text())["entries"]]
    >>> dist_prims.spawn(calls_of_this_rank, 2, backend="dist_prims", timeout=60)[0]
    ['dist_prims:all_reduce', 'dist_prims:barrier']
    """
    backend: Any = backend_of(group or default_group(), torch.device("cpu"))
    Path(path).write_text(backend.record())


def dump_file(group: str, rank: int) -> str:
    """Return the path to which a failing call of this rank writes its record; empty if DIST_PRIMS_DUMP is not set.

    The folder is made if it is missing.
    """
    named = os.environ.get("DIST_PRIMS_DUMP", "")
    if not named:
        return ""
    try:
        folder = Path(named).absolute()  # the program may change its working directory before a call fails
    except OSError as error:  # a relative path, and the working directory was removed
        _warn(named, str(error))
        return ""
    _check_writable(folder)
    return str(folder / f"{group}_rank{rank}.json")


@functools.cache
def _check_writable(folder: Path) -> None:
    """Make the folder. If no file can be written there, print a warning now: after a failed call it is too late."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _warn(str(folder), str(error))


@functools.cache
def _warn(folder: str, reason: str) -> None:
    """Print a warning, once for a folder and a reason."""
    print_notice(f"DIST_PRIMS_DUMP={folder}: no flight record can be written there: {reason}; name another folder")
