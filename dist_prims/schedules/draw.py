"""A schedule as a picture: ranks side by side, time downwards, an arrow for each message, a colour for each chunk.

What is added on arrival ends in a plus, what replaces ends in an arrowhead: so a reduce-scatter and the all-gather
after it tell themselves apart at a glance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from .schedule import Schedule, Step

__all__ = ["caption", "messages", "terminal", "write_svg"]

_MOST_RANKS, _MOST_STEPS = 32, 64
_COLUMN, _ROW, _LEFT, _TOP = 96, 84, 84, 92

# Told apart with every kind of colour vision (after Okabe and Ito), dark enough on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56a0d3", "#7f3c8d", "#4d4d4d")


@dataclass(frozen=True)
class Message:
    """What travels from one rank to another in one step: chunks, and whether they are added where they arrive."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    into: tuple[int, ...]
    reduce: bool


def messages(step: Step) -> list[Message]:
    """The rows of a step, packed by source, destination and kind.

    >>> [message.chunks for message in messages(Step(src=[0, 0, 1], dst=[1, 1, 0], chunk=[2, 5, 3]))]
    [(2, 5), (3,)]
    """
    packed: dict[tuple[int, int, bool], list[tuple[int, int]]] = {}
    for src, dst, chunk, into, reduce in step.rows():
        packed.setdefault((src, dst, bool(reduce)), []).append((chunk, into))
    return [
        Message(src, dst, tuple(chunk for chunk, _ in pairs), tuple(into for _, into in pairs), reduce)
        for (src, dst, reduce), pairs in packed.items()
    ]


def caption(schedule: Schedule) -> str:
    """The schedule in a line.

    >>> from dist_prims.schedules import build
    >>> caption(build("broadcast", "binomial", size=7, root=2))
    'broadcast binomial: 7 ranks, 1 chunk, 3 steps, root 2'
    """
    counts = [(schedule.size, "rank"), (schedule.chunks, "chunk"), (len(schedule.steps), "step")]
    words = [f"{number} {noun}{'s' * (number != 1)}" for number, noun in counts]
    words += [f"root {schedule.root}"] * (schedule.root is not None)
    words += [f"{name} {value}" for name, value in schedule.parameters]
    return f"{schedule.collective} {schedule.algorithm}: {', '.join(words)}"


def terminal(schedule: Schedule) -> str:
    """A line for each step: who sends which chunks to whom; ``+`` where they are added, ``=`` where they replace.

    >>> from dist_prims.schedules import build
    >>> print(terminal(build("all_reduce", "ring", size=2)))
    all_reduce ring: 2 ranks, 2 chunks, 2 steps
    step 1   0 -0-> 1 +   1 -1-> 0 +
    step 2   0 -1-> 1 =   1 -0-> 0 =
    """
    lines = [caption(schedule)]
    for number, step in enumerate(schedule.steps, start=1):
        moves = [
            f"{each.src} -{_numbers(each.chunks)}-> {each.dst} {'+' if each.reduce else '='}"
            + (f" as {_numbers(each.into)}" if each.into != each.chunks else "")
            for each in messages(step)
        ]
        lines += _wrapped(f"step {number}".ljust(9), moves)
    return "\n".join(lines)


def _wrapped(head: str, moves: list[str], width: int = 100) -> Iterator[str]:
    line = head
    for move in moves:
        if len(line) + len(move) > width and line.strip() != head.strip():
            yield line.rstrip()
            line = " " * len(head)
        line += move + "   "
    yield line.rstrip()


