"""Interactive pages in a browser: stepping, every chunk against ``simulate``, sliders against ``cost``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium, opened

from dist_prims.schedules import COLLECTIVES, Schedule, Step, algorithm, algorithms, build, unregister
from dist_prims.schedules.html.document import in_notebook
from dist_prims.schedules.html.schedule_data import schedule_page
from dist_prims.schedules.pipelines import pipeline_plan, pipeline_plans
from dist_prims.schedules.simulate import states


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def position(tab: Any) -> str:
    return tab.inner_text("output.position")


def shown(tab: Any) -> dict[str, str]:
    """What the page says of every chunk: name -> content."""
    names = tab.eval_on_selector_all("[role=gridcell]", "cells => cells.map(cell => cell.getAttribute('aria-label'))")
    return dict(name.split(": ", 1) for name in names)


SLIDE = """values => Object.entries(values).forEach(([name, value]) => {
    const input = document.getElementById(name);
    input.value = value;
    input.dispatchEvent(new Event("input"));
})"""


def slide(tab: Any, **values: float) -> None:
    tab.evaluate(SLIDE, values)


def ranks_in(content: str) -> set[int]:
    """The ranks of a content such as "r0-r2, r4"."""
    runs = [] if content == "nothing" else content.split(", ")
    ends = [[int(end[1:]) for end in run.split("-")] for run in runs]
    return {rank for run in ends for rank in range(run[0], run[-1] + 1)}


def expected(schedule: Schedule) -> Iterator[dict[tuple[int, int], set[int]]]:
    """For the start and after each step, the ranks whose data every chunk contains, by ``simulate``."""
    counts = [len(schedule.contract.start(rank).chunk) for rank in range(schedule.size)]
    inputs = [[np.array(1 << rank, object)] * count for rank, count in enumerate(counts)]
    yield {(rank, int(chunk)): {rank} for rank in range(schedule.size) for chunk in schedule.contract.start(rank).chunk}
    for _, held in states(schedule, inputs, lambda a, b: np.array(int(a) | int(b), object)):
        yield {
            (rank, chunk): {each for each in range(schedule.size) if int(value) >> each & 1}
            for rank, chunks in enumerate(held)
            for chunk, value in chunks.items()
        }


# Goes through all positions and returns what the page says at each: the position, the chunks, the state of the proof.
ALL_POSITIONS = """() => {
    const [slider, cells] = [document.querySelector("#position"), [...document.querySelectorAll("[role=gridcell]")]];
    return Array.from({ length: Number(slider.max) + 1 }, (_, at) => {
        slider.value = at;
        slider.dispatchEvent(new Event("input"));
        const text = (name) => document.querySelector(name).textContent;
        return [text("output.position"), cells.map((cell) => cell.getAttribute("aria-label")), text(".proof")];
    });
}"""


# What the page says that the chunks of the given ranks are, as expressions.
EXPRESSIONS = """([ranks, chunks]) => {
    const [rank, chunk] = ["rank", "chunk"].map((name) => document.querySelector(`#chosen-${name}`));
    return ranks.flatMap((r) => Array.from({ length: chunks }, (_, c) => {
        [rank.value, chunk.value] = [r, c];
        chunk.dispatchEvent(new Event("change"));
        return document.querySelector(".expression").textContent;
    }));
}"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_chunks_are_those_of_simulate_and_expressions_those_of_order(
    browser: Any, tmp_path: Path, collective: str
) -> None:
    """Of each algorithm for 5 ranks, and of one for fewer."""
    path, names = tmp_path / "page.html", algorithms(collective)
    with opened(browser, build(collective, names[0], 2).html(path)) as tab:
        for name, size in [*((name, 5) for name in names), *((names[0], size) for size in (1, 2))]:
            schedule = build(collective, name, size)
            tab.goto(schedule.html(path).as_uri())
            positions = tab.evaluate(ALL_POSITIONS)
            labels = schedule_page(schedule).data["labels"]
            for number, ((said, cells, _), held) in enumerate(zip(positions, expected(schedule), strict=True)):
                assert said == (f"step {number - 1}" if number else "start")
                content = dict(cell.split(": ", 1) for cell in cells)
                for rank, (chunk, label) in itertools.product(range(size), enumerate(labels)):
                    said = content[f"rank {rank}, {label}"]
                    want = held.get((rank, chunk), set())
                    if collective == "all_to_all":  # "2→0": the block of rank 2 for rank 0
                        assert said.partition("→")[0] == (str(*want) if want else "nothing")
                    else:
                        assert ranks_in(said) == want, (name, size, number, rank, label)
            assert positions[-1][2].startswith("Proved: ")
            if collective == "all_reduce":
                ranks = [0, size - 1]
                orders = [str(schedule.order(chunk, rank)) for rank in ranks for chunk in range(schedule.chunks)]
                assert tab.evaluate(EXPRESSIONS, [ranks, schedule.chunks]) == orders, (name, size)


