"""The lessons of the course: notebooks that are kept as text (MyST Markdown), in ``docs/course`` of the repository.

>>> parts = split("---\\nkernelspec: python3\\n---\\n# 1. A lesson\\n\\n```{code-cell} ipython3\\n1 + 1\\n```\\n")
>>> [(part.is_code, part.text, part.line) for part in parts]
[(False, '# 1. A lesson', 4), (True, '1 + 1', 7)]

``python -m dist_prims.learn.course LESSON OUTPUT`` executes a lesson as Jupyter would, and writes the output of
each cell as JSON. The documentation site shows the output below the cell.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__: list[str] = []

_INSTALLED = Path(__file__).parent / "course_files"
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def files() -> list[Path]:
    """The files of the lessons, in order, of the installed package or of the repository."""
    folder = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "docs" / "course"
    return sorted(folder.glob("[0-9]*.md"))


@dataclass(frozen=True)
class LessonPart:
    """A cell of code, or the text between two cells. ``line``: the number of its first line in the file."""

    is_code: bool
    text: str
    line: int


def split(lesson: str) -> list[LessonPart]:
    """The parts of the text of a lesson, without its front matter, the lines between ``---`` at its beginning."""
    parts = []
    front_matter = _FRONT_MATTER.match(lesson)
    end_of_previous = front_matter.end() if front_matter else 0
    for cell in [*_CELL.finditer(lesson), None]:  # None: the text after the last cell
        text = lesson[end_of_previous : cell.start() if cell else len(lesson)]
        if text.strip():
            begin = end_of_previous + len(text) - len(text.lstrip())
            parts.append(LessonPart(False, text.strip(), _line_number(lesson, begin)))
        if cell:
            parts.append(LessonPart(True, cell[1].rstrip("\n"), _line_number(lesson, cell.start(1))))
            end_of_previous = cell.end()
    return parts


def _line_number(text: str, position: int) -> int:
    return 1 + text.count("\n", 0, position)


def notebook(lesson: str) -> dict[str, Any]:
    """A lesson as a notebook of Jupyter, in its format 4.5."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(split(lesson)):
        cell = {"id": f"cell-{number}", "metadata": {}, "source": part.text.splitlines(keepends=True)}
        code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append({**(code if part.is_code else {"cell_type": "markdown"}), **cell})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def execute(lesson: Path) -> Iterator[dict[str, str]]:
    """Execute the cells of a lesson in this process; yields what each cell has printed ("text") and shown ("html")."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    for part in split(lesson.read_text(encoding="utf-8")):
        if not part.is_code:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _execute(part, lesson, vars(program))
        pictures = [getattr(value, name)() for name in ("_repr_html_", "_repr_svg_") if hasattr(value, name)]
        html = next(filter(None, pictures), "")
        if value is not None and not html:
            printed.write(repr(value))
        yield {"text": printed.getvalue(), "html": html}


def _execute(part: LessonPart, lesson: Path, names: dict[str, Any]) -> Any:
    """Execute a cell, and return the value of the expression at its end, or None if it ends in no expression.

    Empty lines before the cell give its lines the numbers that they have in the lesson, for tracebacks.
    """
    tree = ast.parse("\n" * (part.line - 1) + part.text, str(lesson))
    last = tree.body[-1] if tree.body else None  # None: a cell that is empty, or has comments only
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(lesson), "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), str(lesson), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(lesson), "eval"), names)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps([*execute(Path(sys.argv[1]))]), encoding="utf-8")