def _numbers(chunks: tuple[int, ...]) -> str:
    """Chunk numbers, runs abbreviated.

    >>> _numbers((0, 1, 2, 5, 7, 8))
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def write_svg(schedule: Schedule, path: str | Path) -> Path:
    """Write the picture and return its path."""
    if schedule.size > _MOST_RANKS or len(schedule.steps) > _MOST_STEPS:
        raise ValueError(
            f"draw: {schedule.size} ranks and {len(schedule.steps)} steps would be no picture; "
            f"up to {_MOST_RANKS} ranks and {_MOST_STEPS} steps can be read"
        )
    path = Path(path)
    path.write_text("\n".join(_svg(schedule)) + "\n")
    return path


def _svg(schedule: Schedule) -> Iterator[str]:
    steps = len(schedule.steps)
    width, height = _LEFT + schedule.size * _COLUMN, _TOP + steps * _ROW + 78
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">'
    )
    yield f"<title>{escape(caption(schedule))}</title>"
    yield _markers()
    yield f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>'
    name, _, facts = caption(schedule).partition(": ")
    yield f'<text x="24" y="32" font-size="17" font-weight="600">{escape(name)}</text>'
    yield f'<text x="24" y="52" fill="#777">{escape(facts)}</text>'
    for rank in range(schedule.size):
        x = _x(rank)
        yield f'<text x="{x}" y="{_TOP - 14}" text-anchor="middle" font-weight="600">{rank}</text>'
        yield f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_TOP + steps * _ROW}" stroke="#ddd" stroke-width="2"/>'
    for number, step in enumerate(schedule.steps):
        y = _TOP + number * _ROW
        yield f'<text x="24" y="{y + _ROW / 2 + 4}" fill="#777">step {number + 1}</text>'
        yield from (_arrow(message, y) for message in messages(step))
        if schedule.chunks > 1:  # on top of the arrows
            yield from (_label(message, y) for message in messages(step))
    for number in range(steps + 1):
        y = _TOP + number * _ROW
        yield from (f'<circle cx="{_x(rank)}" cy="{y}" r="4" fill="#999"/>' for rank in range(schedule.size))
    yield from _legend(height - 34)
    yield "</svg>"


def _x(rank: int) -> int:
    return _LEFT + rank * _COLUMN + _COLUMN // 2


def _markers() -> str:
    shapes = []
    for number, colour in enumerate(_COLOURS):
        head = f'<path d="M0,1 L9,5 L0,9 z" fill="{colour}"/>'
        plus = f'<circle cx="5" cy="5" r="4.6" fill="{colour}"/><path d="M2.4,5 H7.6 M5,2.4 V7.6" stroke="#fff"/>'
        for kind, shape, anchor, size, turn in (("copy", head, 9, 9, "auto"), ("add", plus, 5, 13, "0")):
            shapes.append(
                f'<marker id="{kind}{number}" viewBox="0 0 10 10" refX="{anchor}" refY="5" markerWidth="{size}" '
                f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="{turn}">{shape}</marker>'
            )
    return f"<defs>{''.join(shapes)}</defs>"


def _ends(message: Message, y: float) -> tuple[float, float, float, float]:
    """A message leaves at the top of its step's row and arrives at the bottom."""
    return float(_x(message.src)), y + 4.0, float(_x(message.dst)), y + _ROW - 7.0


def _arrow(message: Message, y: float) -> str:
    x1, y1, x2, y2 = _ends(message, y)
    kind, number = "add" if message.reduce else "copy", message.chunks[0] % len(_COLOURS)
    way = f"q30,{(y2 - y1) / 2:g} 0,{y2 - y1:g}" if message.src == message.dst else f"L{x2:g},{y2:g}"
    return (
        f'<path class="message" d="M{x1:g},{y1:g} {way}" fill="none" stroke="{_COLOURS[number]}" stroke-width="2" '
        f'marker-end="url(#{kind}{number})"/>'
    )


def _label(message: Message, y: float) -> str:
    """The chunks, near where they leave: there the arrows have not met yet."""
    x1, y1, x2, y2 = _ends(message, y)
    share = 0.3 if abs(message.src - message.dst) == 1 else 0.16
    at_x, at_y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
    if message.src == message.dst:
        at_x, at_y = x1 + 15, (y1 + y2) / 2
    text, colour = _numbers(message.chunks), _COLOURS[message.chunks[0] % len(_COLOURS)]
    half = 4 + 3.6 * len(text)
    return (
        f'<rect x="{at_x - half:g}" y="{at_y - 8:g}" width="{2 * half:g}" height="16" rx="8" fill="#fff" '
        f'stroke="{colour}"/><text x="{at_x:g}" y="{at_y + 4:g}" text-anchor="middle" font-size="11" '
        f'fill="{colour}">{text}</text>'
    )


def _legend(y: float) -> Iterator[str]:
    for x, kind, words in ((24, "add0", "added on arrival"), (190, "copy0", "replaces")):
        yield f'<path d="M{x},{y} h34" stroke="{_COLOURS[0]}" stroke-width="2" marker-end="url(#{kind})"/>'
        yield f'<text x="{x + 46}" y="{y + 4}" fill="#777">{words}</text>'
    yield f'<text x="24" y="{y + 24}" fill="#777">columns: ranks; numbers and colours: chunks</text>'
