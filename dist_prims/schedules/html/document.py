"""An HTML file from a template, scripts and data, all in one file."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__: list[str] = []


@dataclass(frozen=True)
class Page:
    """A page: its title, the scripts in the order in which they run, and the data for them."""

    title: str
    scripts: Sequence[str]
    data: Mapping[str, Any]

    def text(self) -> str:
        """The whole file."""
        script = "\n".join(_asset(f"{name}.js") for name in self.scripts)
        parts = {
            "TITLE": html.escape(self.title),
            "STYLE": _asset("page.css"),
            "DATA": _json(self.data),
            "SCRIPT": script,
        }
        text = _asset("page.html")
        for name, content in parts.items():
            text = text.replace(f"{{{{{name}}}}}", content, 1)
        return text


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: ``</script>`` in a string would end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def write_html(page: Page, path: str | Path) -> Path:
    """Write a page to ``path``, whose suffix must be .html, and return the path."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{path}: a page is an HTML file; name it {path.stem or 'page'}.html")
    path.write_text(page.text(), encoding="utf-8")
    return path


def in_notebook(page: Page, height: int = 760) -> str:
    """The page as an element of a notebook: a frame of its own, so that notebook and page share no styles or names."""
    return (
        f'<iframe title="{html.escape(page.title)}" srcdoc="{html.escape(page.text())}" '
        f'style="width:100%;height:{height}px;border:1px solid #ccc;border-radius:8px"></iframe>'
    )
