"""The documentation site builds without a warning, needs no network, and describes every public name."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from generated_pages import PublicName, public_names  # noqa: E402 - after its path is known

NAMES = public_names()
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
REQUIRED = ["guide", "data_parallel", "split_models", "several_models", "repair", "multi_host", "algorithms"]
REQUIRED += ["architecture", "design/schedules", "design/shared_memory", "design/multi_host", "design/training"]
REQUIRED += ["tracing", "design/tracing", "design/glossary", "course/index", "course/03_ring_all_reduce"]
REQUIRED += ["benchmarks/README", "frameworks"]


def built(build: Path) -> Path:
    """The site, built by the script of users; a warning is an error."""
    command = ["launch_scripts/docs.sh", str(build)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return build / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all workers of pytest, with what the cells of the lessons print."""
    if (run := os.environ.get("PYTEST_XDIST_TESTRUNUID")) is None:
        return built(tmp_path_factory.mktemp("build"))
    build = tmp_path_factory.getbasetemp().parent / f"site-{run}"
    with FileLock(f"{build}.lock", timeout=800):
        return build / "site" if (build / "site").exists() else built(build)


class References(HTMLParser):
    """What a page loads, and the targets of its links."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


def inventory(site: Path) -> set[str]:
    """The names of Python objects that the site describes, from Sphinx's objects.inv."""
    data = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(data).decode().splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


def examples(name: PublicName) -> Iterator[doctest.Example]:
    """The examples on a name's page in the reference: of the object, its methods and its module."""
    value = name.value
    documented: list[Any] = [importlib.import_module(name.module), importlib.import_module(name.home)]
    if name.kind != "data":
        documented.append(value)
    if inspect.isclass(value):
        documented += [each for key, each in vars(value).items() if not key.startswith("_")]
    for each in documented:
        text = each.__doc__ if isinstance(each.__doc__, str) else ""
        yield from doctest.DocTestParser().get_examples(text)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module}.{name.name}")
def test_every_public_name_has_an_example(name: PublicName) -> None:
    """An example that names it. test_style.py runs the examples."""
    found = [each for each in examples(name) if not each.options.get(doctest.SKIP)]
    assert any(re.search(rf"\b{name.name}\b", each.source + each.want) for each in found)
    assert name.kind == "data" or name.summary


def test_names_of_several_modules_are_described_once() -> None:
    homes = {(name.home, name.name) for name in NAMES}
    assert ("dist_prims", "GradientAverager") in homes
    assert ("dist_prims.training.gradients", "GradientAverager") not in homes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_page_and_every_public_name_is_in_the_site(site: Path) -> None:
    for page in REQUIRED:
        assert (site / "docs" / f"{page}.html").exists(), page
    missing = {f"{name.module}.{name.name}" for name in NAMES} - inventory(site)
    assert not missing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_needs_no_network(site: Path) -> None:
    pages = {path: References(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        external = [url for url in page.loaded if re.match(r"(https?:)?//", url)]
        assert not external, f"{path.name} loads {external}"
        for target in page.links:
            file, _, anchor = target.partition("#")
            if not re.match(r"\w+:", target) and not file.endswith((".md", ".rst")):
                to = (path.parent / file).resolve() if file else path
                assert to.exists(), f"{path.name} links to {target}"
                assert not anchor or to not in pages or anchor in pages[to].anchors, f"{path.name} links to {target}"
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        assert not re.search(r"url\([\"']?(https?:)?//|@import|import\([\"']https?:", path.read_text()), path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_finds_words_of_all_parts(site: Path) -> None:
    """Sphinx's search reads a script beside the pages, so it works on files without a server. Words are stemmed."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    for word in ("ring", "bucket", "schedul"):
        assert word in index["terms"], word
    assert {"docs/guide", "api/dist_prims", "CONTRIBUTING"} <= set(index["docnames"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_course_shows_what_its_cells_print(site: Path) -> None:
    page = (site / "docs/course/03_ring_all_reduce.html").read_text()
    assert "2 ranks: 2 steps, a rank sends 1.0 of its data" in page
    assert page.count("<iframe") == 1
    assert "It cannot be repaired after step 0" in page
