"""What was measured on this machine: for numbers of ranks, up to which size one shot is the quicker all_reduce.

``python -m dist_prims tune`` writes the file, groups of the backend read it when they are made. Without it nothing is
wrong and little is slower.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ONE_SHOT_BYTES", "tuned", "tuning_file", "write"]

ONE_SHOT_BYTES = 32 << 10


def tuning_file() -> Path:
    """``DIST_PRIMS_TUNING``, or a file of this user.

    >>> tuning_file().suffix
    '.json'
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    return Path(os.environ.get("DIST_PRIMS_TUNING", home / "dist_prims" / "tuning.json"))


def tuned(size: int) -> int:
    """Up to how many bytes one shot is quicker among so many ranks."""
    try:
        found = json.loads(tuning_file().read_text())["one_shot_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return ONE_SHOT_BYTES
    return int(found.get(str(size), ONE_SHOT_BYTES))


def write(one_shot_bytes: Mapping[int, int]) -> Path:
    path = tuning_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"one_shot_bytes": {str(size): limit for size, limit in one_shot_bytes.items()}}, indent=1)
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)  # a reader finds the old file or the new one
    return path
