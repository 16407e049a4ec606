"""Lists of algorithms: all that are registered, and those that a file registers."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Iterator

from ..schedules import COLLECTIVES, algorithms, lookup

__all__: list[str] = []


def registered() -> Iterator[tuple[str, str]]:
    return ((collective, name) for collective in COLLECTIVES for name in algorithms(collective))


def registered_by(file: str) -> list[tuple[str, str]]:
    """The algorithms that a file registers when it is run."""
    before = {each: lookup(*each) for each in registered()}
    try:
        runpy.run_path(file, run_name="__dist_prims_prove__")
    except OSError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(in_line(file, error)) from error
    found = [each for each in registered() if lookup(*each) is not before.get(each)]
    if not found:
        raise ValueError(f"{file} registers no algorithm; decorate a generator with @algorithm(collective, ...)")
    return found


def in_line(file: str, error: BaseException) -> str:
    """An error that a file has raised, with the line of the file."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
    where = f"{file}, line {lines[-1]}" if lines else file  # the text of a syntax error contains its line
    return f"{where}: {type(error).__name__}: {error}"
