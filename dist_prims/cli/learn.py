"""``learn``: list the exercises, write the file of one, give hints, check an answer; write the lessons."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..learn import course
from ..learn.exercise import ORDER, WrongAnswerError, check, exercise, file_name

__all__: list[str] = []

DEADLINE = 120  # seconds that a check may take


def add(commands: Any) -> None:
    learn = commands.add_parser("learn", help="exercises in collective communication, checked by proof")
    learn.set_defaults(run=_list)
    kinds = learn.add_subparsers(metavar="COMMAND")
    for name, run, text in (
        ("start", _start, "write the file of an exercise"),
        ("check", _check, "check an answer; what is wrong at its first wrong step, in words and as a page"),
        ("hint", _hint, "the first hint of an exercise, or the one of --level"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("number", type=int, metavar="N", help="of the exercise")
        if name != "hint":
            kind.add_argument("file", nargs="?", metavar="FILE", help="default: a file here, named after the exercise")
        else:
            kind.add_argument("--level", type=int, default=1, help="1 for a nudge, more for more")
        if name == "check":
            kind.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
        kind.set_defaults(run=run)
    notebooks = kinds.add_parser("course", help="write the ten lessons of the course as Jupyter notebooks into FOLDER")
    notebooks.add_argument("folder", type=Path, metavar="FOLDER")
    notebooks.set_defaults(run=_course)


def _course(given: argparse.Namespace) -> int:
    given.folder.mkdir(parents=True, exist_ok=True)
    notebooks = {given.folder / f"{each.stem}.ipynb": each for each in course.files()}
    if there := [str(path) for path in notebooks if path.exists()]:
        raise ValueError(f"{there[0]} exists; remove it, or name another folder")
    for path, lesson in notebooks.items():
        path.write_text(json.dumps(course.notebook(lesson.read_text(encoding="utf-8")), indent=1), encoding="utf-8")
        print(path)
    return 0


def _list(given: argparse.Namespace) -> int:
    for number in range(1, len(ORDER) + 1):
        print(f"{number:2}  {exercise(number).title}")
    print("\nBegin with: python -m dist_prims learn start 1")
    print("The course, as notebooks: python -m dist_prims learn course FOLDER")
    return 0


def _file(given: argparse.Namespace) -> Path:
    exercise(given.number)  # ValueError for a wrong number
    return Path(given.file or file_name(given.number))


def _start(given: argparse.Namespace) -> int:
    path = _file(given)
    if path.exists():
        raise ValueError(f"{path} exists; remove it to begin again, or name another file")
    path.write_text(exercise(given.number).text(given.number), encoding="utf-8")
    print(f"Complete {path}, then: python -m dist_prims learn check {given.number}")
    return 0


def _hint(given: argparse.Namespace) -> int:
    hints = exercise(given.number).hints
    level = min(max(given.level, 1), len(hints))
    print(hints[level - 1])
    if level < len(hints):
        print(f"\nMore: python -m dist_prims learn hint {given.number} --level {level + 1}")
    return 0


def _check(given: argparse.Namespace) -> int:
    path = _file(given)
    if not path.exists():
        raise ValueError(f"there is no {path}; write it with: python -m dist_prims learn start {given.number}")
    if given.here:
        return _check_here(given.number, path)
    # In a process of its own, because a wrong answer may not end.
    command = [sys.executable, "-m", "dist_prims", "learn", "check", str(given.number), str(path), "--here"]
    try:
        return subprocess.run(command, timeout=DEADLINE, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"✗ The check has not ended after {DEADLINE} s. Does a loop of the answer end?")
        return 1


def _check_here(number: int, path: Path) -> int:
    try:
        print(f"✓ Right: {check(number, path)}.")
    except WrongAnswerError as error:
        print(f"✗ {error}")
        if error.schedule is not None:
            print(f"  The page of it opens at the wrong step: {error.schedule.html(path.with_suffix('.html'))}")
        print(f"  A hint: python -m dist_prims learn hint {number}")
        return 1
    return 0
