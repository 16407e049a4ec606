"""What was measured on this machine, and is read by groups of the backend when they are made.

``python -m dist_prims tune`` writes, for numbers of ranks, up to which size one shot is the quicker all_reduce on one
host; ``python -m dist_prims.bench calibrate`` writes what a message and a byte cost within a host and between hosts.
Without these files nothing is wrong and little is slower.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ONE_SHOT_BYTES", "calibrated", "calibration_file", "tuned", "tuning_file", "write", "write_json"]

ONE_SHOT_BYTES = 32 << 10


def tuning_file() -> Path:
    """``DIST_PRIMS_TUNING``, or a file of this user.

    >>> tuning_file().suffix
    '.json'
    """
    return _file("DIST_PRIMS_TUNING", "tuning.json")


def calibration_file() -> Path:
    """``DIST_PRIMS_CALIBRATION``, or a file of this user."""
    return _file("DIST_PRIMS_CALIBRATION", "calibration.json")


def _file(variable: str, name: str) -> Path:
    home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    return Path(os.environ.get(variable, home / "dist_prims" / name))


def calibrated() -> Mapping[str, Any] | None:
    """Levels as ``Topology.measured`` takes them, if they were measured."""
    try:
        found: Mapping[str, Any] = json.loads(calibration_file().read_text())
    except (OSError, ValueError):
        return None
    return found


def tuned(size: int) -> int:
    """Up to how many bytes one shot is quicker among so many ranks."""
    try:
        found = json.loads(tuning_file().read_text())["one_shot_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return ONE_SHOT_BYTES
    return int(found.get(str(size), ONE_SHOT_BYTES))


def write(one_shot_bytes: Mapping[int, int]) -> Path:
    return write_json(tuning_file(), {"one_shot_bytes": {str(size): limit for size, limit in one_shot_bytes.items()}})


def write_json(path: Path, found: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(found, indent=1))
    path.with_suffix(".new").replace(path)  # a reader finds the old file or the new one
    return path
