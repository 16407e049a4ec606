"""A schedule as an SVG picture: ranks side by side, time downwards, an arrow for each message, a colour for each chunk.

An arrow ends in a plus if the data is added on arrival, and in an arrowhead if it replaces the chunk. So a
reduce-scatter and the all-gather after it look different.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from ..steps import ScheduleData
from .message import DrawnMessage, caption, facts, messages, numbers, refuse_unreadable, svg_file

__all__: list[str] = []

_COLUMN, _LEFT, _TOP, _NARROWEST = 96, 84, 96, 440

# Distinguishable with every kind of colour vision (after Okabe and Ito); further chunks are darker, then lighter.
_HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56a0d3", "#7f3c8d", "#4d4d4d")
_SHADES = ((0, 0.0), (0, 0.45), (255, 0.4))

_GREY = "#666666"

_LABEL_PLACES = np.array([0.3, 0.24, 0.36, 0.18, 0.42, 0.5, 0.58, 0.66, 0.12, 0.74])


def write_svg(schedule: ScheduleData, path: str | Path, animate: bool = False) -> Path:
    """Write the picture to ``path`` and return the path; with ``animate`` its steps appear one after the other.

    >>> import tempfile
    >>> from dist_prims.schedules import build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_svg(build("all_reduce", "ring", size=4), f"{folder}/ring.svg")
    ...     "<title>all_reduce ring, 4 ranks, 4 chunks, 6 steps</title>" in path.read_text()
    True
    """
    refuse_unreadable(schedule)
    path = svg_file(path)
    path.write_text("\n".join(_svg(schedule, animate)) + "\n", encoding="utf-8")
    return path


def _svg(schedule: ScheduleData, animate: bool) -> Iterator[str]:
    steps = [messages(step) for step in schedule.steps]
    row = _row_height(steps)
    name, words = f"{schedule.collective} {schedule.algorithm}", facts(schedule)
    width = max(_LEFT + schedule.size * _COLUMN, _NARROWEST, 48 + int(7.6 * len(words)))
    legend, foot = _legend(steps, schedule.chunks > 1, width, _TOP + len(steps) * row + 40)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {foot}" width="{width}" height="{foot}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">'
    )
    yield f"<title>{escape(caption(schedule))}</title>"
    yield _markers(steps)
    if animate:
        yield _animation(len(steps))
    yield f'<rect width="{width}" height="{foot}" rx="10" fill="#fff"/>'
    yield f'<text x="24" y="34" font-size="17" font-weight="600">{escape(name)}</text>'
    yield f'<text x="24" y="54" fill="#666">{escape(words)}</text>'
    yield from _rank_lines(schedule.size, len(steps), row)
    for number, step in enumerate(steps):
        arrows = _arrows(step, _TOP + number * row, row)
        if animate:
            yield f'<g class="step-{number}">'
        yield f'<text x="24" y="{_TOP + number * row + row // 2 + 4}" fill="#666">step {number}</text>'
        yield from (arrow.drawn() for arrow in arrows)
        if schedule.chunks > 1:  # on top of the arrows
            yield from _labels(arrows)
        if animate:
            yield "</g>"
    yield from legend
    yield "</svg>"


def _animation(steps: int) -> str:
    """A style by which step after step appears, a second each; all stay for two seconds, then it begins again.

    Where the reader has asked for less motion, the picture does not move.
    """
    seconds = steps + 2
    rules = []
    for number in range(steps):
        name, begin = f"step-{number}", 100 * number / seconds
        hidden, shown = f"0%, {begin:.3f}% {{ opacity: 0.08 }}", f"{begin + 0.01:.3f}%, 100% {{ opacity: 1 }}"
        rules.append(f"@keyframes {name} {{ {hidden} {shown} }} .{name} {{ animation: {name} {seconds}s infinite }}")
    moves = " ".join(rules)
    return f"<style>@media (prefers-reduced-motion: no-preference) {{ {moves} }}</style>"


def _row_height(steps: Sequence[Sequence[DrawnMessage]]) -> int:
    """The height of a step, which grows with the largest number of messages that one rank receives in it."""
    fan_in = max((max(Counter(message.dst for message in step).values()) for step in steps if step), default=1)
    return min(88 + 10 * (fan_in - 1), 180)


def _rank_lines(size: int, steps: int, row: int) -> Iterator[str]:
    """A vertical line for each rank, with a dot at the beginning of each step."""
    yield f'<text x="24" y="{_TOP - 14}" fill="#666">rank</text>'
    for rank in range(size):
        x = _rank_x(rank)
        yield f'<text x="{x}" y="{_TOP - 14}" text-anchor="middle" font-weight="600">{rank}</text>'
        yield f'<path d="M{x},{_TOP} v{steps * row}" stroke="#ddd" stroke-width="2"/>'
        yield from (f'<circle cx="{x}" cy="{_TOP + number * row}" r="4" fill="#999"/>' for number in range(steps + 1))


def _rank_x(rank: int) -> int:
    return _LEFT + rank * _COLUMN + _COLUMN // 2


def _colour(chunk: int) -> str:
    """The colour of a chunk: eight hues, then the same hues in other shades.

    >>> _colour(0), _colour(8), _colour(16)
    ('#0072b2', '#003f62', '#66aad1')
    """
    hue = _HUES[chunk % len(_HUES)]
    towards, share = _SHADES[chunk // len(_HUES) % len(_SHADES)]
    parts = (int(hue[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (towards - part) * share):02x}" for part in parts)


@dataclass(frozen=True)
class _Arrow:
    """The arrow of a message, from the top of its step's row to the bottom."""

    message: DrawnMessage
    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def bend(self) -> float:
        """The sideways bend of a message from a rank to itself."""
        return 0.0 if self.message.src != self.message.dst else 44.0 if self.x2 >= self.x1 else -44.0

    def drawn(self) -> str:
        colour, kind = _colour(self.message.chunks[0]), "add" if self.message.reduce else "copy"
        line = f"Q{self.x1 + self.bend:g},{(self.y1 + self.y2) / 2:g} " if self.bend else "L"
        dashes = ' stroke-dasharray="4 3"' if self.bend else ""
        return (
            f'<path class="message" d="M{self.x1:g},{self.y1:g} {line}{self.x2:g},{self.y2:g}" fill="none" '
            f'stroke="{colour}" stroke-width="2"{dashes} marker-end="url(#{kind}-{colour[1:]})"/>'
        )


