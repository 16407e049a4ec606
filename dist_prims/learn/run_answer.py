"""The process that runs an answer: ``python -m dist_prims.learn.run_answer FILE SOCKET MEMORY SECONDS PARENT``.

Each request on the socket names a function of the file; the reply has what the function yields or returns, as data. The
process that checks the answer (:mod:`.answer_process`) never imports the file, so nothing that the file does to this
process changes the result of the check.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import resource
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..processes import die_with_parent
from ..schedules import Step
from . import wire
from .messages import AllReduce, Barrier, Receive, Send

__all__: list[str] = []

MOST_STEPS = 2000


class AnswerFile:
    """The file of an answer: :meth:`reply` calls its functions, and resumes the program of one rank."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: dict[str, Any] | None = None
        self._program: Any = None

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; ``{"error": ...}`` for whatever the answer raises, SystemExit included."""
        try:
            if self._names is None:
                self._names = runpy.run_path(self._path, run_name="__dist_prims_learn__")
            kind = request["kind"]
            if kind == "resume":
                return self._resume(request["value"])
            function, arguments, root = self._function(request["function"]), request["arguments"], request["root"]
            returned = function(*arguments) if root is None else function(*arguments, root=root)
            if kind == "start":
                return self._start(returned)
            return {"value": {"value": _value, "steps": _steps, "actions": _actions}[kind](returned)}
        except _Wrong as wrong:
            return {"error": str(wrong)}
        except BaseException as error:
            return {"error": self._where(error)}

    def _function(self, name: str) -> Callable[..., Any]:
        found = (self._names or {}).get(name)
        if not callable(found):
            raise _Wrong(f"the file does not define the function {name}")
        return found  # type: ignore[no-any-return]

    def _where(self, error: BaseException) -> str:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == self._path]
        where = f"line {lines[-1]}: " if lines else ""  # the text of a syntax error has its line
        return f"{where}{type(error).__name__}: {error}"

    def _start(self, program: Any) -> dict[str, Any]:
        if not hasattr(program, "send"):
            raise _Wrong(f"the program returns {program!r}; it must yield its calls")
        self._program = program
        return self._resume(None)

    def _resume(self, value: Any) -> dict[str, Any]:
        try:
            call = self._program.send(value)
        except StopIteration as end:
            return {"returns": end.value}
        if isinstance(call, Send):
            return {"call": ["Send", call.to, call.value]}
        if isinstance(call, Receive):
            return {"call": ["Receive", call.source, None]}
        if isinstance(call, AllReduce | Barrier):
            return {"call": [type(call).__name__, None, getattr(call, "value", None)]}
        raise _Wrong(f"the program yields {call!r}; it must yield Send, Receive, AllReduce or Barrier")


class _Wrong(Exception):
    """An answer that is wrong, in words without a line of the file."""


def _value(returned: Any) -> Any:
    return returned


def _steps(returned: Any) -> list[list[Any]]:
    """The five columns of each step."""
    columns = []
    for number, step in enumerate(_at_most(returned, "steps")):
        if not isinstance(step, Step):
            raise _Wrong(f"step {number} is {step!r}; yield Step(src=..., dst=..., chunk=...)")
        columns.append([column.tolist() for column in (step.src, step.dst, step.chunk, step.into, step.reduce)])
    return columns


def _actions(returned: Any) -> list[list[Any]]:
    return [list(action) for action in _at_most(returned, "actions")]


def _at_most(returned: Any, what: str) -> Iterable[Any]:
    if not hasattr(returned, "__iter__"):
        raise _Wrong(f"the function returns {returned!r}; it must yield {what}")
    found = list(itertools.islice(returned, MOST_STEPS + 1))
    if len(found) > MOST_STEPS:
        raise _Wrong(f"there are more than {MOST_STEPS} {what}; does the loop end?")
    return found


class NoAlgorithms:
    """An importer that refuses the algorithms and pipeline schedules of the library, so ``build`` makes none either.

    It stands in the way of an answer that returns what the library has. A program that is determined to read the
    library's files can do that all the same.
    """

    PACKAGES = tuple(f"{__package__.rpartition('.')[0]}.schedules.{each}." for each in ("algorithms", "pipelines"))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(self.PACKAGES):
            raise ImportError(f"an answer cannot use the algorithms of the library ({name}); write the steps yourself")
        return None


def main(path: str, descriptor: str, memory: str, seconds: str, parent: str) -> None:
    die_with_parent(int(parent))
    for kind, limit in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CPU, int(seconds))):
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    importlib.import_module("dist_prims.schedules.pipelines.proof")  # which an answer may call, with all it imports
    sys.meta_path.insert(0, NoAlgorithms())
    answer = AnswerFile(path)
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rb") as requests:
        for line in requests:
            reply = _line(answer.reply(wire.from_line(line)))
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the answer may have closed or replaced it
                    stream.flush()
            channel.sendall(reply)


def _line(reply: dict[str, Any]) -> bytes:
    try:
        return wire.to_line(reply)
    except Exception as error:  # a repr that raises, a number of too many digits
        return wire.to_line({"error": f"the result cannot be sent: {type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of the answer may not end
