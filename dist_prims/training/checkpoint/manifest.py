"""What a checkpoint consists of: a small JSON file, the last to appear, that names all others with their checksums.

::

    directory/
      step-120.json           the manifest: while it is not there, the checkpoint is not
      step-120.4fd1a6c2/      state.pt, rank-0.pt, rank-1.pt, shard-0.pt, shard-1.pt
      step-140.90b7e35d/      a save that nobody finished: the next one removes it

The folder's name is another in each save. So a step that is saved again replaces its manifest in one rename, and at no
moment is there neither the old one nor the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import digest
from .together import Damaged

__all__ = ["Manifest", "is_ours", "name_of", "steps_in"]

_FORMAT = "dist_prims checkpoint 1"
_NAME = re.compile(r"step-(\d+)\.json")
_OURS = re.compile(r"step-\d+\.[0-9a-f]{8}|\.step-\d+\.json\.tmp")


@dataclass(frozen=True)
class Manifest:
    """``files``: bytes, SHA-256 and what it holds, by name. ``sharded``: of each name the tensors, as rows by rank."""

    step: int
    ranks: int
    folder: str
    files: dict[str, dict[str, Any]]
    sharded: dict[str, dict[str, Any]]

    def text(self) -> str:
        """As JSON, with a checksum of its own.

        >>> manifest = Manifest(3, 1, "step-3.00000000", {}, {})
        >>> Manifest.parse(manifest.text(), "x") == manifest
        True
        """
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({"manifest": body, "sha256": _checksum(body)}, indent=1) + "\n"

    @staticmethod
    def parse(text: str, origin: str) -> Manifest:
        """Damaged where ``text`` is not what :meth:`text` gave; ``origin`` is its file, for the error."""
        try:
            whole = json.loads(text)
            body = whole["manifest"]
            intact = whole["sha256"] == _checksum(body)
            kind = body.pop("format")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{origin} is no manifest: {error!r}") from None
        if not intact:
            raise Damaged(f"{origin} has been changed: its checksum does not fit")
        if kind != _FORMAT:
            raise ValueError(f"{origin} is of the format {kind!r}; this dist_prims reads {_FORMAT!r}")
        return Manifest(**body)

    def check(self, directory: Path, name: str) -> Path:
        """The path of one of the files, if it is whole."""
        path = directory / self.folder / name
        about = self.files[name]
        try:
            count = path.stat().st_size
            if count != about["bytes"]:
                raise Damaged(f"{path} has {count} bytes, its manifest says {about['bytes']}")
            found = digest(path)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error}") from None
        if found != about["sha256"]:
            raise Damaged(f"{path} is damaged: its SHA-256 is {found[:16]}…, its manifest says {about['sha256'][:16]}…")
        return path


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int) -> str:
    """The manifest's file.

    >>> name_of(120)
    'step-120.json'
    """
    return f"step-{step}.json"


def steps_in(names: Iterable[str]) -> list[int]:
    """The steps that have a manifest, the last one first.

    >>> steps_in(["step-9.json", "step-10.json", "notes.txt"])
    [10, 9]
    """
    return sorted((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True)


def is_ours(name: str) -> bool:
    """Whether a save makes such names: what no manifest needs of them may go.

    >>> is_ours("step-120.4fd1a6c2"), is_ours("step-120.json"), is_ours("notes.txt")
    (True, False, False)
    """
    return bool(_OURS.fullmatch(name))