@pytest.mark.slow
def test_keys_and_buttons_move_between_steps(browser: Any, tmp_path: Path) -> None:
    with opened(browser, build("all_reduce", "ring", 5).html(tmp_path / "ring.html"), "#step=3") as tab:
        assert position(tab) == "step 3"
        for press, now in [
            ("ArrowRight", "4"),
            ("ArrowLeft", "3"),
            ("End", "7"),
            ("ArrowRight", "7"),
            ("ArrowLeft", "6"),
        ]:
            tab.keyboard.press(press)
            assert (position(tab), tab.evaluate("location.hash")) == (f"step {now}", f"#step={now}")
        tab.keyboard.press("Home")
        assert position(tab) == "start"
        for button, now in [("Forward", "step 0"), ("Last", "step 7"), ("Back", "step 6"), ("First", "start")]:
            tab.click(f"button:text-is('{button}')")
            assert position(tab) == now
        slide(tab, position=3)
        assert position(tab) == "step 2"
        tab.evaluate("location.hash = '#step=5'")
        tab.wait_for_function("document.querySelector('output.position').textContent === 'step 5'")
        tab.click("button:text-is('Play')")
        tab.wait_for_function("document.querySelector('output.position').textContent === 'step 7'")
        tab.wait_for_selector("button:text-is('Play')")  # no longer Pause
        tab.keyboard.press("Space")  # the button has the focus: plays from the start
        tab.wait_for_selector("button:text-is('Pause')")
        tab.keyboard.press("Space")
        tab.wait_for_selector("button:text-is('Play')")


def test_one_chunk_with_the_keyboard_alone(browser: Any, tmp_path: Path) -> None:
    """The expression of a chunk, and the path that its data took."""
    ring = build("all_reduce", "ring", 4)
    with opened(browser, ring.html(tmp_path / "ring.html"), "#step=5") as tab:
        while tab.evaluate("document.activeElement.getAttribute('role')") != "gridcell":
            tab.keyboard.press("Tab")
        for press in ("ArrowDown", "ArrowRight", "ArrowRight"):
            tab.keyboard.press(press)
        assert position(tab) == "step 5"  # in the picture arrow keys choose a chunk
        assert tab.input_value("#chosen-rank") == "1"
        assert tab.input_value("#chosen-chunk") == "2"
        assert tab.inner_text(".expression") == str(ring.order(2, 1))
        steps = tab.locator(".chunk li").all_inner_texts()
        assert steps == [
            "step 0: rank 2 → rank 3: chunk 2, added",
            "step 1: rank 3 → rank 0: chunk 2, added",
            "step 2: rank 0 → rank 1: chunk 2, added",
        ]
        tab.hover("[role=gridcell][aria-label^='rank 3, chunk 0']")
        assert tab.inner_text(".expression") == str(ring.order(0, 3))


SECONDS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(text: str) -> float:
    number, unit = text.rstrip(".").split()
    return float(number) * SECONDS[unit]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("collective", "name"), [("all_reduce", "ring"), ("all_gather", "bruck"), ("barrier", "dissemination")]
)
def test_sliders_give_the_cost_of_the_model(browser: Any, tmp_path: Path, collective: str, name: str) -> None:
    schedule = build(collective, name, 6)
    with opened(browser, schedule.html(tmp_path / "page.html")) as tab:
        for nbytes, latency, bandwidth, reduction in [(2, -5, 9, 10), (20, -6, 10.5, 9), (30, -3, 12, 8)]:
            slide(tab, nbytes=nbytes, latency=latency, bandwidth=bandwidth, reduction=reduction)
            given = (2.0**nbytes, 10.0**latency, 8 / 10.0**bandwidth, 1 / 10.0**reduction)
            verdict = tab.inner_text(".verdict")
            total = re.search(r"takes ([\d.]+ \S?s)", verdict)
            assert total, verdict
            assert seconds(total[1]) == pytest.approx(schedule.cost(*given), rel=6e-3)
            bound = re.search(r"lower bound of ([\d.]+ \S?s)", verdict)
            assert bound, verdict
            assert seconds(bound[1]) == pytest.approx(schedule.lower_bound(*given), rel=6e-3)
            every = {each: build(collective, each, 6).cost(*given) for each in algorithms(collective)}
            fastest = re.search(r"fastest algorithm here is (\w+)", verdict)
            best = min(every.values())
            assert every[fastest[1] if fastest else name] == pytest.approx(best)
            terms = tab.locator(".verdict ~ .scroll td:nth-child(3)").all_inner_texts()
            assert sum(map(seconds, terms)) == pytest.approx(schedule.cost(*given), rel=2e-2)


