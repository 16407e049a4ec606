"""Explores all interleavings of processes that are written as generators: they yield requests and receive answers.

An answer that is an exception is raised in the process; others have a hash.

The state of a process is what its generators hold. Two paths to the same state are explored once from there on, and
processes of the same state are one object, so that their steps are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Ended:
    """The end of a process: the value that it returned, or the exception that it raised."""

    value: Any = None
    error: type[BaseException] | None = None


class Process:
    """A generator that has received these answers. ``request`` is what it asks for now; None if it has ended."""

    def __init__(
        self,
        start: Callable[[], Generator[Any, Any, Any]],
        answers: tuple[Any, ...] = (),
        known: dict[Hashable, Process] | None = None,
    ) -> None:
        self.start, self.answers = start, answers
        self.afterwards: dict[Hashable, Process] = {}  # by answer
        self.request: Any = None
        self.end: Ended | None = None
        generator = start()
        try:
            self.request = next(generator)
            for answer in answers:
                self.request = generator.throw(answer) if isinstance(answer, Exception) else generator.send(answer)
        except StopIteration as returned:
            self.request, self.end = None, Ended(returned.value)
        except Exception as error:
            self.request, self.end = None, Ended(error=type(error))
        self.state: Hashable = self.end or tuple(_frames(generator))
        # The processes of this start, by state.
        self.known: dict[Hashable, Process] = {self.state: self} if known is None else known

    def after(self, answer: Any) -> Process:
        name = repr(answer) if isinstance(answer, Exception) else answer
        if name not in self.afterwards:
            found = Process(self.start, (*self.answers, answer), self.known)
            self.afterwards[name] = self.known.setdefault(found.state, found)
        return self.afterwards[name]


def _frames(generator: Any) -> Iterator[Hashable]:
    while generator is not None:
        frame = generator.gi_frame
        yield frame.f_lasti, tuple((name, _text(frame.f_locals[name])) for name in sorted(frame.f_locals))
        generator = generator.gi_yieldfrom if hasattr(generator.gi_yieldfrom, "gi_frame") else None


def _text(value: Any) -> str:
    """A text of a local variable that does not depend on addresses in memory."""
    if closure := getattr(value, "__closure__", None):
        return f"{value.__qualname__}{[_text(cell.cell_contents) for cell in closure]}"
    return repr(value)


S = TypeVar("S", bound=Hashable)


def explore(
    first: S,
    following: Callable[[S], Iterable[S]],
    check: Callable[[S], None],
    most: int,
) -> int:
    """Visit every state that can be reached, and ``check`` those that nothing follows. Return the number of states.

    States are equal if their processes and all else are. Fails if there are more than ``most``.
    """
    seen, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        is_last = True
        for after in following(state):
            is_last = False
            if after not in seen:
                seen.add(after)
                open_states.append(after)
        assert len(seen) <= most, "more states than expected"
        if is_last:
            check(state)
    return len(seen)
