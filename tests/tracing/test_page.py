"""The page of a trace in a browser: its figures are those of the analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from browser import chromium, opened

import dist_prims
from dist_prims.cli import main
from dist_prims.schedules.html.document import write_html
from dist_prims.tracing import page
from dist_prims.tracing.analysis import analyse
from dist_prims.tracing.page import trace_page
from dist_prims.tracing.reader import read


def two_calls(folder: str) -> None:
    with dist_prims.trace(folder):
        dist.all_reduce(torch.ones(5000))
        dist_prims.all_reduce(torch.ones(6000), algorithm="ring")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    dist_prims.spawn(two_calls, 3, (str(folder),), backend="dist_prims", timeout=60)
    return folder


def test_the_figures_are_those_of_the_analysis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "run.html"
    assert main(["trace", "page", str(folder), "-o", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    found = analyse(read(folder))
    with chromium() as browser, opened(browser, path) as tab:
        assert tab.inner_text("h1") == "trace of 3 ranks, 2 collectives"
        for number, call in enumerate(found["calls"]):
            name = call["algorithm"] or "through shared memory"
            text: Any = tab.inner_text(".proof")
            assert text.startswith(f"{call['collective']} {name}, ")
            assert f"Rank {call['last_to_come']} came last" in text
            assert tab.locator("svg .rank").all_text_contents() == ["rank 0", "rank 1", "rank 2"]
            assert tab.locator(".critical").count() == len(call["critical_path"])
            lanes = trace_page(read(folder)).data["calls"][number]["lanes"]
            assert tab.locator(".event").count() == sum(len(lane["events"]) for lane in lanes) > 0
            steps = tab.locator("section[aria-label='Steps of this call'] tbody tr")
            assert steps.count() == len(call["steps"])
            tab.keyboard.press("ArrowRight")
        assert [len(call["steps"]) for call in found["calls"]] == [0, 4]
        rows = tab.locator("section[aria-label^='Where the time went'] table >> nth=0").locator("tbody tr")
        for row, rank in zip(rows.all(), found["ranks"], strict=True):
            cells = row.locator("td").all_inner_texts()
            assert [cells[0], cells[1], cells[-1]] == [str(rank[key]) for key in ("rank", "calls", "last_to_come")]


def test_a_page_has_the_first_collectives_of_a_long_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_EVENTS", 3)
    data = trace_page(read(folder)).data
    assert (len(data["calls"]), data["all"]) == (1, 2)


def test_a_trace_without_a_collective(tmp_path: Path) -> None:
    with dist_prims.trace(tmp_path):
        pass
    path = write_html(trace_page(read(tmp_path)), tmp_path / "run.html")
    with chromium() as browser, opened(browser, path) as tab:
        assert "The trace has no collective." in tab.inner_text("main")
