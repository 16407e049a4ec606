"""Steps and ScheduleData: a collective algorithm as data.

An algorithm that is written as code that sends can only be run. Written as data (which rank sends which chunk to which
rank in which step), it can be proved, priced, drawn, simulated, run by any executor and compiled.

A step is a table with one row for each transfer; its columns are NumPy arrays:

    step of a ring of 3          src  dst  chunk  into  reduce
    rank 0 sends chunk 0 to 1      0    1      0     0    True     rank 1: chunk 0 += rank 0's chunk 0
    rank 1 sends chunk 1 to 2      1    2      1     1    True     rank 2: chunk 1 += rank 1's chunk 1
    rank 2 sends chunk 2 to 0      2    0      2     2    True     rank 0: chunk 2 += rank 2's chunk 2

Rules:

- Every transfer of a step reads the state before the step.
- ``src == dst`` is a local move. Rows with the same src and dst form one message.
- Rows that write the same chunk of the same rank apply in row order: at most one copy, which must come first, then
  reductions. Together they are one sum that is rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .contract import Contract, one_length
from .schedule_error import ScheduleError

__all__: list[str] = []

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
COLUMNS = ("src", "dst", "chunk", "into", "reduce")
_INTS, _BOOLS = np.dtype(np.int64), np.dtype(np.bool_)
_KINDS = (*[_INTS] * 4, _BOOLS)
MOST_STEPS = 100_000


@dataclass(frozen=True, eq=False, init=False)
class Step:
    """One step: transfers that happen at the same time. Scalars and columns are broadcast to one length.

    >>> Step(src=[0, 1, 2], dst=[1, 2, 0], chunk=[0, 1, 2], reduce=True).rows()[0]
    (0, 1, 0, 0, True)
    """

    src: Ints
    dst: Ints
    chunk: Ints
    into: Ints
    reduce: Bools

    def __init__(
        self, src: ArrayLike, dst: ArrayLike, chunk: ArrayLike, reduce: ArrayLike = False, into: ArrayLike | None = None
    ) -> None:
        if isinstance(reduce, bool) and isinstance(src, np.ndarray):
            reduce = (np.ones if reduce else np.zeros)(src.shape, np.bool_)  # a column, so that no conversion follows
        columns: list[Any] = [src, dst, chunk, chunk if into is None else into, reduce]
        if not _are_columns(*columns):
            columns = one_length(*columns)
            for name, column in zip(COLUMNS, columns[:4], strict=False):
                if column.size and column.dtype.kind not in "iu":
                    raise ValueError(f"Step({name}=...): integers are required, not {column.dtype}")
            columns = [column.astype(kind, copy=False) for column, kind in zip(columns, _KINDS, strict=True)]
        src, dst, chunk, into, reduce = columns
        self.__dict__.update(src=src, dst=dst, chunk=chunk, into=into, reduce=reduce)

    def __len__(self) -> int:
        return len(self.src)

    @property
    def narrow(self) -> tuple[Step, Ints | None]:
        """(a step with fewer rows, the number of chunks that each of them stands for, or None for one each).

        The columns src, dst and reduce of these rows are right, which is all that a price depends on.
        """
        return self, None

    def rows(self) -> list[tuple[int, int, int, int, bool]]:
        """The transfers as tuples (src, dst, chunk, into, reduce)."""
        columns = (self.src, self.dst, self.chunk, self.into, self.reduce)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def backwards(self) -> Step:
        """The step that receivers send back and senders add: a reduce-scatter is an all-gather backwards."""
        return Step(self.dst, self.src, self.chunk, reduce=True)

    def renumbered(self, rank_at: Ints) -> Step:
        """The step with rank ``rank_at[r]`` in place of each rank r."""
        return Step(rank_at[self.src], rank_at[self.dst], self.chunk, self.reduce, self.into)

    def take(self, rows: Any) -> Step:
        """The rows that an index array, a slice or a mask selects, in the order of the selection."""
        return Step(self.src[rows], self.dst[rows], self.chunk[rows], self.reduce[rows], self.into[rows])

    @staticmethod
    def concat(steps: Sequence[Step]) -> Step:
        """One step with the transfers of all ``steps``."""
        if not steps:
            return Step([], [], np.empty(0, np.int64))
        if any(isinstance(step, CountedStep) for step in steps):
            messages = [step.narrow for step in steps]
            counts = [np.ones(len(rows), np.int64) if span is None else span for rows, span in messages]
            return CountedStep(_joined([rows for rows, _ in messages]), np.concatenate(counts), lambda: _joined(steps))
        return _joined(steps)


def _joined(steps: Sequence[Step]) -> Step:
    names = ("src", "dst", "chunk", "reduce", "into")
    return Step(*(np.concatenate([getattr(step, name) for step in steps]) for name in names))


def _are_columns(src: Any, dst: Any, chunk: Any, into: Any, reduce: Any) -> bool:
    """Whether the columns of a step need no conversion, which takes longer than the rest of most steps."""
    try:
        return (
            src.dtype is dst.dtype is chunk.dtype is into.dtype is _INTS
            and reduce.dtype is _BOOLS
            and src.ndim == 1
            and src.shape == dst.shape == chunk.shape == into.shape == reduce.shape
        )
    except AttributeError:  # one of them is not an array
        return False


class CountedStep(Step):
    """A step given by its messages: row i stands for ``span[i]`` chunks; ``make`` returns the step with all rows.

    A rank of a large group may send thousands of chunks at once. The columns with one row a chunk are computed on first
    access; the cost model only counts chunks and uses ``narrow``.

    >>> both = CountedStep(Step(src=0, dst=1, chunk=0), 2, lambda: Step(src=0, dst=1, chunk=[0, 7]))
    >>> len(both), both.rows()[1]
    (2, (0, 1, 7, 7, False))
    """

    def __init__(self, messages: Step, span: ArrayLike, make: Callable[[], Step]) -> None:
        spans = span if isinstance(span, np.ndarray) else np.full(len(messages), span, np.int64)
        self.__dict__.update(_messages=messages, _span=spans, _make=make)

    _messages: Step
    _span: Ints
    _make: Callable[[], Step]

    def __len__(self) -> int:
        return int(self._span.sum())

    @property
    def narrow(self) -> tuple[Step, Ints | None]:
        return self._messages, self._span

    def __getattr__(self, name: str) -> Any:
        """Compute the columns on first access."""
        if name not in COLUMNS:
            raise AttributeError(name)
        step = self._make()
        self.__dict__.update((each, getattr(step, each)) for each in COLUMNS)
        return getattr(step, name)

    def backwards(self) -> Step:
        return CountedStep(self._messages.backwards(), self._span, lambda: self._make().backwards())

    def renumbered(self, rank_at: Ints) -> Step:
        return CountedStep(self._messages.renumbered(rank_at), self._span, lambda: self._make().renumbered(rank_at))


class WideStep(CountedStep):
    """A step whose rows move several consecutive chunks each: row i moves the ``span[i]`` chunks from chunk[i] on.

    >>> wide = WideStep(Step(src=[0, 1], dst=[1, 0], chunk=[0, 4]), span=[2, 1])
    >>> wide.rows()
    [(0, 1, 0, 0, False), (0, 1, 1, 1, False), (1, 0, 4, 4, False)]
    """

    def __init__(self, rows: Step, span: ArrayLike) -> None:
        # The chunks of each message: of its row, or, if ``rows`` is itself a CountedStep, of all rows of the message.
        chunks_of_row = np.asarray(span, np.int64)
        messages, rows_of_message = rows.narrow
        if rows_of_message is None:
            chunks_of_message: ArrayLike = span
        elif chunks_of_row.ndim:  # the rows of a message follow each other: the sum over them
            sums = np.concatenate([[0], chunks_of_row.cumsum()])
            chunks_of_message = np.diff(sums[rows_of_message.cumsum()], prepend=0)
        else:
            chunks_of_message = rows_of_message * chunks_of_row
        super().__init__(messages, chunks_of_message, lambda: _one_row_a_chunk(rows, chunks_of_row))


def _one_row_a_chunk(rows: Step, width: Ints) -> Step:
    span = np.broadcast_to(width, len(rows))
    within = np.arange(int(span.sum())) - np.repeat(np.cumsum(span) - span, span)  # 0, 1, ... for each row
    src, dst, chunk, into, reduce = (np.repeat(getattr(rows, name), span) for name in COLUMNS)
    return Step(src, dst, chunk + within, reduce, into + within)


def most_steps(size: int) -> int:
    """The most steps of a schedule for ``size`` ranks: enough where each message is a step of its own."""
    return MOST_STEPS + 4 * size**2


@dataclass(frozen=True)
class Phase:
    """A part of a schedule whose steps have chunks that stand for several chunks of the schedule.

    The steps then have fewer rows, and a program is compiled from them sooner. ``make(*args)`` makes the steps;
    each of their chunks stands for ``width`` consecutive chunks of the schedule.

    >>> phase = Phase(lambda src: iter([Step(src=src, dst=5, chunk=1)]), (3,), width=2)
    >>> [step.rows() for step in phase]
    [[(3, 5, 2, 2, False), (3, 5, 3, 3, False)]]
    """

    make: Callable[..., Iterator[Step]]
    args: tuple[Any, ...]
    width: int = 1

    def __iter__(self) -> Iterator[Step]:
        for step in self.make(*self.args):
            yield widened(step, self.width)


Phases = tuple[Phase, ...]


def widened(step: Step, width: int) -> Step:
    """The step with ``width`` consecutive chunks in place of each."""
    if width == 1:
        return step
    rows, span = step.narrow

    def every_row() -> Step:
        src, dst, reduce = (np.repeat(column, width) for column in (step.src, step.dst, step.reduce))
        chunk, into = ((column[:, None] * width + np.arange(width)).ravel() for column in (step.chunk, step.into))
        return Step(src, dst, chunk, reduce, into)

    return CountedStep(rows, width if span is None else span * width, every_row)


class Steps(Sequence[Step]):
    """The steps of a schedule, generated again on each iteration, so that they need not be stored.

    ``make`` returns an iterator over the steps, or the phases of the schedule. More than ``most`` steps are a
    ScheduleError, so a generator whose loop does not end raises, whatever reads the steps.

    >>> steps = Steps(lambda: (Step(src=i, dst=i + 1, chunk=0) for i in range(3)))
    >>> len(steps), steps[1].rows()
    (3, [(1, 2, 0, 0, False)])
    """

    def __init__(self, make: Callable[[], Iterator[Step] | Phases], most: int = MOST_STEPS) -> None:
        self._make = make
        self._most = most
        self._length: int | None = None

    @property
    def phases(self) -> Phases:
        """The phases of the schedule; none if it is not composed of phases."""
        steps_or_phases = self._make()
        return steps_or_phases if isinstance(steps_or_phases, tuple) else ()

    def with_width(self) -> Iterator[tuple[Step, int]]:
        """The steps as their phases generate them, and the number of chunks that each of their chunks stands for."""
        if not (phases := self.phases):
            yield from ((step, 1) for step in self)
        for phase in phases:
            yield from ((step, phase.width) for step in phase.make(*phase.args))

    def __iter__(self) -> Iterator[Step]:
        generated, length = self._make(), 0
        for step in itertools.chain.from_iterable(generated) if isinstance(generated, tuple) else generated:
            if length == self._most:
                hint = "does the loop end? One step may have many transfers"
                raise ScheduleError(f"there are more than {self._most:,} steps; {hint}")
            yield step
            length += 1
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            self._length = sum(1 for _ in self)
        return self._length

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> list[Step]: ...
    def __getitem__(self, at: int | slice) -> Step | list[Step]:
        if isinstance(at, slice):
            return list(self)[at]
        index = at if at >= 0 else len(self) + at
        for step in itertools.islice(iter(self), max(index, 0), None):
            if index >= 0:
                return step
        raise IndexError(f"step {at} is out of range; the schedule has {len(self)} steps")


@dataclass(frozen=True, eq=False)
class ScheduleData:
    """The fields of a schedule. :class:`~.schedule.Schedule` documents them, and adds the methods."""

    collective: str
    algorithm: str
    size: int
    chunks: int
    contract: Contract = field(repr=False)
    steps: Steps = field(repr=False)
    root: int | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    part: Callable[[int], Iterator[Step]] | None = field(default=None, repr=False)

    @property
    def share(self) -> Fraction:
        """The size of one chunk as a fraction of the data of the collective (0 for a barrier)."""
        return Fraction(0) if self.collective == "barrier" else Fraction(1, self.chunks)

    @property
    def data_chunks(self) -> int:
        """The number of chunks that are not scratch; an all_to_all has its blocks twice, as sent and as received."""
        return self.chunks * (2 if self.collective == "all_to_all" else 1)

    def bytes_sent(self, rank: int, nbytes: int | Fraction = 1) -> Fraction:
        """Bytes that a rank sends to other ranks for data of ``nbytes``; by default as a fraction of the data."""
        rows = sum(int(np.count_nonzero((step.src == rank) & (step.dst != rank))) for step in self.steps)
        return rows * self.share * nbytes
