"""Atomic files: written, synced, then renamed to their final name; and their checksums.

A rename alone is not enough: the disk may keep the new name and lose the bytes. The bytes are therefore synced before
the rename, and the folder after it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

__all__: list[str] = []


class _Hashing:
    """A file that computes the checksum of the written bytes, and stores the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.count = file, hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.count += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self.file.name)
            raise

    def flush(self) -> None:
        self.file.flush()


def write_tensors(path: Path, content: Any) -> dict[str, Any]:
    """Write and sync ``content``; return its bytes and checksum.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     about = write_tensors(Path(folder, "a.pt"), {"x": torch.ones(2)})
    ...     about["sha256"] == digest(Path(folder, "a.pt")), read_tensors(Path(folder, "a.pt"))
    (True, {'x': tensor([1., 1.])})
    """
    with path.open("wb") as file:
        hashing = _Hashing(file)
        try:
            torch.save(content, cast(BinaryIO, hashing))
        except RuntimeError as error:  # torch reports positions in its archive, not that the disk is full
            raise hashing.failure or error from None
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hashing.count, "sha256": hashing.sha256.hexdigest()}


def read_tensors(path: Path, lazily: bool = False) -> Any:
    """The tensors and plain values of a file, without running its code; ``lazily``: tensors are read on first use."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily or None)


def put_text(path: Path, text: str) -> None:
    """Write a small file such that it has its old or its new content, even if the power fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and wait until their names are on the disk."""
    made = list(itertools.takewhile(lambda each: not each.exists(), [folder, *folder.parents]))
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(made):
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()
