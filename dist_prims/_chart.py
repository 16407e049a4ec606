"""Line charts as SVG for the demo and the benchmark, without a plotting library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from .schedules.draw import svg_file

__all__: list[str] = []

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 820, 460, 78, 170, 64, 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56a0d3", "#7f3c8d", "#4d4d4d")
_DASHES = ("", "7 4", "2 3")

Points = Sequence[tuple[float, float]]


def line_chart(
    path: str | Path,
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    log_x: bool = False,
    log_y: bool = False,
) -> Path:
    """Write a chart with one line for each series, labelled at its end, and return the path."""
    if not any(series.values()):
        raise ValueError(f"line_chart: {title!r} has no points to draw")
    x = _Axis.over([point[0] for points in series.values() for point in points], log_x, _LEFT, _WIDTH - _RIGHT)
    y = _Axis.over([point[1] for points in series.values() for point in points], log_y, _HEIGHT - _BOTTOM, _TOP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#fff"/>',
        f'<text x="24" y="34" font-size="17" font-weight="600">{escape(title)}</text>',
        *_grid(x, y),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 16}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(20 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
        *_lines(x, y, series),
        "</svg>",
    ]
    path = svg_file(path)
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    start: float
    stop: float

    @classmethod
    def over(cls, values: Sequence[float], log: bool, start: float, stop: float) -> _Axis:
        if log:
            positive = [value for value in values if value > 0] or [1.0]
            return cls(min(positive), max(max(positive), min(positive) * 1.01), True, start, stop)
        low, high = min(0.0, *values), max(values)
        return cls(low, high if high > low else low + 1, False, start, stop)

    def at(self, value: float) -> float:
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return round(self.start + (scale(max(value, self.low)) - low) / (high - low) * (self.stop - self.start), 1)

    def ticks(self) -> list[float]:
        if self.log:
            every = max(1, math.ceil((math.log10(self.high) - math.log10(self.low)) / 7))
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1, every)]
            return powers if len(powers) > 1 else [self.low, self.high]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _number(value: float) -> str:
    """Format a number for an axis.

    >>> _number(1500), _number(2000000), _number(0.25)
    ('1.5k', '2M', '0.25')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    for value in y.ticks():
        at = y.at(value)
        yield f'<line x1="{x.start}" y1="{at}" x2="{x.stop}" y2="{at}" stroke="#e6e6e6"/>'
        yield f'<text x="{x.start - 8}" y="{at + 4}" text-anchor="end" fill="#777">{_number(value)}</text>'
    for value in x.ticks():
        at = x.at(value)
        yield f'<line x1="{at}" y1="{y.start}" x2="{at}" y2="{y.start + 5}" stroke="#999"/>'
        yield f'<text x="{at}" y="{y.start + 20}" text-anchor="middle" fill="#777">{_number(value)}</text>'


def _lines(x: _Axis, y: _Axis, series: Mapping[str, Points]) -> Iterator[str]:
    named = [(name, points) for name, points in series.items() if points]
    places = _spread([y.at(points[-1][1]) for _, points in named])
    for number, ((name, points), place) in enumerate(zip(named, places, strict=True)):
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        path = " ".join(f"{x.at(a)},{y.at(b)}" for a, b in points)
        end_x, end_y = x.at(points[-1][0]), y.at(points[-1][1])
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        yield f'<line x1="{end_x + 2}" y1="{end_y}" x2="{x.stop + 12}" y2="{place}" stroke="{colour}" opacity="0.4"/>'
        yield f'<text x="{x.stop + 16}" y="{place + 4}" fill="{colour}">{escape(name)}</text>'


def _spread(wanted: Sequence[float], gap: float = 15.0) -> list[float]:
    """Positions close to the wanted ones, at least ``gap`` apart."""
    places = list(wanted)
    order = sorted(range(len(places)), key=lambda index: places[index])
    for above, below in itertools.pairwise(order):
        places[below] = max(places[below], places[above] + gap)
    overflow = max((places[order[-1]] - (_HEIGHT - _BOTTOM)) if order else 0, 0)
    return [place - overflow for place in places]
