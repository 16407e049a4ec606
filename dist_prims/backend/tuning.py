"""What was measured on a machine like this one, and is read by groups of the backend when they are made.

``python -m dist_prims tune`` writes, for numbers of ranks, up to which size one shot is the quicker all_reduce on one
host; ``python -m dist_prims.bench calibrate`` writes what a message and a byte cost within a host and between hosts.
Without these files nothing is wrong and little is slower.

A home folder is often shared by nodes of several types. So a file is kept for each type of machine (processor, cores,
sockets, NUMA nodes) and says on which it was measured; what was measured on another is ignored, with a notice.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["CALIBRATION", "ONE_SHOT_BYTES", "TUNING", "Figures", "machine", "tuned"]

ONE_SHOT_BYTES = 32 << 10


@cache
def machine() -> str:
    """The type of this machine: figures that were measured on one of it hold for all.

    >>> "CPUs" in machine()
    True
    """
    cpus = list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"))
    cores = {(_read(cpu / "physical_package_id"), _read(cpu / "core_id")) for cpu in cpus}
    sockets = {package for package, _ in cores}
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return f"{_processor()}, CPUs {os.cpu_count()}, cores {len(cores)}, sockets {len(sockets)}, NUMA nodes {len(nodes)}"


def _processor() -> str:
    """The model, or what the kernel tells in its place: numbers of the maker and the part on Arm."""
    lines = (line.partition(":") for line in _read(Path("/proc/cpuinfo")).splitlines())
    found = {key.strip(): " ".join(value.split()) for key, _, value in lines}
    model = found.get("model name") or found.get("cpu")  # the latter on POWER
    parts = [found[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in found]
    return model or " ".join([platform.machine(), *parts])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Figures:
    """One kind of figures: the variable that names their file, the beginning of its name elsewhere, how to measure."""

    variable: str
    stem: str
    command: str

    def file(self) -> Path | None:
        """The variable's, or one of this user for this type of machine; None for a user without a home.

        >>> file = TUNING.file()
        >>> file is None or file.suffix == ".json"
        True
        """
        if named := os.environ.get(self.variable):
            return Path(named)
        name = re.sub(r"[^a-z0-9]+", "-", machine().lower())[:120]
        folder = _folder()
        return folder / f"{self.stem}-{name}.json" if folder else None

    def read(self, speaks: bool = True) -> Mapping[str, Any] | None:
        """What was measured on this type of machine, if anything was; a process that ``speaks`` tells what it ignores.

        A file of an older version does not say where it was measured: it holds if the variable names it.
        """
        path = self.file()
        here = f"{socket.gethostname()} ({machine()}); measure here with: {self.command}"
        try:
            found = json.loads(path.read_text()) if path else None
        except OSError:
            found = None
        except ValueError as error:
            _tell(speaks, f"{path} is ignored: it is no JSON ({error}); measure with: {self.command}")
            return None
        if isinstance(found, dict) and found.get("machine", machine()) == machine():
            return found
        if isinstance(found, dict):
            where = f"{found.get('host')} ({found['machine']})"
            _tell(speaks, f"{path} is ignored: it was measured on {where}, and this is {here}")
        elif path and self.variable not in os.environ and (others := sorted(path.parent.glob(f"{self.stem}*.json"))):
            reason = "measured on another type of machine, or by a version that did not say on which"
            _tell(speaks, f"{', '.join(map(str, others))}: ignored, {reason}; this is {here}")
        return None

    def check_writable(self, path: Path | None = None) -> None:
        """Raise OSError, with the remedy, if the figures could not be written; to be asked before they are measured."""
        path = path or self.file()
        remedy = f"set {self.variable} to a file that can be written"
        if path is None:
            raise OSError(f"there is no home folder to keep the figures in; {remedy}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(f"{path.parent} is read-only")
        except OSError as error:
            raise OSError(f"the figures could not be kept in {path}: {error}; {remedy}") from error

    def write(self, found: Mapping[str, Any], path: Path | None = None) -> Path:
        """Keep them, and where they were measured."""
        self.check_writable(path)
        path = path or self.file()
        assert path
        where = {"machine": machine(), "host": socket.gethostname(), "date": time.strftime("%Y-%m-%d")}
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # two may write at once
        new.write_text(json.dumps({**where, **found}, indent=1))
        new.replace(path)  # a reader finds the old file or the new one
        return path


TUNING = Figures("DIST_PRIMS_TUNING", "tuning", "python -m dist_prims tune")
CALIBRATION = Figures("DIST_PRIMS_CALIBRATION", "calibration", "python -m dist_prims.bench calibrate")


def tuned(size: int, speaks: bool = True) -> int:
    """Up to how many bytes one shot is quicker among so many ranks."""
    limits = (TUNING.read(speaks) or {}).get("one_shot_bytes")
    limit = limits.get(str(size)) if isinstance(limits, dict) else None
    return limit if isinstance(limit, int) else ONE_SHOT_BYTES


def _folder() -> Path | None:
    config = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the specification says to ignore any other value
        return Path(config, "dist_prims")
    try:
        return Path.home() / ".config" / "dist_prims"
    except RuntimeError:  # a user id without a home, as containers have
        return None


def _tell(speaks: bool, text: str) -> None:
    if speaks and os.environ.get("DIST_PRIMS_QUIET") != "1":
        _tell_once(text)


@cache
def _tell_once(text: str) -> None:
    print(f"dist_prims: {text}", file=sys.stderr, flush=True)
