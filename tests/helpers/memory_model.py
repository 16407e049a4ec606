"""An exhaustive checker of small programs under the memory model of C++11.

A thread is a generator that yields its accesses to memory and gets back what it has read. :func:`explore` runs the
accesses in all orders, and at each atomic load it tries all values that the model permits. It finds data races, failed
assertions, and threads that sleep forever.

- A *view* is a clock for each thread and, for each atomic variable, the oldest of its values that may still be read.
  Each thread has a view. A release store attaches the view to the value, and an acquire load of the value joins it to
  the view of the reader.
- Two accesses to a plain variable race if one is a write and neither is in the view of the other thread.
- Sequentially consistent accesses take place in the order in which they are explored. A sequentially consistent load
  reads the value of the last sequentially consistent store, or a later value.

Left out: a load that reads a store which its thread makes only later, on account of this load; fences; variables that
several threads store to, rather than add to, which are refused. GenMC and herd7 would do the same, and Debian has
neither. Debian's relacy does not merge equal states, so it cannot run all executions of these programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

__all__ = ["Violation", "add", "explore", "load", "read", "sleep_while", "store", "write"]


class Access(NamedTuple):
    kind: str
    variable: str
    order: str = "seq_cst"
    value: int = 0


Thread = Generator[Access, Any, None]
View = tuple[int, ...]


def load(variable: str, order: str) -> Access:
    return Access("load", variable, order)


def store(variable: str, value: int, order: str) -> Access:
    return Access("store", variable, order, value)


def add(variable: str, value: int, order: str) -> Access:
    return Access("add", variable, order, value)


def read(variable: str) -> Access:
    """Read a plain variable."""
    return Access("read", variable)


def write(variable: str, value: int) -> Access:
    """Write a plain variable."""
    return Access("write", variable, value=value)


def sleep_while(variable: str, value: int) -> Access:
    """Sleep in the kernel, which compares the newest value of the variable, until it is no longer ``value``."""
    return Access("sleep", variable, value=value)


class Violation(AssertionError):
    """What an execution does wrong, and its accesses."""


class Value(NamedTuple):
    """One of the values that an atomic variable has had; ``view`` is what a load of it with acquire learns."""

    value: int
    view: View
    thread: int
    is_added: bool


class Plain(NamedTuple):
    value: int
    writer: int  # the thread of the last write
    written: int  # its clock then
    reads: View  # the clock of each thread at its last read


class State(NamedTuple):
    results: tuple[tuple[int, ...], ...]  # of the accesses of each thread so far
    views: tuple[View, ...]  # by thread: the clocks of all threads, then the index of a value of each atomic variable
    values: tuple[tuple[Value, ...], ...]  # of each atomic variable, the oldest first
    last_seq_cst: tuple[int, ...]  # of each atomic variable: the index of the last sequentially consistent store
    plain: tuple[Plain, ...]


def explore(threads: Sequence[Callable[[], Thread]], atomics: Sequence[str], plain: Sequence[str] = ()) -> set[Any]:
    """Run all executions. All variables begin as 0.

    Returns: the results of the accesses, by thread, of all executions.
    Raises: Violation
    """
    explorer = _Explorer(threads, atomics, plain)
    nothing = (0,) * (len(threads) + len(atomics))
    first = State(
        ((),) * len(threads),
        (nothing,) * len(threads),
        ((Value(0, nothing, -1, False),),) * len(atomics),
        (0,) * len(atomics),
        (Plain(0, 0, 0, (0,) * len(threads)),) * len(plain),
    )
    origins: dict[State, tuple[State, int] | None] = {first: None}
    unexplored, ends = [first], set()
    while unexplored:
        state = unexplored.pop()
        try:
            moves = explorer.moves(state)
        except AssertionError as error:
            raise Violation(f"{error}; {explorer.text(state, origins)}") from None
        for thread, following in moves:
            if following not in origins:
                origins[following] = state, thread
                unexplored.append(following)
        if not moves:
            ends.add(state.results)
    return ends


class _Explorer:
    def __init__(self, threads: Sequence[Callable[[], Thread]], atomics: Sequence[str], plain: Sequence[str]) -> None:
        self.threads = threads
        self.atomic = {name: index for index, name in enumerate(atomics)}
        self.plain = {name: index for index, name in enumerate(plain)}
        self.next_access = functools.cache(self._next_access)

    def _next_access(self, thread: int, results: tuple[int, ...]) -> Access | None:
        """The access of a thread after these results; None at its end."""
        generator = self.threads[thread]()
        try:
            access = next(generator)
            for result in results:
                access = generator.send(result)
        except StopIteration:
            return None
        return access

    def moves(self, state: State) -> list[tuple[int, State]]:
        """The states that may follow, each with the thread that leads to it."""
        accesses = [self.next_access(thread, results) for thread, results in enumerate(state.results)]
        pending = [(thread, access) for thread, access in enumerate(accesses) if access is not None]
        # The order of plain accesses makes no difference: the views show a race in each order. So try one order only.
        plain = [(thread, access) for thread, access in pending if access.kind in ("read", "write")][:1]
        moves = [
            (thread, following)
            for thread, access in plain or pending
            for following in self.after(state, thread, access)
        ]
        assert moves or not pending, f"threads {[thread for thread, _ in pending]} sleep forever"
        return moves

    def after(self, state: State, thread: int, access: Access) -> list[State]:
        """The states after an access: one, or one for each value that a load may read."""
        view = _replaced(state.views[thread], thread, state.views[thread][thread] + 1)
        if access.kind in ("read", "write"):
            return [self._after_plain(state, thread, access, view)]
        variable = self.atomic[access.variable]
        values, newest = state.values[variable], len(state.values[variable]) - 1
        if access.kind == "sleep":
            return [] if values[newest].value == access.value else [_advanced(state, thread, 0, view)]
        oldest = view[len(self.threads) + variable]
        if access.order == "seq_cst":
            oldest = max(oldest, state.last_seq_cst[variable])
        if access.kind == "load":
            return [
                _advanced(state, thread, values[index].value, self._read(view, variable, values, index, access.order))
                for index in range(oldest, newest + 1)
            ]
        return [self._after_change(state, thread, access, view)]

    def _read(self, view: View, variable: int, values: tuple[Value, ...], index: int, order: str) -> View:
        if order in ("acquire", "acq_rel", "seq_cst"):
            view = _joined(view, values[index].view)
        at = len(self.threads) + variable
        return _replaced(view, at, max(view[at], index))

    def _after_change(self, state: State, thread: int, access: Access, view: View) -> State:
        """After a store, or an addition, which reads the newest value."""
        variable = self.atomic[access.variable]
        values = state.values[variable]
        before, is_added = values[-1], access.kind == "add"
        assert is_added or all(value.thread in (-1, thread) for value in values), f"two threads store {access.variable}"
        assert not is_added or all(value.is_added for value in values[1:]), f"{access.variable} is stored and added to"
        if is_added:
            view = self._read(view, variable, values, len(values) - 1, access.order)
        at = len(self.threads) + variable
        view = _replaced(view, at, len(values))
        attached = _replaced((0,) * len(view), at, len(values))
        if access.order in ("release", "acq_rel", "seq_cst"):
            attached = view
        if is_added:  # it continues the release sequence of the value that it has read
            attached = _joined(attached, before.view)
        changed = Value(access.value + is_added * before.value, attached, thread, is_added)
        state = state._replace(values=_replaced(state.values, variable, (*values, changed)))
        if access.order == "seq_cst":
            state = state._replace(last_seq_cst=_replaced(state.last_seq_cst, variable, len(values)))
        return _advanced(state, thread, before.value if is_added else 0, view)

    def _after_plain(self, state: State, thread: int, access: Access, view: View) -> State:
        index = self.plain[access.variable]
        plain = state.plain[index]
        assert plain.written <= view[plain.writer], f"thread {thread} races with a write of {access.variable}"
        if access.kind == "read":
            plain = plain._replace(reads=_replaced(plain.reads, thread, view[thread]))
        else:
            is_after = all(clock <= known for clock, known in zip(plain.reads, view, strict=False))
            assert is_after, f"thread {thread} races with a read of {access.variable}"
            plain = Plain(access.value, thread, view[thread], plain.reads)
        state = state._replace(plain=_replaced(state.plain, index, plain))
        return _advanced(state, thread, plain.value, view)

    def text(self, state: State, origins: dict[State, tuple[State, int] | None]) -> str:
        """The accesses that lead to a state."""
        steps = []
        while origin := origins[state]:
            before, thread = origin
            access = self.next_access(thread, before.results[thread])
            assert access
            steps.append(f"{thread}: {access.kind} {access.variable} = {state.results[thread][-1] or access.value}")
            state = before
        return " | ".join(reversed(steps))


def _replaced(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _joined(one: View, other: View) -> View:
    return tuple(map(max, one, other))


def _advanced(state: State, thread: int, result: int, view: View) -> State:
    results = _replaced(state.results, thread, (*state.results[thread], result))
    return state._replace(results=results, views=_replaced(state.views, thread, view))
