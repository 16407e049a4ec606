"""Pictures and tables of schedules: every message is in them, and those in the documentation are fresh."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest

from dist_prims._chart import line_chart
from dist_prims.schedules import COLLECTIVES, algorithms, build
from dist_prims.schedules.catalogue import markdown_table, text_table
from dist_prims.schedules.draw import messages, terminal

PICTURES = Path(__file__).parent.parent / "docs/pictures"
REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path) -> xml.etree.ElementTree.Element:
    return xml.etree.ElementTree.parse(path).getroot()


@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_every_message_is_an_arrow_and_a_word(collective: str, name: str, tmp_path: Path) -> None:
    for size in (1, 2, 3, 4, 7):
        schedule = build(collective, name, size)
        sent = [message for step in schedule.steps for message in messages(step)]
        arrows = [
            path
            for path in drawn(schedule.draw(tmp_path / "x.svg")).iter(f"{SVG}path")
            if path.get("class") == "message"
        ]
        assert len(arrows) == len(sent)
        assert sum("add" in (arrow.get("marker-end") or "") for arrow in arrows) == sum(each.reduce for each in sent)
        assert terminal(schedule).count("->") == len(sent)


def test_the_pictures_of_the_documentation_are_fresh(tmp_path: Path) -> None:
    for file, (collective, name, size) in {
        "ring.svg": ("all_reduce", "ring", 4),
        "halving_doubling.svg": ("all_reduce", "halving_doubling", 8),
        "binomial.svg": ("broadcast", "binomial", 7),
    }.items():
        again = build(collective, name, size).draw(tmp_path / file)
        assert again.read_text() == (PICTURES / file).read_text(), f"draw {file} again"


def test_what_no_one_could_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="33 ranks and 64 steps would be no picture; up to 32 ranks and 64 steps"):
        build("all_reduce", "ring", 33).draw(tmp_path / "x.svg")


def test_tables_hold_every_algorithm() -> None:
    for table in (markdown_table(), text_table()):
        for collective, name in REGISTRY:
            assert any(collective in line and name in line for line in table.splitlines()), (collective, name)
    assert {len(line.split("|")) for line in markdown_table().splitlines()} == {8}
    assert "broadcast" not in text_table("all_reduce")


def test_a_chart_has_a_line_for_each_series(tmp_path: Path) -> None:
    series = {"a < b": [(1.0, 1.0), (10.0, 5.0)], "flat": [(1.0, 2.0), (10.0, 2.0)], "point": [(3.0, 3.0)], "none": []}
    for log in (False, True):
        root = drawn(line_chart(tmp_path / "x.svg", "T & T", "x", "y", series, log_x=log, log_y=log))
        lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
        assert [len(points) for points in lines] == [2, 2, 1]
        assert "a < b" in [text.text for text in root.iter(f"{SVG}text")]
        (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in lines[0])
        assert x1 < x2
        assert y1 > y2  # larger is higher
    with pytest.raises(ValueError, match="has no points to draw"):
        line_chart(tmp_path / "x.svg", "nothing", "x", "y", {"none": []})