def test_charts_have_every_algorithm_at_its_cost(browser: Any, tmp_path: Path) -> None:
    with opened(browser, build("all_reduce", "ring", 6).html(tmp_path / "page.html")) as tab:
        slide(tab, nbytes=16)
        tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        of_bytes, of_ranks = tab.locator("figure table").all()
        head = of_ranks.locator("th").all_inner_texts()
        assert head == ["ranks", *algorithms("all_reduce"), "lower bound"]
        assert of_bytes.locator("th").all_inner_texts()[1:] == head[1:]
        for row in of_ranks.locator("tbody tr").all():
            size, *times = row.locator("td").all_inner_texts()
            for name, said in zip(head[1:-1], times, strict=False):
                cost = build("all_reduce", name, int(size)).cost(2**16, 1e-5, 8e-10, 1e-10)
                assert seconds(said) == pytest.approx(cost, rel=6e-3), (name, size)


@pytest.fixture
def wrong() -> Iterator[Schedule]:
    @algorithm("all_reduce", name="wrong")
    def one_step_more(size: int) -> Iterator[Step]:
        rank = np.arange(size)
        for step in range(size):
            yield Step(src=rank, dst=(rank + 1) % size, chunk=(rank - step) % size, reduce=True)

    yield build("all_reduce", "wrong", 4)
    unregister("all_reduce", "wrong")


def test_a_wrong_schedule_opens_at_its_first_wrong_step(browser: Any, tmp_path: Path, wrong: Schedule) -> None:
    with opened(browser, wrong.html(tmp_path / "page.html")) as tab:
        assert position(tab) == "step 3"
        assert "adds r1 to chunk 1 of rank 1, which already contains it" in tab.inner_text(".error")
        assert shown(tab)["rank 1, chunk 1"] == "r1 twice"
        assert tab.locator(".cell.wrong").count() == 1
        assert tab.locator(".arrow.wrong").count() == 1
        tab.keyboard.press("ArrowLeft")
        assert tab.locator(".cell.wrong").count() == 0


def test_missing_contributions_are_marked_at_the_end(browser: Any, tmp_path: Path) -> None:
    @algorithm("broadcast", name="forgets", chunks=1)
    def forgets_the_last(size: int, root: int) -> Iterator[Step]:
        for rank in range(1, size - 1):
            yield Step(src=root, dst=rank, chunk=0)

    try:
        with opened(browser, build("broadcast", "forgets", 4).html(tmp_path / "page.html")) as tab:
            assert position(tab) == "step 1"
            assert shown(tab)["rank 3, chunk 0"] == "without r0"
    finally:
        unregister("broadcast", "forgets")


@pytest.mark.parametrize("far", [-1, 2**40, 2**62])
@pytest.mark.parametrize("name", ["src", "dst", "chunk", "into"])
def test_a_step_that_names_no_rank_or_chunk_has_a_page_and_a_picture(tmp_path: Path, name: str, far: int) -> None:
    """The prices of the page were once computed from ranks that do not exist: an error in place of the page."""

    @algorithm("all_reduce", name="far")
    def far_away(size: int) -> Iterator[Step]:
        rank = np.arange(size)
        if size == 5:
            raise KeyError(size)  # the page compares prices for other numbers of ranks
        arrays: dict[str, Any] = {
            "src": rank,
            "dst": rank,
            "chunk": rank,
            "reduce": False,
            "into": rank,
            name: rank + far,
        }
        yield Step(**arrays)

    try:
        schedule = build("all_reduce", "far", 3)
        assert f"step 0, row 0: {name}={far} is out of range" in schedule.html(tmp_path / "page.html").read_text()
        assert schedule.draw(tmp_path / "page.svg").stat().st_size
    finally:
        unregister("all_reduce", "far")


