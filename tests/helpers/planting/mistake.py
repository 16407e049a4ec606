"""An edit of one line, and a mistake: an edit of a file."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Edit", "Mistake", "read_mistake"]


@dataclass(frozen=True)
class Edit:
    """Another text for one line of a source."""

    kind: str
    number: int
    text: str


@dataclass(frozen=True)
class Mistake:
    """An edit of a file of the project; it is kept as a unified diff."""

    file: str
    edit: Edit

    def text(self, root: Path) -> str:
        """The text of the file with the mistake."""
        lines = (root / self.file).read_text().splitlines(keepends=True)
        lines[self.edit.number - 1] = self.edit.text + "\n"
        return "".join(lines)

    def diff(self, root: Path) -> str:
        """The kind of the mistake, and a unified diff."""
        old = (root / self.file).read_text().splitlines(keepends=True)
        new = self.text(root).splitlines(keepends=True)
        return f"{self.edit.kind}\n" + "".join(difflib.unified_diff(old, new, f"a/{self.file}", f"b/{self.file}"))


def read_mistake(diff: Path) -> tuple[str, str]:
    """The kind and the file of a diff."""
    kind, old, *_ = diff.read_text().splitlines()
    return kind, old.removeprefix("--- a/").strip()
