"""The pages of docs/: programs that run, terms that exist, variables that are documented, links that lead to a file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import run_forked

from dist_prims.schedules.catalogue import markdown_table
from dist_prims.schedules.pipelines import markdown_table as pipeline_table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A program, the command that starts it, and what it prints.
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:\n```sh\n[^`]*```\n)?(?:\n```text\n([^`]*)```)?", re.DOTALL)
FOUND = {
    f"{page.stem} {number}": blocks
    for page in PAGES
    if page.stem != "frameworks"  # quotes of programs, which tests/integration/test_frameworks.py runs
    for number, blocks in enumerate(BLOCKS.findall(page.read_text()))
}
PROGRAMS = {name: program for name, (program, _) in FOUND.items()}
# Pages whose sections have an example each; of their programs the default tier runs some.
PATTERNS = ("data_parallel", "split_models", "several_models", "repair")
OF_PATTERNS = [name for name in PROGRAMS if name.startswith(PATTERNS)]
OUTPUTS = {name: output for name, (_, output) in FOUND.items() if output}
SEVERAL_RANKS = [name for name, text in PROGRAMS.items() if "dist_prims.init(" in text]
SOURCES = [
    path
    for folder, suffixes in {"dist_prims": "py", "csrc": "h cpp", "launch_scripts": "sh", ".": "py"}.items()
    for suffix in suffixes.split()
    for path in (ROOT.glob("setup.py") if folder == "." else (ROOT / folder).rglob(f"*.{suffix}"))
]


@pytest.fixture
def program(name: str, tmp_path: Path) -> Path:
    """The program, beside the examples from which it imports."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name])
    for example in re.findall(r"# (examples/\w+\.py)\n", PROGRAMS[name]):
        shutil.copy(ROOT / example, tmp_path)
    return path


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OF_PATTERNS])
def test_programs_run(name: str, program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A program for any number of ranks on 3; below, in the slow tier, also alone. The page has what it prints."""
    run_forked(program, ranks=3 if name in SEVERAL_RANKS else 1)
    if name in OUTPUTS:
        assert sorted(capfd.readouterr().out.splitlines()) == sorted(OUTPUTS[name].splitlines())


def test_readme_and_guide_show_what_their_programs_print() -> None:
    assert {name for name in PROGRAMS if name.startswith(("README", "guide"))} <= OUTPUTS.keys()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OF_PATTERNS)
def test_programs_run_of_patterns(name: str, program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    test_programs_run(name, program, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_RANKS[:1])
def test_a_program_runs_under_torchrun(program: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "program.py"]
    done = subprocess.run(torchrun, cwd=program.parent, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_in_a_fresh_interpreter(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=program.parent, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_table_of_algorithms_is_current() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    table = page.partition("<!-- algorithms -->\n")[2].partition("<!-- /algorithms -->")[0]
    assert table.strip() == markdown_table().strip(), "paste what `python -m dist_prims algorithms --markdown` prints"
    count = len(table.strip().splitlines()) - 2
    assert f"the {count} registered algorithms" in (ROOT / "README.md").read_text()


def test_the_table_of_pipelines_is_current() -> None:
    page = (ROOT / "docs/split_models.md").read_text()
    table = page.partition("<!-- pipelines -->\n")[2].partition("<!-- /pipelines -->")[0]
    assert table.strip() == pipeline_table().strip(), "paste what `python -m dist_prims pipeline` prints"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_a_file_and_a_heading() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", page.read_text()):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(to), f"{page.name} links to {target}#{anchor}"


def test_users_have_at_most_25_pages() -> None:
    """Beside docs/design, which explains the inside. A new text becomes a section of a page."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent != ROOT / "docs/design"]
    assert len(pages) <= 25, [page.name for page in pages]


def test_every_page_is_linked_from_a_page_of_the_first_level() -> None:
    linked = "".join((ROOT / name).read_text() for name in ("README.md", "docs/guide.md", "docs/architecture.md"))
    linked += (ROOT / "docs/course/index.md").read_text().replace("](", "](course/")
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "guide.md":
            assert str(page.relative_to(ROOT / "docs")) in linked, f"no link leads to {page}"


def test_every_environment_variable_is_documented() -> None:
    page = set(re.findall(r"DIST_PRIMS_[A-Z_]+[A-Z]", (ROOT / "docs/installation.md").read_text()))
    texts = {path: path.read_text() for path in SOURCES}
    named = {name for text in texts.values() for name in re.findall(r"[\"'`{](DIST_PRIMS_[A-Z_]+[A-Z])", text)}
    macros = {
        name
        for path, text in texts.items()
        if "csrc" in path.parts
        for name in re.findall(r"[\s(](DIST_PRIMS_[A-Z_]+[A-Z])", text)
    }
    read = named - macros
    assert {"DIST_PRIMS_DUMP", "DIST_PRIMS_MPICC"} <= read
    assert sorted(read - page) == []


def test_every_name_of_the_glossary_exists() -> None:
    lines = (ROOT / "docs/design/glossary.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    assert len(rows) > 30
    python = "\n".join(path.read_text() for path in SOURCES if path.suffix == ".py")
    cpp = "\n".join(path.read_text() for path in SOURCES if path.suffix in (".h", ".cpp"))
    for term, _, in_python, in_cpp in rows:
        for names, text in ((in_python, python), (in_cpp, cpp)):
            for name in re.findall("`(.*?)`", names):
                if "/" in name or name.endswith(".py"):
                    assert (ROOT / "dist_prims" / name).exists(), f"{term}: there is no {name}"
                else:
                    last = re.split(r"\W+", name.partition("(")[0])[-1]
                    assert re.search(rf"\b{last}\b", text), f"{term}: no {name} in the sources"
