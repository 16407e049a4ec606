"""The copy of the project that marks its lines, and the table that says which marks stand for which lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from project_copy import copy_project, site_packages

__all__ = ["build", "compiler", "install", "write_table"]

HERE = Path(__file__).parent
_MARK = "__sanitizer_cov_trace_pc"
# A compiler that adds the marks: to each object, and to each library the function that sets them.
_COMPILER = """#!/bin/sh
case " $* " in
    *" -shared "*) exec c++ "$@" {marks} -fPIC -O1 ;;
    *" -c "*) exec c++ "$@" -O0 -g1 -fsanitize-coverage=trace-pc ;;
    *) exec c++ "$@" ;;
esac
"""


def build(source: Path, folder: Path) -> Path:
    """Bring the copy of the working tree up to date, with its libraries; return the file of its table."""
    python = copy_project(source, folder)
    site, work = site_packages(folder), folder / "build" / "marks"
    install(site)
    (site / "project_copy.pth").write_text(f"{folder}\nimport line_marks\n")
    command = [str(python), "setup.py", "-q", "build_ext", "--inplace", f"--build-temp={work / 'objects'}"]
    subprocess.run(command, cwd=folder, env={**os.environ, "CXX": str(compiler(work))}, check=True)
    return write_table(folder, site, work)


def install(site: Path) -> None:
    """Put what marks lines of Python into a folder of modules."""
    for name in ("line_marks.py", "line_recorder.py"):
        (site / name).write_bytes((HERE / name).read_bytes())
    library = site / f"line_marks_python{sysconfig.get_config_var('EXT_SUFFIX')}"
    source = HERE / "python_marks.c"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        headers = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["cc", "-O2", "-fPIC", "-shared", headers, str(source), "-o", str(library)], check=True)


def compiler(work: Path) -> Path:
    """Write the command that compiles marks into libraries."""
    work.mkdir(parents=True, exist_ok=True)
    command = work / "c++"
    command.write_text(_COMPILER.format(marks=HERE / "native_marks.cpp"))
    command.chmod(0o755)
    return command


def write_table(folder: Path, site: Path, work: Path) -> Path:
    """Write the table of a project, and the places of its Python files for the processes that mark them."""
    python: dict[str, Any] = {}
    size = 0
    for path in sorted((folder / "dist_prims").rglob("*.py")):
        text = path.read_text()
        lines = sorted(set(_executable_lines(compile(text, str(path), "exec"))))
        python[str(path.relative_to(folder))] = {"start": size, "lines": lines}
        size += text.count("\n") + 2  # the lines count from 1
    layout = [str(size), *(f"{entry['start']} {folder / name}" for name, entry in python.items())]
    (site / "line_marks.txt").write_text("\n".join(layout) + "\n")
    libraries = sorted((folder / "dist_prims" / "lib").rglob("*.so"))
    native = {library.name: _blocks(library, folder, work) for library in libraries}
    sources = [*python, *sorted({file for blocks in native.values() for file in blocks["files"]})]
    text_of = {name: (folder / name).read_text().splitlines() for name in sources}
    table = work / "table.json"
    table.write_text(json.dumps({"python": python, "native": native, "text": text_of}))
    return table


def _executable_lines(code: CodeType) -> Iterator[int]:
    yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _executable_lines(constant)


def _blocks(library: Path, folder: Path, work: Path) -> dict[str, Any]:
    """The files of csrc in a library, and the lines of the instructions of each basic block.

    A block begins with a call that sets its mark, whose index is the address after the call, and ends where the next
    begins. The instructions of a function before its first call belong to its first block.
    """
    cache = work / f"{library.name}.json"
    if cache.exists() and cache.stat().st_mtime > library.stat().st_mtime:
        return json.loads(cache.read_text())  # type: ignore[no-any-return]
    files: dict[str, int] = {}
    blocks: dict[int, set[tuple[int, int]]] = {}
    lines: set[tuple[int, int]] = set()  # of the current block
    place: tuple[int, int] | None = None
    begins = has_call = False
    for text in _disassembly(library):
        if found := re.match(r"\s+([0-9a-f]+):\t(\S+)(.*)", text):
            if begins:
                blocks[int(found[1], 16)], begins = lines, False
            if found[2] == "call" and found[3].endswith(f"<{_MARK}>"):
                lines, begins, has_call = (set() if has_call else lines), True, True
            if place:
                lines.add(place)
        elif found := re.match(r"(/.*):(\d+)( \(discriminator \d+\))?$", text):
            path = Path(os.path.normpath(found[1]))
            inside = path.is_relative_to(folder / "csrc")
            place = (files.setdefault(str(path.relative_to(folder)), len(files)), int(found[2])) if inside else None
        elif re.match(r"[0-9a-f]+ <", text):  # a function
            lines, place, has_call = set(), None, False
    content = {"files": list(files), "blocks": {at: sorted(lines) for at, lines in blocks.items() if lines}}
    cache.write_text(json.dumps(content))
    return json.loads(cache.read_text())  # type: ignore[no-any-return]


def _disassembly(library: Path) -> Iterator[str]:
    command = ["objdump", "--disassemble", "--line-numbers", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield from (line.rstrip("\n") for line in process.stdout)
