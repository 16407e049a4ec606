"""Pictures and tables of schedules: every message is in them, and those in the documentation are fresh."""

from __future__ import annotations

import dataclasses
import itertools
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from dist_prims._chart import line_chart
from dist_prims.schedules import COLLECTIVES, Graph, Step, algorithms, build
from dist_prims.schedules.catalogue import markdown_table, text_table
from dist_prims.schedules.draw import describe_contract, messages, terminal
from dist_prims.schedules.steps import Steps

PICTURES = Path(__file__).parents[2] / "docs/pictures"
REGISTRY = [(collective, name) for collective in COLLECTIVES for name in algorithms(collective)]
SVG = "{http://www.w3.org/2000/svg}"

RING = """\
all_reduce ring, 3 ranks, 3 chunks, 4 steps
s ─c→ d: rank s sends chunk c to rank d, (+) adding; then the ranks in the sum
step 0   0 ─0→ 1 (+) 0..1   1 ─1→ 2 (+) 1..2   2 ─2→ 0 (+) 0,2
step 1   0 ─2→ 1 (+) 0..2   1 ─0→ 2 (+) 0..2   2 ─1→ 0 (+) 0..2
step 2   0 ─1→ 1     0..2   1 ─2→ 2     0..2   2 ─0→ 0     0..2
step 3   0 ─0→ 1     0..2   1 ─1→ 2     0..2   2 ─2→ 0     0..2"""


def drawn(path: Path) -> xml.etree.ElementTree.Element:
    return xml.etree.ElementTree.parse(path).getroot()


def arrows(root: xml.etree.ElementTree.Element) -> list[xml.etree.ElementTree.Element]:
    return [path for path in root.iter(f"{SVG}path") if path.get("class") == "message"]


def texts(root: xml.etree.ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("collective", "name"), REGISTRY)
def test_every_message_is_an_arrow_and_a_word(collective: str, name: str, tmp_path: Path) -> None:
    for size in (1, 2, 3, 4, 7):
        schedule = build(collective, name, size)
        sent = [key for step in schedule.steps for key in {(src, dst, add) for src, dst, _, _, add in step.rows()}]
        root = drawn(schedule.draw(tmp_path / "x.svg"))
        ends = [arrow.get("marker-end", "") for arrow in arrows(root)]
        assert len(ends) == len(sent)
        assert sum("#add-" in end for end in ends) == sum(add for _, _, add in sent)
        assert {end[5:-1] for end in ends} <= {marker.get("id") for marker in root.iter(f"{SVG}marker")}
        assert (root.findtext(f"{SVG}title") or "").startswith(f"{collective} {name}, {size} rank")
        words = [line for line in terminal(schedule).splitlines() if not line.startswith("s ")]
        assert "\n".join(words).count("→") == len(sent)


@pytest.mark.parametrize(
    ("collective", "name", "size"),
    [
        ("all_reduce", "ring", 4),
        ("all_reduce", "ring", 5),
        ("all_reduce", "halving_doubling", 8),
        ("all_reduce", "double_tree", 7),
        ("all_to_all", "bruck", 5),
        ("all_reduce", "hierarchical", 6),
    ],
)
def test_every_message_is_labelled_and_no_label_hides_another(
    collective: str, name: str, size: int, tmp_path: Path
) -> None:
    root = drawn(build(collective, name, size).draw(tmp_path / "x.svg"))
    pills = [rect for rect in root.findall(f"{SVG}rect") if rect.get("height") == "16"]
    assert len(pills) == len(arrows(root))
    boxes = [[float(pill.get(key, "")) for key in ("x", "y", "width", "height")] for pill in pills]
    for (x1, y1, w1, h1), (x2, y2, w2, h2) in itertools.combinations(boxes, 2):
        assert x1 + w1 <= x2 or x2 + w2 <= x1 or y1 + h1 <= y2 or y2 + h2 <= y1


def test_text_stays_inside_the_picture(tmp_path: Path) -> None:
    for collective, name, size, parameters in (
        ("barrier", "dissemination", 1, {}),
        ("all_to_all", "bruck", 2, {}),
        ("all_reduce", "hierarchical", 3, {"hosts": (2, 1), "inner": "direct", "outer": "direct"}),
    ):
        root = drawn(build(collective, name, size, **parameters).draw(tmp_path / "x.svg"))
        width = float(root.get("width", ""))
        for group in root.findall(f"{SVG}g"):
            left = float(group.get("transform", "").removeprefix("translate(").partition(",")[0])
            assert left + 42 + 6.5 * len(texts(group)[-1]) < width
        assert 24 + 6.5 * max(map(len, texts(root))) < width


def test_chunks_that_share_a_hue_differ_in_lightness(tmp_path: Path) -> None:
    root = drawn(build("all_gather", "ring", 20).draw(tmp_path / "x.svg"))
    assert len({arrow.get("stroke") for arrow in arrows(root)}) == 20


def test_a_packed_message_is_one_arrow_with_all_its_chunks(tmp_path: Path) -> None:
    root = drawn(build("all_to_all", "bruck", 5).draw(tmp_path / "x.svg"))
    assert {"0,2", "1,3", "2,4"} <= set(texts(root))