def test_many_ranks_are_summarized(browser: Any, tmp_path: Path) -> None:
    path = build("all_reduce", "ring", 64).html(tmp_path / "page.html")
    with opened(browser, path, "#step=62") as tab:
        assert "a row stands for 2 ranks and a column stands for 2 chunks" in tab.inner_text(".key")
        assert tab.locator("[role=gridcell]").count() == 32 * 32
        tab.keyboard.press("End")
        assert "4096 of 4096 output chunks complete" in tab.inner_text(".proof")
        assert tab.locator(".cell.complete").count() == 32 * 32


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    ring = build("all_reduce", "ring", 8).html(tmp_path / "ring.html")
    zbv = pipeline_plan("zbv", 4, 8).html(tmp_path / "zbv.html")
    with opened(browser, ring, viewport={"width": width, "height": 800}, color_scheme=scheme) as tab:
        for path in (ring, zbv):
            tab.emulate_media(media="screen")
            tab.goto(path.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            tab.emulate_media(media="print")
            assert not tab.is_visible("button")
            unnamed = (
                "inputs => inputs.filter(input => !input.labels.length && !input.ariaLabel).map(input => input.id)"
            )
            assert tab.eval_on_selector_all("input", unnamed) == []


def test_a_page_is_small() -> None:
    assert len(schedule_page(build("all_reduce", "ring", 8)).text()) < 300_000


def test_a_page_that_would_be_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 999,000 transfers; .* build it for fewer ranks"):
        build("all_gather", "ring", 1000).html(tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"name it ring\.html"):
        build("all_gather", "ring", 3).html(tmp_path / "ring.svg")
    assert build("all_gather", "ring", 1000)._repr_html_() is None


def test_each_page_in_a_notebook_has_a_frame_of_its_own(browser: Any, tmp_path: Path) -> None:
    """Two schedules in one document: each is in a frame of its own."""
    ring, plan = build("all_reduce", "ring", 3), pipeline_plan("1f1b", 2, 3)
    assert ring._repr_html_() == in_notebook(schedule_page(ring))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>n</title>{ring._repr_html_()}{plan._repr_html_()}", encoding="utf-8")
    with opened(browser, notebook) as tab:
        first, second = (tab.frame_locator(f"iframe >> nth={at}") for at in (0, 1))
        first.locator("button:text-is('Forward')").click()
        assert first.locator("output.position").inner_text() == "step 0"
        assert second.locator("h1").inner_text() == "pipeline 1f1b, 2 ranks, 2 stages, 3 micro-batches"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", pipeline_plans())
def test_a_pipeline_has_the_times_of_its_cost(browser: Any, tmp_path: Path, name: str) -> None:
    with opened(browser, pipeline_plan(name, 3, 4).html(tmp_path / "page.html")) as tab:
        counts = [*range(1, 17)]
        for micro, times in [(4, (1, 1, 1, 0)), (4, (0.5, 2, 1.5, 0.25)), (7, (1, 1, 2, 1)), (16, (2, 1, 0, 0))]:
            names = ("microbatches", "F", "B", "W", "transfer")
            slide(tab, **dict(zip(names, (counts.index(micro), *times), strict=True)))
            plan = pipeline_plan(name, 3, micro)
            cost = plan.cost(*times)
            said = re.search(
                r"takes (\S+) time units; the ranks are idle for (\S+) %.*holds at most (\d+) .*last rank (\d+)",
                tab.inner_text(".proof"),
            )
            assert said
            assert float(said[1]) == pytest.approx(cost.makespan, rel=6e-3)
            assert float(said[2]) == pytest.approx(100 * cost.bubble, abs=0.06)
            assert (int(said[3]), int(said[4])) == (plan.peak(0), plan.peak(2))
            times_shown = tab.eval_on_selector_all(
                ".action title",
                "titles => titles.map(title => title.textContent.split(': ')[1].split(' to ').map(Number))",
            )
            want = sorted((row.begin, row.end) for row in cost.rows)
            assert np.array(sorted(times_shown)) == pytest.approx(np.array(want), rel=6e-3)


def test_a_pipeline_steps_through_its_events(browser: Any, tmp_path: Path) -> None:
    plan = pipeline_plan("1f1b", 2, 2)
    with opened(browser, plan.html(tmp_path / "page.html"), "#event=0") as tab:
        assert tab.inner_text(".events") == "Time 0. rank 0: forward, stage 0, micro-batch 0."
        tab.keyboard.press("ArrowRight")
        assert "rank 0: forward, stage 0, micro-batch 1; rank 1: forward, stage 1, micro-batch 0" in tab.inner_text(
            ".events"
        )
        assert tab.locator(".action.done").count() == 1
        assert tab.locator(".action.running").count() == 2
        tab.keyboard.press("End")
        assert tab.locator(".action.done").count() == sum(map(len, plan.actions))
