"""A schedule as plain text for a terminal: the messages of each step, and the chunks of every rank at start and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..contract import Holding
from ..steps import ScheduleData
from .message import DrawnMessage, caption, messages, numbers, refuse_unreadable

__all__: list[str] = []

Held = dict[tuple[int, int], set[int]]  # (rank, chunk) -> the ranks whose data the chunk contains

_MOVES = "s ─c→ d: rank s sends chunk c to rank d"
_SUMS = ", (+) adding; then the ranks in the sum"


def terminal(schedule: ScheduleData) -> str:
    """The messages of each step as text; if the schedule adds, each with the ranks in its destination's sum.

    >>> from dist_prims.schedules import build
    >>> print(terminal(build("all_reduce", "ring", size=2)))
    all_reduce ring, 2 ranks, 2 chunks, 2 steps
    s ─c→ d: rank s sends chunk c to rank d, (+) adding; then the ranks in the sum
    step 0   0 ─0→ 1 (+) 0..1   1 ─1→ 0 (+) 0..1
    step 1   0 ─1→ 1     0..1   1 ─0→ 0     0..1
    """
    refuse_unreadable(schedule)
    steps = [messages(step) for step in schedule.steps]
    adds = any(message.reduce for step in steps for message in step)
    held = {(rank, int(c)): {rank} for rank in range(schedule.size) for c in schedule.contract.start(rank).chunk}
    formatted = []
    for step in steps:
        _receive(step, held)
        formatted.append([_format(message, held if adds else None) for message in step])
    width = max((len(move) for step in formatted for move in step), default=0)
    lines = [caption(schedule), _MOVES + (_SUMS if adds else "")][: 1 + bool(formatted)]
    for number, moves in enumerate(formatted):
        lines += _wrapped(f"step {number}".ljust(9), moves, width)
    return "\n".join(lines)


def _receive(step: Sequence[DrawnMessage], held: Held) -> None:
    before = dict(held)
    for message in step:
        for chunk, into in zip(message.chunks, message.into, strict=True):
            kept = held.get((message.dst, into), set()) if message.reduce else set()
            held[message.dst, into] = kept | before.get((message.src, chunk), set())


def _format(message: DrawnMessage, held: Held | None) -> str:
    words = f"{message.src} ─{numbers(message.chunks)}→ {message.dst}"
    words += f" as {numbers(message.into)}" if message.into != message.chunks else ""
    if held is None:
        return words
    sums = dict.fromkeys(numbers(sorted(held[message.dst, into]), dash="..") for into in message.into)
    return f"{words} {'(+)' if message.reduce else '   '} {' / '.join(sums)}"


def _wrapped(head: str, moves: Sequence[str], width: int, limit: int = 80) -> Iterator[str]:
    """Arrange the moves in columns, as many to a line as fit."""
    fit = max(1, (limit - len(head) + 3) // (width + 3))
    for at in range(0, len(moves), fit):
        line = "   ".join(move.ljust(width) for move in moves[at : at + fit])
        yield f"{head if at == 0 else ' ' * len(head)}{line}".rstrip()


def describe_contract(schedule: ScheduleData) -> list[tuple[str, str]]:
    """The chunks that the ranks hold at the start and must hold at the end, in words.

    >>> from dist_prims.schedules import build
    >>> describe_contract(build("broadcast", "binomial", size=3))[0]
    ('starts', 'rank 0: chunk 0, its own data; ranks 1-2: nothing')
    """
    contract = schedule.contract
    return [
        (when, _by_rank(holding, schedule.size))
        for when, holding in (("starts", contract.start), ("ends", contract.end))
    ]


def _by_rank(holding: Callable[[int], Holding], size: int) -> str:
    by_text: dict[str, list[int]] = {}
    for rank in range(size):
        by_text.setdefault(_held(rank, holding(rank)), []).append(rank)
    if len(by_text) == 1:
        return f"every rank: {next(iter(by_text))}"
    groups = [f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)}: {what}" for what, ranks in by_text.items()]
    return "; ".join(groups if len(groups) <= 8 else [*groups[:7], "...", groups[-1]])


def _held(rank: int, holding: Holding) -> str:
    chunks = holding.chunk
    if not len(chunks):
        return "nothing"
    first, last = int(holding.first.min()), int(holding.last[holding.first == holding.first.max()].max())
    is_one_sum = holding.first.max() == first and holding.last.min() == last
    content = "its own data" if (first, last) == (rank, rank + 1) else f"data of rank {first}"
    if last - first > 1:
        content = f"{'the sum over' if is_one_sum else 'data of'} ranks {first}..{last - 1}"
    return f"chunk{'s' * (len(chunks) > 1)} {numbers(chunks)}, {content}"
