"""An answer as its check sees it: functions of the learner's file, which other processes call, and their data.

Every reply is compared with the form that it must have, because the process of an answer can send anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from ..schedules import Step
from ..schedules.pipelines import Action
from .exercise import WrongAnswerError
from .messages import AllReduce, Barrier, Call, Receive, Send, run
from .wire import one_line

__all__: list[str] = []

Ask = Callable[[int, dict[str, Any]], dict[str, Any]]  # (rank, request) to the reply of that rank's process


class Answer:
    """The functions of an answer. ``ask(rank, request)`` sends a request to the process that runs a rank's program.

    Functions that are not the program of a rank run in the process of rank 0.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def value(self, function: str, *arguments: Any) -> Any:
        """What a function returns: numbers, texts, None, and lists and tuples of these."""
        return self._call("value", function, arguments)

    def steps(self, function: str, size: int, root: int | None) -> list[Step]:
        """The steps that a generator function yields; ``root``: its second argument, if it is not None."""
        return [_step(columns) for columns in _list(self._call("steps", function, (size,), root))]

    def actions(self, function: str, *arguments: Any) -> tuple[Action, ...]:
        """The actions that a generator function yields."""
        return tuple(_action(action) for action in _list(self._call("actions", function, arguments)))

    def program(self, function: str, rank: int, *arguments: Any) -> Generator[Call, Any, Any]:
        """The program of a rank, which runs in that rank's process: its calls; what it returns at the end."""
        request = {"kind": "start", "function": function, "arguments": list(arguments), "root": None}
        while True:
            reply = self._reply(rank, request, f"rank {rank}: ")
            if "returns" in reply:
                return reply["returns"]
            value = yield _parsed_call(rank, reply.get("call"))
            request = {"kind": "resume", "value": value}

    def _call(self, kind: str, function: str, arguments: tuple[Any, ...], root: int | None = None) -> Any:
        request = {"kind": kind, "function": function, "arguments": list(arguments), "root": root}
        named = ", ".join([*map(repr, arguments), *([] if root is None else [f"root={root}"])])
        return self._reply(0, request, f"{function}({named}): ").get("value")

    def _reply(self, rank: int, request: dict[str, Any], where: str) -> dict[str, Any]:
        reply = self._ask(rank, request)
        if "error" in reply:
            text = one_line(str(reply["error"]))[:500]
            raise WrongAnswerError(text if text.startswith(("line ", "the file ", "SyntaxError")) else where + text)
        return reply


def private_values(count: int) -> list[int]:
    """Values that differ from each other and from run to run, so no answer can know the values of other ranks.

    A right result of a program must have come in a message.
    """
    return random.SystemRandom().sample(range(100, 1_000_000), count)


def run_programs(answer: Answer, values: Sequence[int]) -> list[Any]:
    """Run the learner's ``program(rank, size, value)`` on one rank for each value; what the ranks return."""
    size = len(values)
    # The first rank selects the process; the arguments of the program follow.
    return run(lambda rank, _: answer.program("program", rank, rank, size, values[rank]), size)


def _malformed(value: Any, expected: str) -> WrongAnswerError:
    return WrongAnswerError(f"the process of the answer has sent {value!r:.100}; it must send {expected}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _malformed(value, "a list")
    return value


def _step(columns: Any) -> Step:
    kinds = (*[int] * 4, bool)
    is_table = isinstance(columns, list) and len(columns) == len(kinds) and all(isinstance(c, list) for c in columns)
    if not is_table or len({len(column) for column in columns}) != 1:
        raise _malformed(columns, "the five columns of a step, of one length")
    for column, kind in zip(columns, kinds, strict=True):
        if not all(isinstance(each, int) and type(each) is kind and abs(each) < 2**63 for each in column):
            raise _malformed(columns, "whole numbers below 2**63 as src, dst, chunk and into, and bools as reduce")
    src, dst, chunk, into = (np.array(column, np.int64) for column in columns[:4])
    return Step(src, dst, chunk, np.array(columns[4], np.bool_), into)


def _action(action: Any) -> Action:
    is_action = isinstance(action, list) and [type(each) for each in action] == [str, int, int]
    if is_action and action[0].isprintable():
        return Action(*action)
    raise _malformed(action, "a kind, a stage and a micro-batch")


def _parsed_call(rank: int, call: Any) -> Call:
    if isinstance(call, list) and len(call) == 3:
        kind, other, value = call
        if kind in ("Send", "Receive") and type(other) is int:
            return Send(other, value) if kind == "Send" else Receive(other)
        if kind in ("Send", "Receive"):
            raise WrongAnswerError(f"rank {rank}: {kind} names rank {other!r}; it must be a whole number")
        if kind == "AllReduce" and isinstance(value, int | float):
            return AllReduce(value)
        if kind == "AllReduce":
            raise WrongAnswerError(f"rank {rank}: AllReduce adds {value!r}; it must be a number")
        if kind == "Barrier":
            return Barrier()
    raise _malformed(call, "Send, Receive, AllReduce or Barrier")
