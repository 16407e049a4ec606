"""Ranks as generators: a program yields what it sends, receives or calls, and one process runs all ranks.

A send ends when the other rank receives: nothing is buffered, as for large messages of MPI and NCCL. So an order of
calls that could hang on some machine hangs here always, and the error says what each rank waits for.

>>> def program(rank, size):
...     if rank == 0:
...         yield Send(to=1, value="hello")
...     else:
...         text = yield Receive(source=0)
...         return text
>>> run(program, 2)
[None, 'hello']
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from .exercise import WrongAnswerError

__all__: list[str] = []

MOST_CALLS = 10_000


@dataclass(frozen=True)
class Send:
    """Send a value to a rank; ends when that rank receives."""

    to: int
    value: Any

    def __str__(self) -> str:
        return f"its send to rank {self.to}"


@dataclass(frozen=True)
class Receive:
    """Receive the next value from a rank; ``yield Receive(...)`` is that value."""

    source: int

    def __str__(self) -> str:
        return f"its receive from rank {self.source}"


@dataclass(frozen=True)
class AllReduce:
    """Add the values of all ranks; every rank must make this call."""

    value: Any

    def __str__(self) -> str:
        return "all_reduce"


@dataclass(frozen=True)
class Barrier:
    """Wait until every rank makes this call."""

    def __str__(self) -> str:
        return "barrier"


Call = Send | Receive | AllReduce | Barrier
Program = Callable[[int, int], Generator[Call, Any, Any]]


class _Ranks:
    """The programs of all ranks, and what each of them waits for; None after its end."""

    def __init__(self, program: Program, size: int) -> None:
        self.size = size
        self.results: list[Any] = [None] * size
        self.waiting: list[Call | None] = [None] * size
        self.programs = [program(rank, size) for rank in range(size)]
        for rank, each in enumerate(self.programs):
            if not hasattr(each, "send"):
                raise WrongAnswerError(f"rank {rank}: the program returns {each!r}; it must yield its calls")
            self.resume(rank, None)

    def resume(self, rank: int, value: Any) -> None:
        try:
            call = self.programs[rank].send(value)
        except StopIteration as end:
            self.results[rank], self.waiting[rank] = end.value, None
            return
        if not isinstance(call, Call):
            raise WrongAnswerError(f"rank {rank} yields {call!r}; it must yield Send, Receive, AllReduce or Barrier")
        other = {Send: "to", Receive: "source"}.get(type(call))
        if other and not (0 <= getattr(call, other) < self.size and getattr(call, other) != rank):
            raise WrongAnswerError(f"rank {rank} of {self.size}: {call} names no other rank")
        self.waiting[rank] = call

    def advance(self) -> bool:
        """Let one message pass, or one collective; return whether there was one."""
        for rank, call in enumerate(self.waiting):
            if isinstance(call, Send) and self.waiting[call.to] == Receive(rank):
                value, to = call.value, call.to
                self.resume(to, value)
                self.resume(rank, None)
                return True
        kinds = {type(call) for call in self.waiting}
        if kinds == {AllReduce} or kinds == {Barrier}:
            total = sum(call.value for call in self.waiting if isinstance(call, AllReduce))
            for rank in range(self.size):
                self.resume(rank, total if kinds == {AllReduce} else None)
            return True
        return False


def run(program: Program, size: int) -> list[Any]:
    """Run a program on ``size`` ranks and return what each of them returns; WrongAnswerError for a deadlock."""
    ranks = _Ranks(program, size)
    for _ in range(MOST_CALLS):
        if all(call is None for call in ranks.waiting):
            return ranks.results
        if not ranks.advance():
            raise WrongAnswerError(f"{size} ranks: no rank can go on. {_waits(ranks.waiting)}")
    raise WrongAnswerError(f"{size} ranks: there are more than {MOST_CALLS} calls; does the loop end?")


def _waits(waiting: list[Call | None]) -> str:
    words = [f"rank {rank} {'has ended' if call is None else f'waits in {call}'}" for rank, call in enumerate(waiting)]
    return "; ".join(words)
