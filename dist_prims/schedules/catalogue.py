"""Tables of the registered algorithms, for the README and the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .contract import COLLECTIVES
from .registry import algorithms, lookup

__all__: list[str] = []

SYMBOLS = "n: ranks; L: log2 n, rounded up; p: the largest power of two up to n; l: log2 p; others: see the module"

_HEADINGS = ("collective", "algorithm", "steps", "sent", "wins when", "source")


def markdown_table(collective: str | None = None) -> str:
    """A Markdown table with one row for each registered algorithm of one collective, or of all."""
    rows = [(c, f"`{name}`", f"`{steps}`", f"`{sent}`", *words) for c, name, steps, sent, *words in _rows(collective)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [_HEADINGS, ("---",) * len(_HEADINGS), *rows])


def text_table(collective: str | None = None) -> str:
    """The same table in aligned columns, for a terminal."""
    rows = [_HEADINGS, *_rows(collective)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _rows(only: str | None) -> Iterator[tuple[str, ...]]:
    for collective in COLLECTIVES if only is None else [only]:
        for name in algorithms(collective):
            if card := lookup(collective, name).card:
                yield collective, name, card.steps, card.sent, card.wins, card.source
