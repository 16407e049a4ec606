"""Files of measurements on a type of machine, which a group of the backend reads when it is created.

``python -m dist_prims tune`` writes, by number of ranks, the size up to which the one-shot all_reduce is the faster one
on one host. ``python -m dist_prims.bench calibrate`` writes the cost of a message and of a byte, within a host and
between hosts. Both files are optional, and without them the backend is only slightly slower.

Nodes of several types often share a home folder. There is therefore a file for each type of machine (processor, cores,
sockets, NUMA nodes), which contains the type. A file of another type is ignored, with a message.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .._output import print_notice

__all__: list[str] = []

ONE_SHOT_BYTES = 32 << 10


@cache
def machine() -> str:
    """Return the type of this machine. Measurements on one machine are valid for all machines of its type."""
    cpus = list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"))
    cores = {(_read(cpu / "physical_package_id"), _read(cpu / "core_id")) for cpu in cpus}
    sockets = {package for package, _ in cores}
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return f"{_processor()}, CPUs {os.cpu_count()}, cores {len(cores)}, sockets {len(sockets)}, NUMA nodes {len(nodes)}"


def _processor() -> str:
    """Return the model of the processor, or the numbers of implementer and part that the kernel reports on Arm."""
    lines = (line.partition(":") for line in _read(Path("/proc/cpuinfo")).splitlines())
    values = {key.strip(): " ".join(value.split()) for key, _, value in lines}
    model = values.get("model name") or values.get("cpu")  # the latter on POWER
    parts = [values[key] for key in ("CPU implementer", "CPU part", "CPU variant") if key in values]
    return model or " ".join([platform.machine(), *parts])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class MeasurementFile:
    """One kind of measurements.

    ``variable`` is the environment variable that names the file. Without the variable the file name begins with
    ``stem``. ``command`` is the command that measures.
    """

    variable: str
    stem: str
    command: str

    def file(self) -> Path | None:
        """Return the file in the variable, else the user's for this type of machine; None without a home folder."""
        if named := os.environ.get(self.variable):
            return Path(named)
        name = re.sub(r"[^a-z0-9]+", "-", machine().lower())[:120]
        folder = _folder()
        return folder / f"{self.stem}-{name}.json" if folder else None

    def read(self, warn: bool = True) -> Mapping[str, Any] | None:
        """Return the measurements on this type of machine, or None. With ``warn`` print a message about ignored files.

        A file of an older version does not contain the type of machine, and is valid if the variable names it.
        """
        # 1. Read the file.
        path = self.file()
        here = f"{socket.gethostname()} ({machine()}); measure here with: {self.command}"
        try:
            content = json.loads(path.read_text()) if path else None
        except OSError as error:
            content = None
            if os.environ.get(self.variable):
                _warn(warn, f"{self.variable}={path} is ignored: {error.strerror}; measure with: {self.command}")
        except ValueError as error:
            _warn(warn, f"{path} is ignored: it is not JSON ({error}); measure with: {self.command}")
            return None
        # 2. Use it, or say why not.
        if isinstance(content, dict) and content.get("machine", machine()) == machine():
            return content
        if isinstance(content, dict):
            where = f"{content.get('host')} ({content['machine']})"
            _warn(warn, f"{path} is ignored: it was measured on {where}, and this is {here}")
        elif path and self.variable not in os.environ and (others := self._others(path.parent)):
            reason = "measured on another type of machine, or by a version that did not record the type"
            _warn(warn, f"{', '.join(map(str, others))}: ignored, {reason}; this is {here}")
        return None

    def _others(self, folder: Path) -> list[Path]:
        """Return the files of this kind in the user's folder, for the message; none if it cannot be read."""
        try:
            return sorted(folder.glob(f"{self.stem}*.json"))
        except OSError:  # no descriptor is left, for example: then the creation of the group fails, on all ranks
            return []

    def check_writable(self, path: Path | None = None) -> None:
        """Raise OSError, with a remedy, if the file cannot be written. Call this before a measurement."""
        path = path or self.file()
        remedy = f"set {self.variable} to a file that can be written"
        if path is None:
            raise OSError(f"there is no home folder for the measurements; {remedy}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise PermissionError(f"{path.parent} is read-only")
        except OSError as error:
            raise OSError(f"the measurements cannot be written to {path}: {error}; {remedy}") from error

    def write(self, measurements: Mapping[str, Any], path: Path | None = None) -> Path:
        """Write measurements with type of machine, host and date. Return the file."""
        self.check_writable(path)
        path = path or self.file()
        assert path
        where = {"machine": machine(), "host": socket.gethostname(), "date": time.strftime("%Y-%m-%d")}
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")  # unique, because two processes may write at once
        new.write_text(json.dumps({**where, **measurements}, indent=1))
        new.replace(path)  # atomic: a reader sees the old file or the new one
        return path


TUNING = MeasurementFile("DIST_PRIMS_TUNING", "tuning", "python -m dist_prims tune")
CALIBRATION = MeasurementFile("DIST_PRIMS_CALIBRATION", "calibration", "python -m dist_prims.bench calibrate")


def tuned(size: int, warn: bool = True) -> int:
    """Return the size in bytes up to which the one-shot all_reduce is faster among ``size`` ranks."""
    limits = (TUNING.read(warn) or {}).get("one_shot_bytes")
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


def _warn(warn: bool, text: str) -> None:
    if warn and os.environ.get("DIST_PRIMS_QUIET") != "1":
        _print_once(text)


@cache
def _print_once(text: str) -> None:
    print_notice(text)
