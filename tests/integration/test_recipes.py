"""The recipes check themselves; here they run on several ranks, and their pages show what happens."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import dist_prims
from dist_prims.recipes import names, summary
from dist_prims.recipes.__main__ import run_recipes

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "patterns").glob("*.md"))}
PROGRAMS = [
    pytest.param(program, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, program in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]


def command(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dist_prims.recipes", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("name", names())
def test_a_recipe_holds_on_two_ranks(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    results = dist_prims.spawn(run_recipes, 2, ([name],), backend="dist_prims", timeout=120)
    assert results == [0, 0], capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "3"])
def test_all_recipes_by_the_command(ranks: str) -> None:
    done = command("all", "--ranks", ranks, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    assert re.search(r"All \d+ checks held", done.stdout)


@pytest.mark.slow
def test_all_recipes_under_mpirun() -> None:
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python; pip install mpich mpi4py")
    line = [str(mpirun), "-n", "2", sys.executable, "-m", "dist_prims.recipes", "all"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout


def test_the_command_lists_them() -> None:
    done = command()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == names()


def test_a_name_that_is_none() -> None:
    done = command("ring_atention")
    assert done.returncode == 2
    assert "unknown recipe 'ring_atention'; known: " in done.stderr
    assert "ring_attention" in done.stderr


def test_a_check_that_fails_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_prims.recipes.__main__.recipe", lambda _: lambda console: console.check(False, "never"))
    assert dist_prims.spawn(run_recipes, 2, ([names()[0]],), timeout=60) == [1, 1]


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_short_and_says_what_it_shows(name: str) -> None:
    assert len((ROOT / "dist_prims" / "recipes" / f"{name}.py").read_text().splitlines()) < 120
    assert 20 < len(summary(name)) <= 100
    assert any(f"dist_prims.recipes {name}" in text for text in PAGES.values()), f"no page in docs/patterns on {name}"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_one_picture_and_is_linked(name: str) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", PAGES[name])
    assert len(pictures) == 1, pictures
    picture = (ROOT / "docs" / "patterns" / pictures[0]).resolve()
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert f"patterns/{name}.md" in (ROOT / "docs/guide.md").read_text()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_page_runs(program: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(program, "program.py", "exec")
    dist_prims.spawn(lambda: exec(code, {"__name__": "__main__"}), ranks, init=False, timeout=120)
