"""The loads of a schedule on a graph as an SVG picture: ranks on a circle, switches within, a line for each link.

The width and colour of a line tell how long the link works, compared with the busiest link. A link that leads from left
to right is drawn below its way back. Its tooltip has the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from ..graph import Graph, Link
from ..graph_cost import link_loads
from ..steps import ScheduleData
from .message import caption, svg_file

__all__: list[str] = []

_MOST_RANKS = 64
_SIZE, _TOP, _RADIUS, _NODE = 720, 70, 300, 15
_IDLE, _BUSIEST = np.array([215, 215, 215]), np.array([213, 94, 0])


def write_loads(schedule: ScheduleData, graph: Graph, path: str | Path) -> Path:
    """Write the picture to ``path`` and return the path."""
    if graph.ranks > _MOST_RANKS:
        raise ValueError(f"draw: the graph has {graph.ranks} ranks; a picture shows at most {_MOST_RANKS}")
    path = svg_file(path)
    path.write_text("\n".join(_svg(schedule, graph)) + "\n", encoding="utf-8")
    return path


def _svg(schedule: ScheduleData, graph: Graph) -> Iterator[str]:
    load = link_loads(schedule, graph).loads.sum(axis=0)
    seconds = load / graph.bandwidth
    use = seconds / max(seconds.max(initial=0), 1e-300)
    places = _places(graph)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE + _TOP}" width="{_SIZE}" '
        f'height="{_SIZE + _TOP}" font-family="system-ui, sans-serif" font-size="13" fill="#333">'
    )
    yield f"<title>{escape(caption(schedule))}: loads of links</title>"
    yield f'<rect width="{_SIZE}" height="{_SIZE + _TOP}" rx="10" fill="#fff"/>'
    yield f'<text x="24" y="34" font-size="17" font-weight="600">{escape(caption(schedule))}</text>'
    if len(load):
        words = _words(graph.links[use.argmax()], load[use.argmax()], use.max())
        yield f'<text x="24" y="54" fill="#666">busiest: {escape(words)}</text>'
    for number in np.argsort(use, kind="stable").tolist():  # the busiest on top
        ends = places[graph.ends[:, number]]
        yield _line(ends, float(use[number]), _words(graph.links[number], load[number], use[number]))
    for node, (x, y) in zip(graph.nodes, places.tolist(), strict=True):
        is_rank = isinstance(node, int)
        size = f'r="{_NODE}" fill="#0072b2"' if is_rank else 'r="6" fill="#666"'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" {size}/>'
        look = f'y="{y + 5:.1f}" fill="#fff"' if is_rank else f'y="{y - 10:.1f}" font-size="11"'
        yield f'<text x="{x:.1f}" text-anchor="middle" {look}>{escape(str(node))}</text>'
    yield "</svg>"


def _words(link: Link, load: float, use: float) -> str:
    return f"{link.src} → {link.dst}, {load:.3g} of the data, works {use:.0%} of the time of the busiest link"


def _line(ends: NDArray[np.float64], use: float, words: str) -> str:
    along = (ends[1] - ends[0]) / max(float(np.linalg.norm(ends[1] - ends[0])), 1.0)
    (x, y), (to_x, to_y) = (ends + 4 * np.array([-along[1], along[0]])).tolist()
    red, green, blue = (_IDLE + use * (_BUSIEST - _IDLE)).astype(int).tolist()
    return (
        f'<path class="link" d="M{x:.1f},{y:.1f} L{to_x:.1f},{to_y:.1f}" stroke="rgb({red},{green},{blue})" '
        f'stroke-width="{1 + 5 * use:.2f}"><title>{escape(words)}</title></path>'
    )


def _places(graph: Graph) -> NDArray[np.float64]:
    """The centre of each node: a switch is between its neighbours; switches with the same neighbours form a circle."""
    angle = 2 * np.pi * np.arange(graph.ranks) / graph.ranks - np.pi / 2
    places = np.zeros((len(graph.nodes), 2))
    places[: graph.ranks] = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    joined = np.zeros((len(graph.nodes), len(graph.nodes)))
    joined[graph.ends[1], graph.ends[0]] = 1
    for _ in range(8):  # a switch without ranks is between switches
        means = joined @ places / np.maximum(joined.sum(axis=1, keepdims=True), 1)
        places[graph.ranks :] = 0.75 * means[graph.ranks :]
    crowds: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for node in range(graph.ranks, len(graph.nodes)):
        crowds[tuple((places[node].round(1) + 0.0).tolist())].append(node)
    for crowd in crowds.values():
        for number, node in enumerate(crowd if len(crowd) > 1 else []):
            turn = 2 * np.pi * number / len(crowd)
            places[node] += 0.2 * np.array([np.cos(turn), np.sin(turn)])
    centre: NDArray[np.float64] = np.array([_SIZE / 2, _SIZE / 2 + _TOP - 10])
    return centre + _RADIUS * places
