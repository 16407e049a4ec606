"""Marks of the lines that run: what each Python process of a measurement imports at its start.

A process marks lines in files that it maps, so its marks survive its death by any signal. Ranks, forked or started,
mark the same files as the test.
"""

from __future__ import annotations

import mmap
import os
import threading

VARIABLE = "LINE_COVERAGE"  # the folder of the marks; native_marks.cpp reads it too
LAYOUT = os.path.join(os.path.dirname(__file__), "line_marks.txt")


def start() -> None:
    """Begin to mark lines, if the environment names a folder."""
    folder = os.environ.get(VARIABLE)
    if not folder or not os.path.isdir(folder):
        return
    import line_marks_python  # type: ignore[import-not-found]  # compiled from python_marks.c

    with open(LAYOUT) as layout:
        size = int(layout.readline())
        starts = {name: int(first) for first, _, name in (line.rstrip("\n").partition(" ") for line in layout)}
    file = os.open(os.path.join(folder, "python.marks"), os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
    os.close(file)
    line_marks_python.start(memory, starts)
    threading.settrace(line_marks_python.trace)


start()
