"""A pipeline as a Gantt chart, as text or as an SVG picture: one row for each rank, time to the right.

The input is rows of (kind, stage, micro-batch, begin, end, rank), from a plan or recorded from a run. Several sets of
rows are drawn one below the other on one scale, so that a run can be compared with its plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from ..draw import svg_file
from .actions import PlanData
from .cost import Row

__all__: list[str] = []

AnyRow = tuple[str, int, int, float, float, int]

_LEFT, _RIGHT, _TOP, _ROW, _BAR = 84, 64, 62, 34, 26  # margins, and heights of a rank's row and of its bars, in pixels
_NARROWEST, _WIDEST = 480, 1600
_COLOURS = {"F": "#0072b2", "B": "#d55e00", "W": "#009e73", "BW": "#8a3f7c"}
_WORDS = {"F": "forward", "B": "gradient of the input", "W": "gradients of the weights", "BW": "backward"}
_MOST_RANKS, _MOST_ROWS = 64, 6000


def caption(plan: PlanData) -> str:
    """One line that names and sizes the plan.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> caption(pipeline_plan("zbv", ranks=2, num_microbatches=1))
    'pipeline zbv, 2 ranks, 4 stages, 1 micro-batch'
    """
    counts = [(plan.ranks, "rank", "s"), (plan.stages, "stage", "s"), (plan.num_microbatches, "micro-batch", "es")]
    return f"pipeline {plan.name}, " + ", ".join(f"{n} {noun}{more * (n != 1)}" for n, noun, more in counts)


def text_gantt(rows: Iterable[AnyRow], title: str = "", width: int = 200) -> str:
    """Format rows as text; if a rank has several stages, F1.0 is the forward of stage 1, micro-batch 0.

    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> print(text_gantt(pipeline_plan("1f1b", ranks=2, num_microbatches=3).cost().rows))
    rank 0  F0 F1       BW0-- F2 BW1--    BW2--
    rank 1     F0 BW0-- F1 BW1-- F2 BW2--
    """
    panel = _Panel.of(title, rows)
    scale = min(panel.legible_scale(), width / panel.span)
    lines = [title] if title else []
    for rank, rank_rows in enumerate(panel.by_rank):
        line = f"rank {rank}".ljust(8)
        for row in rank_rows:  # of rows that overlap, the later one hides the end of the earlier one
            start, stop = (8 + round((when - panel.begin) * scale) for when in (row.begin, row.end))
            space = max(0, stop - start - 1)
            label = f"{row.kind}{panel.number(row)}"
            fitting = next((text for text in (label, row.kind) if len(text) <= space), row.kind[:space])
            line = line.ljust(start)[:start] + fitting.ljust(space, "-")
        lines.append(line.rstrip())
    return "\n".join(lines)


@dataclass(frozen=True)
class _Panel:
    """One set of rows, grouped by rank and sorted by time."""

    title: str
    by_rank: list[list[Row]]
    several: bool  # whether a rank has several stages
    begin: float
    end: float

    @classmethod
    def of(cls, title: str, rows: Iterable[AnyRow]) -> _Panel:
        here = f"gantt {title}".rstrip()
        every = sorted((Row(*row) for row in rows), key=lambda row: (row.begin, row.end))
        if not every:
            raise ValueError(f"{here}: there are no rows to draw")
        wrong = next((row for row in every if row.kind not in _COLOURS or row.end < row.begin or row.rank < 0), None)
        if wrong:
            raise ValueError(f"{here}: {wrong} cannot be drawn; kinds are {', '.join(_COLOURS)}, and begin <= end")
        by_rank: list[list[Row]] = [[] for _ in range(1 + max(row.rank for row in every))]
        for row in every:
            by_rank[row.rank].append(row)
        several = any(len({row.stage for row in rank_rows}) > 1 for rank_rows in by_rank)
        return cls(title, by_rank, several, every[0].begin, max(row.end for row in every))

    @property
    def span(self) -> float:
        return (self.end - self.begin) or 1.0

    def number(self, row: Row) -> str:
        return f"{row.stage}.{row.micro}" if self.several else str(row.micro)

    def legible_scale(self) -> float:
        """The scale, in characters a second, at which the name of every action fits."""
        every = [row for rank_rows in self.by_rank for row in rank_rows if row.end > row.begin]
        names = ((row, f"{row.kind}{self.number(row)} ") for row in every)
        return max((len(name) / (row.end - row.begin) for row, name in names), default=1.0)

    def busy(self, rank: int) -> float:
        """The fraction of the time that a rank computes."""
        return sum(row.end - row.begin for row in self.by_rank[rank]) / self.span


def draw_gantt(
    path: str | Path, rows: Iterable[AnyRow] | Mapping[str, Iterable[AnyRow]], title: str = "pipeline"
) -> Path:
    """Write rows as an SVG picture and return its path; the panels of a mapping of titles to rows share one scale.

    >>> import tempfile
    >>> from dist_prims.schedules.pipelines import pipeline_plan
    >>> plans = {name: pipeline_plan(name, ranks=2, num_microbatches=8).cost().rows for name in ("1f1b", "zb_h1")}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_gantt(f"{folder}/both.svg", plans).name
    'both.svg'
    """
    named = rows if isinstance(rows, Mapping) else {"": rows}
    panels = [_Panel.of(name, each) for name, each in named.items()]
    if not panels:
        raise ValueError(f"gantt {title}: there are no rows to draw")
    ranks = max(len(panel.by_rank) for panel in panels)
    count = sum(len(rank_rows) for panel in panels for rank_rows in panel.by_rank)
    if ranks > _MOST_RANKS or count > _MOST_ROWS:
        raise ValueError(
            f"gantt {title}: {ranks} ranks and {count} actions; a picture shows at most {_MOST_RANKS} ranks and "
            f"{_MOST_ROWS} actions; draw a plan of fewer ranks or micro-batches"
        )
    path = svg_file(path)
    path.write_text("\n".join(_svg(panels, title)) + "\n", encoding="utf-8")
    return path


def _svg(panels: Sequence[_Panel], title: str) -> Iterator[str]:
    span = max(panel.span for panel in panels)
    plot = min(max(max(panel.legible_scale() for panel in panels) * span * 8, _NARROWEST, 8 * len(title)), _WIDEST)
    width, scale = round(_LEFT + plot + _RIGHT), plot / span
    heights = [len(panel.by_rank) * _ROW + (26 if panel.title else 0) for panel in panels]
    tops = [_TOP, *(_TOP + sum(heights[: at + 1]) + 20 * (at + 1) for at in range(len(panels)))]
    axis = tops[-1] - 20
    height = axis + 76
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{width}" height="{height}" rx="10" fill="#fff"/>'
    yield f'<text x="24" y="34" font-size="17" font-weight="600">{escape(title)}</text>'
    yield f'<text x="{width - 16}" y="{_TOP - 8}" text-anchor="end" fill="#666">busy</text>'
    yield from _axis(span, scale, axis)
    for panel, top in zip(panels, tops, strict=False):
        if panel.title:
            yield f'<text x="24" y="{top + 14}" font-weight="600">{escape(panel.title)}</text>'
        yield from _rows_of_ranks(panel, top + (26 if panel.title else 0), scale, width)
    yield from _legend(panels, axis + 56)
    yield "</svg>"


def _axis(span: float, scale: float, y: float) -> Iterator[str]:
    rough = span / 8
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    for tick in itertools.takewhile(lambda tick: tick <= span * 1.001, (step * number for number in itertools.count())):
        x = _LEFT + tick * scale
        yield f'<path d="M{x:.1f},{_TOP} V{y + 4}" stroke="#e6e6e6"/>'
        yield f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle" fill="#777">{tick:.6g}</text>'


def _rows_of_ranks(panel: _Panel, top: float, scale: float, width: int) -> Iterator[str]:
    stages = [sorted({row.stage for row in rank_rows}) for rank_rows in panel.by_rank]
    longest = max(len(panel.number(row)) for rank_rows in panel.by_rank for row in rank_rows)
    label_width = 2 + 7 * longest  # 7 pixels a character
    for rank, rank_rows in enumerate(panel.by_rank):
        y = top + rank * _ROW
        yield f'<text x="24" y="{y + 22}">rank {rank}</text>'
        yield f'<text x="{width - 16}" y="{y + 22}" text-anchor="end" fill="#666">{panel.busy(rank):.0%}</text>'
        for row in rank_rows:
            x, wide = _LEFT + (row.begin - panel.begin) * scale, (row.end - row.begin) * scale
            colour, ink = _colour(row.kind, stages[rank].index(row.stage), len(stages[rank]))
            yield (
                f'<rect class="{row.kind}" x="{x:.2f}" y="{y + 4}" width="{wide:.2f}" height="{_BAR}" fill="{colour}" '
                f'stroke="#fff" stroke-width="{min(1.0, wide / 4):.2f}"/>'
            )
            if wide >= label_width:
                yield (
                    f'<text x="{x + wide / 2:.1f}" y="{y + 21}" text-anchor="middle" font-size="11" '
                    f'fill="{ink}">{panel.number(row)}</text>'
                )


def _colour(kind: str, place: int = 0, stages: int = 1) -> tuple[str, str]:
    """Fill and text colour of an action; the second and later ones of the ``stages`` of a rank are lighter.

    >>> _colour("F"), _colour("F", 1, 2)
    (('#0072b2', '#fff'), ('#99c7e0', '#333'))
    """
    hue = _COLOURS[kind]
    share = 0.6 * place / (stages - 1) if place else 0.0
    parts = (int(hue[at : at + 2], 16) for at in (1, 3, 5))
    fill = "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
    return f"#{fill}", "#fff" if share < 0.4 else "#333"


def _legend(panels: Sequence[_Panel], y: float) -> Iterator[str]:
    kinds = {row.kind for panel in panels for rank_rows in panel.by_rank for row in rank_rows}
    x = 24
    for kind in (kind for kind in _COLOURS if kind in kinds):
        words = _WORDS[kind]
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 20}" y="{y + 1}" fill="#666">{words}</text>'
        x += 44 + round(6.6 * len(words))
    if any(panel.several for panel in panels):
        yield f'<text x="{x}" y="{y + 1}" fill="#666">stage.micro-batch</text>'
