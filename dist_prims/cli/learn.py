"""``learn``: list the exercises, write the file of one, give hints, check an answer; write the lessons."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..learn import course
from ..learn.check import check
from ..learn.exercise import WrongAnswerError
from ..learn.exercises import ORDER, exercise, file_name
from ..schedules import Schedule

__all__: list[str] = []


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
        kind.set_defaults(run=run)
    notebooks = kinds.add_parser("course", help="write the ten lessons of the course as Jupyter notebooks into FOLDER")
    notebooks.add_argument("folder", type=Path, metavar="FOLDER")
    notebooks.set_defaults(run=_course)


def _course(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    notebooks = {args.folder / f"{each.stem}.ipynb": each for each in course.files()}
    if there := [str(path) for path in notebooks if path.exists()]:
        raise ValueError(f"{there[0]} exists; remove it, or name another folder")
    for path, lesson in notebooks.items():
        path.write_text(json.dumps(course.notebook(lesson.read_text(encoding="utf-8")), indent=1), encoding="utf-8")
        print(path)
    return 0


def _list(args: argparse.Namespace) -> int:
    todo = [number for number in range(1, len(ORDER) + 1) if not _done(number)]
    for number in range(1, len(ORDER) + 1):
        print(f"{number:2} {' ' if number in todo else '✓'} {exercise(number).title}")
    if todo:
        print(f"\n{'Go on' if todo[0] > 1 else 'Begin'} with: python -m dist_prims learn start {todo[0]}")
    print("The course, as notebooks: python -m dist_prims learn course FOLDER")
    return 0


def _file(args: argparse.Namespace) -> Path:
    exercise(args.number)  # ValueError for a wrong number
    return Path(args.file or file_name(args.number))


def _start(args: argparse.Namespace) -> int:
    path = _file(args)
    if path.exists():
        raise ValueError(f"{path} exists; remove it to begin again, or name another file")
    path.write_text(exercise(args.number).text(args.number), encoding="utf-8")
    print(f"Complete {path}, then: python -m dist_prims learn check {args.number}")
    return 0


def _hint(args: argparse.Namespace) -> int:
    hints = exercise(args.number).hints
    level = min(max(args.level, 1), len(hints))
    print(hints[level - 1])
    if level < len(hints):
        print(f"\nMore: python -m dist_prims learn hint {args.number} --level {level + 1}")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Status 0 for a right answer, and 1 for one that is wrong, raises, or has not ended after two minutes."""
    path = _file(args)
    if not path.exists():
        raise ValueError(f"there is no {path}; write it with: python -m dist_prims learn start {args.number}")
    try:
        print(f"✓ Right: {check(args.number, path)}.")
    except WrongAnswerError as error:
        print(f"✗ {error}")
        if error.schedule is not None:
            _write_page(error.schedule, path.with_suffix(".html"))
        print(f"  A hint: python -m dist_prims learn hint {args.number}")
        return 1
    _note_done(args.number)
    return 0


def _write_page(schedule: Schedule, path: Path) -> None:
    try:
        print(f"  The page of it opens at the wrong step: {schedule.html(path)}")
    except (ValueError, OSError) as error:  # the answer is right or wrong all the same
        print(f"  Its page cannot be written: {error}")


def _mark(number: int) -> Path:
    """The empty file that marks an exercise as done, in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "dist_prims" / "learn" / f"{ORDER[number - 1]}.done"


def _done(number: int) -> bool:
    try:
        return _mark(number).exists()
    except (OSError, RuntimeError):  # a folder that cannot be read, a user without a home
        return False


def _note_done(number: int) -> None:
    try:
        _mark(number).parent.mkdir(parents=True, exist_ok=True)
        _mark(number).touch()
    except (OSError, RuntimeError) as error:  # the answer is right or wrong all the same
        print(f"  `learn` cannot show it as done: {error}")