def _arrows(step: Sequence[DrawnMessage], top: int, row: int) -> list[_Arrow]:
    """The arrows of a step; messages to the same rank end side by side, in the order of their source ranks."""
    by_target: defaultdict[int, list[DrawnMessage]] = defaultdict(list)
    for message in sorted(step, key=lambda message: (message.src, message.reduce)):
        by_target[message.dst].append(message)
    arrows = []
    for message in step:
        arriving = by_target[message.dst]
        gap = min(18.0, 72 / max(len(arriving) - 1, 1))
        x2 = _rank_x(message.dst) + gap * (arriving.index(message) - (len(arriving) - 1) / 2)
        arrows.append(_Arrow(message, _rank_x(message.src), top + 4, round(x2, 1), top + row - 15))
    return arrows


def _labels(arrows: Sequence[_Arrow]) -> Iterator[str]:
    """The chunk numbers of each message, where the fewest other arrows cross its arrow; none if no place is free."""
    start, end = (np.array([getattr(arrow, name) for arrow in arrows]) for name in ("x1", "x2"))
    at = _LABEL_PLACES[:, None]
    bent = np.array([arrow.bend for arrow in arrows]) * 2 * at * (1 - at)
    x = start + at * (end - start) + bent  # x[place, arrow]; at one place all arrows have the same height
    taken: list[tuple[float, float, float]] = []
    for number in sorted(range(len(arrows)), key=lambda number: abs(end[number] - start[number])):
        arrow, text = arrows[number], numbers(arrows[number].message.chunks)
        half, height = 4 + 3.6 * len(text), arrow.y2 - arrow.y1
        # crosses[place, other]: whether an arrow comes near the label. Within 9 pixels above or below the middle of the
        # label, an arrow moves sideways by 9 / height of its width.
        crosses = np.abs(x - x[:, [number]]) < half + 3 + np.abs(end - start) * 9 / height
        for place in np.argsort(crosses.sum(1), kind="stable").tolist():
            cx, cy = float(x[place, number]), arrow.y1 + float(_LABEL_PLACES[place]) * height
            if all(
                abs(cy - other_y) >= 18 or abs(cx - other_x) >= half + width + 2 for other_x, other_y, width in taken
            ):
                taken.append((cx, cy, half))
                yield _label(cx, cy, half, text, _colour(arrow.message.chunks[0]))
                break


def _label(x: float, y: float, half: float, text: str, colour: str) -> str:
    return (
        f'<rect x="{x - half:.1f}" y="{y - 8:.1f}" width="{2 * half:.1f}" height="16" rx="8" fill="#fff" '
        f'stroke="{colour}" stroke-width="1.2"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="11">{text}</text>'
    )


def _markers(steps: Sequence[Sequence[DrawnMessage]]) -> str:
    """The arrow ends, one for each kind and colour in use, and a grey one of each kind for the legend."""
    occurring = {(each.reduce, _colour(each.chunks[0])) for step in steps for each in step}
    shapes = []
    for reduce, colour in sorted(occurring | {(reduce, _GREY) for reduce, _ in occurring}):
        head = f'<path d="M0,1 L9,5 L0,9 z" fill="{colour}"/>'
        plus = f'<circle cx="5" cy="5" r="4.8" fill="{colour}"/><path d="M2.2,5 H7.8 M5,2.2 V7.8" stroke="#fff"/>'
        kind, shape, anchor, size, turn = ("add", plus, 5, 13, "0") if reduce else ("copy", head, 9, 11, "auto")
        shapes.append(
            f'<marker id="{kind}-{colour[1:]}" viewBox="0 0 10 10" refX="{anchor}" refY="5" markerWidth="{size}" '
            f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="{turn}">{shape}</marker>'
        )
    return f"<defs>{''.join(shapes)}</defs>"


def _legend(steps: Sequence[Sequence[DrawnMessage]], numbered: bool, width: int, y: int) -> tuple[list[str], int]:
    """The legend of the symbols in use, in as many lines as the width requires, and the y below it."""
    every = [message for step in steps for message in step]
    line = f'<path d="M0,0 h30" stroke="{_GREY}" stroke-width="2"'
    signs = [
        (any(each.reduce for each in every), f'{line} marker-end="url(#add-{_GREY[1:]})"/>', "added on arrival"),
        (not all(each.reduce for each in every), f'{line} marker-end="url(#copy-{_GREY[1:]})"/>', "replaces"),
        (any(each.src == each.dst for each in every), f'{line} stroke-dasharray="4 3"/>', "stays on its rank"),
        (numbered and bool(every), _label(24, 0, 8, "0", _GREY), "chunk number"),
    ]
    drawn, x = [], 24
    for _, sign, words in (sign for sign in signs if sign[0]):
        needed = 46 + int(6.9 * len(words))
        if x > 24 and x + needed > width - 16:
            x, y = 24, y + 24
        drawn.append(f'<g transform="translate({x},{y})">{sign}<text x="42" y="4" fill="#666">{words}</text></g>')
        x += needed + 18
    return drawn, y + 26
