"""The lessons of the course: their form, what they import and refer to, and that they run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import clean

from dist_prims.cli import main
from dist_prims.learn import course
from dist_prims.learn.exercises import ORDER, exercise

PAGES = course.files()
each_lesson = pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])


def code(path: Path) -> str:
    return "\n".join(part.text for part in course.split(path.read_text()) if part.is_code)


def test_a_part_of_a_lesson_knows_the_line_on_which_it_begins() -> None:
    """The text after a cell had the number of the line that ends the cell."""
    lines = PAGES[0].read_text().split("\n")
    for part in course.split(PAGES[0].read_text()):
        assert lines[part.line - 1] == part.text.split("\n")[0]


def test_a_cell_without_statements_shows_nothing(tmp_path: Path) -> None:
    """An empty cell, and one of comments, ended in an IndexError."""
    lesson = tmp_path / "lesson.md"
    lesson.write_text("```{code-cell}\n```\n\n```{code-cell}\n# only a comment\n```\n\n```{code-cell}\n1 + 1\n```\n")
    run = [sys.executable, "-m", "dist_prims.learn.course", str(lesson), str(tmp_path / "output.json")]
    subprocess.run(run, check=True, timeout=60)
    assert [cell["text"] for cell in json.loads((tmp_path / "output.json").read_text())] == ["", "", "2"]


def test_the_course_has_ten_pages_in_order() -> None:
    titles = [course.split(path.read_text())[0].text.split("\n")[0] for path in PAGES]
    assert [int(path.stem[:2]) for path in PAGES] == list(range(1, 11))
    assert [int(re.match(r"# (\d+)\. ", title)[1]) for title in titles] == list(range(1, 11))


def test_every_exercise_belongs_to_a_lesson() -> None:
    text = "".join(path.read_text() for path in [*PAGES, PAGES[0].parent / "index.md"])
    named = {int(number) for number in re.findall(r"\b[Ee]xercise (\d+)", text)}
    assert named == set(range(1, len(ORDER) + 1))


@each_lesson
def test_a_lesson_names_exercises_by_their_titles(path: Path) -> None:
    text = re.sub(r"\s+", " ", path.read_text())
    found = re.findall(r"\b[Ee]xercise (\d+), ", text)
    assert found
    for number in found:
        assert re.search(rf"\b[Ee]xercise {number}, {re.escape(exercise(int(number)).title)}", text), number


@each_lesson
def test_a_lesson_imports_public_names(path: Path) -> None:
    for node in ast.walk(ast.parse(code(path))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dist_prims"):
            public = importlib.import_module(str(node.module)).__all__
            assert {alias.name for alias in node.names} <= {*public}


@each_lesson
def test_a_lesson_states_facts_that_its_cells_check(path: Path) -> None:
    asserts = [node for node in ast.walk(ast.parse(code(path))) if isinstance(node, ast.Assert)]
    assert len(asserts) >= 5
    text = path.read_text()
    assert "**Predict:**" in text
    assert "## Summary" in text


def test_every_page_is_written_as_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "course", str(tmp_path / "course")]) == 0
    made = sorted((tmp_path / "course").iterdir())
    assert [path.name for path in made] == [path.with_suffix(".ipynb").name for path in PAGES]
    assert str(made[0]) in capsys.readouterr().out
    for notebook, lesson in zip(made, PAGES, strict=True):
        found = json.loads(notebook.read_text())
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        sources = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
        assert "\n".join(sources) == code(lesson)
        assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    assert main(["learn", "course", str(tmp_path / "course")]) != 0  # a student may have changed them
    assert "exists; remove it" in capsys.readouterr().err


def test_an_error_in_a_cell_names_the_line(tmp_path: Path) -> None:
    lesson = tmp_path / "lesson.md"
    lesson.write_text("# 1. Wrong\n\n```{code-cell} ipython3\nx = 1\n1 / (x - 1)\n```\n")
    command = [sys.executable, "-m", "dist_prims.learn.course", str(lesson), str(tmp_path / "output.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f'{lesson}", line 5' in done.stderr


@pytest.mark.slow
@each_lesson
def test_a_lesson_runs(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "output.json"
    command = [sys.executable, "-m", "dist_prims.learn.course", str(path), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path, env=clean())
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [output.name]
    outputs = json.loads(output.read_text())
    assert len(outputs) == len(re.findall(r"^```\{code-cell\}", path.read_text(), re.MULTILINE))
    assert sum(bool(each["text"]) for each in outputs) >= 5