def test_names_are_escaped(tmp_path: Path) -> None:
    odd = dataclasses.replace(build("all_reduce", "ring", 2), algorithm="<b> & co", parameters=(("where", "<here>"),))
    root = drawn(odd.draw(tmp_path / "x.svg"))
    assert root.findtext(f"{SVG}title") == "all_reduce <b> & co, 2 ranks, 2 chunks, 2 steps, where <here>"
    assert "all_reduce <b> & co" in texts(root)


def test_the_ring_in_a_terminal() -> None:
    assert terminal(build("all_reduce", "ring", 3)) == RING


def test_a_step_reads_what_was_there_before_it() -> None:
    first = terminal(build("scan", "recursive_doubling", 3)).splitlines()[2]
    assert first == "step 0   0 ─0→ 1 (+) 0..1   1 ─0→ 2 (+) 1..2"


def test_a_terminal_is_80_columns_wide() -> None:
    for collective, name in REGISTRY:
        for size in (2, 5, 8):
            lines = terminal(build(collective, name, size)).splitlines()[1:]
            assert max(map(len, lines), default=0) <= 80, (collective, name, size)


def test_the_contract_is_described_in_words() -> None:
    assert describe_contract(build("reduce_scatter", "ring", 2)) == [
        ("starts", "every rank: chunks 0-1, its own data"),
        ("ends", "rank 0: chunk 0, the sum over ranks 0..1; rank 1: chunk 1, the sum over ranks 0..1"),
    ]
    assert describe_contract(build("all_gather", "ring", 3))[1] == (
        "ends",
        "every rank: chunks 0-2, data of ranks 0..2",
    )
    assert describe_contract(build("exclusive_scan", "recursive_doubling", 2))[1][1].startswith(
        "rank 0: nothing; rank 1: "
    )


def test_the_pictures_of_the_documentation_are_fresh(tmp_path: Path) -> None:
    for file, (collective, name, size) in {
        "ring.svg": ("all_reduce", "ring", 4),
        "halving_doubling.svg": ("all_reduce", "halving_doubling", 8),
        "binomial.svg": ("broadcast", "binomial", 7),
    }.items():
        again = build(collective, name, size).draw(tmp_path / file)
        assert again.read_text() == (PICTURES / file).read_text(), f"draw {file} again"


def test_a_picture_of_too_many_ranks_or_steps_is_refused(tmp_path: Path) -> None:
    room = "a picture shows at most 32 ranks and 64 steps; build it for fewer ranks"
    with pytest.raises(ValueError, match=f"33 ranks and 6 steps; {room}"):
        build("broadcast", "binomial", 33).draw(tmp_path / "x.svg")
    long = dataclasses.replace(build("all_reduce", "ring", 2), steps=Steps(lambda: iter([Step(0, 1, 0)] * 65)))
    for picture in (long.draw, lambda _: terminal(long)):
        with pytest.raises(ValueError, match=f"2 ranks and 65 steps; {room}"):
            picture(tmp_path / "x.svg")
    assert not (tmp_path / "x.svg").exists()


def test_tables_hold_every_algorithm() -> None:
    for table in (markdown_table(), text_table()):
        for collective, name in REGISTRY:
            assert any(collective in line and name in line for line in table.splitlines()), (collective, name)
    assert {len(line.split("|")) for line in markdown_table().splitlines()} == {8}
    for table in (markdown_table("all_reduce"), text_table("all_reduce")):
        assert "ring" in table
        assert "broadcast" not in table


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


def test_an_animation_has_the_steps_one_after_the_other(tmp_path: Path) -> None:
    ring = build("all_reduce", "ring", 4)
    still, moving = drawn(ring.draw(tmp_path / "still.svg")), drawn(ring.draw(tmp_path / "moving.svg", animate=True))
    assert [each.attrib for each in arrows(still)] == [each.attrib for each in arrows(moving)]
    groups = [group for group in moving.iter(f"{SVG}g") if group.get("class", "").startswith("step-")]
    assert [len(arrows(group)) for group in groups] == [len(messages(step)) for step in ring.steps]
    (style,) = moving.iter(f"{SVG}style")
    begins = re.findall(r"@keyframes step-\d+ \{ 0%, ([\d.]+)%", style.text or "")
    assert [round(float(each) * 8 / 100) for each in begins] == [0, 1, 2, 3, 4, 5]
    assert not list(still.iter(f"{SVG}style"))


def test_the_picture_of_a_graph_has_each_link_as_wide_as_it_works_long(tmp_path: Path) -> None:
    graph = Graph.hosts([2, 2], bandwidths=[1e9, 0.25e9])
    root = drawn(build("all_gather", "direct", 4).draw(tmp_path / "x.svg", topology=graph))
    lines = [path for path in root.iter(f"{SVG}path") if path.get("class") == "link"]
    widths = {
        (line.findtext(f"{SVG}title") or "").partition(",")[0]: float(line.get("stroke-width", 0)) for line in lines
    }
    assert len(lines) == len(graph.links) == len(widths)
    assert widths["host 1 → network"] == widths["network → host 1"] == max(widths.values()) == 6
    assert widths["host 0 → network"] == pytest.approx(1 + 5 / 4)
    assert {*texts(root)} >= {"0", "3", "host 1", "network"}
    with pytest.raises(ValueError, match="65 ranks; a picture shows at most 64"):
        build("all_gather", "direct", 65).draw(tmp_path / "x.svg", topology=Graph.ring(65))
