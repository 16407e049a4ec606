"""The manifest of a checkpoint: a small JSON file, written last, that names all others with their checksums.

::

    directory/
      step-120.json           the manifest: without it there is no checkpoint
      step-120.4fd1a6c2/      state.pt, rank-0.pt, rank-1.pt, shard-0.pt, shard-1.pt, streams-0.pt, streams-1.pt
      step-140.90b7e35d/      an unfinished save: the next one removes it

Each save uses a new folder name. A step that is saved again therefore replaces its manifest in one rename, and at each
moment either the old or the new checkpoint exists.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .all_or_none import DamagedCheckpointError
from .files import digest

__all__: list[str] = []

_FORMAT = "dist_prims checkpoint 1"
_STEP = r"step-(0|[1-9][0-9]*)"  # as name_of() writes it
_NAME = re.compile(rf"{_STEP}\.json")
_OURS = re.compile(rf"{_STEP}\.[0-9a-f]{{8}}|\.{_STEP}\.json\.tmp")


@dataclass(frozen=True)
class Manifest:
    """A manifest. ``files``: bytes, SHA-256 and contents of each file. ``sharded``: rows by rank of each tensor."""

    step: int
    ranks: int
    folder: str
    files: dict[str, dict[str, Any]]
    sharded: dict[str, dict[str, Any]]

    def text(self) -> str:
        """The manifest as JSON, with its own checksum.

        >>> manifest = Manifest(3, 1, "step-3.00000000", {}, {})
        >>> Manifest.parse(manifest.text(), "x") == manifest
        True
        """
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({"manifest": body, "sha256": _checksum(body)}, indent=1) + "\n"

    @staticmethod
    def parse(text: str, origin: str) -> Manifest:
        """Parse the result of :meth:`text`, or raise DamagedCheckpointError; ``origin`` is the file, for the error."""
        try:
            whole = json.loads(text)
            body = whole["manifest"]
            intact = whole["sha256"] == _checksum(body)
            kind = body.pop("format")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{origin} is not a manifest: {error!r}") from None
        if not intact:
            raise DamagedCheckpointError(f"{origin} has been changed: its checksum does not match")
        if kind != _FORMAT:
            raise ValueError(f"{origin} has the format {kind!r}; this version of dist_prims reads {_FORMAT!r}")
        return Manifest(**body)

    def check(self, directory: Path, name: str) -> Path:
        """The path of one of the files; DamagedCheckpointError if it is not intact."""
        path = directory / self.folder / name
        about = self.files[name]
        with _damage(path):
            count = path.stat().st_size
            if count != about["bytes"]:
                raise DamagedCheckpointError(f"{path} has {count} bytes, its manifest says {about['bytes']}")
            found = digest(path)
        if found != about["sha256"]:
            raise DamagedCheckpointError(
                f"{path} is damaged: its SHA-256 is {found[:16]}…, its manifest says {about['sha256'][:16]}…"
            )
        return path


def read_text(path: Path) -> str:
    """The text of a manifest; DamagedCheckpointError if there is none."""
    try:
        with _damage(path):
            return path.read_text()
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from None


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Context that turns errors of a lost file into DamagedCheckpointError. Other errors do not mean damage."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError) and error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from None


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def name_of(step: int) -> str:
    """The file name of the manifest of a step.

    >>> name_of(120)
    'step-120.json'
    """
    return f"step-{step}.json"


def steps_in(names: Iterable[str]) -> list[int]:
    """The steps that have a manifest, the last one first.

    >>> steps_in(["step-9.json", "step-10.json", "step-007.json", "notes.txt"])
    [10, 9]
    """
    return sorted((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True)


def step_of(name: str) -> int | None:
    """The step of the save to which a folder, or a temporary manifest, belongs; None for other names.

    >>> step_of("step-120.4fd1a6c2"), step_of("step-120.json"), step_of("notes.txt")
    (120, None, None)
    """
    found = _OURS.fullmatch(name)
    return int(found[1] or found[2]) if found else None
