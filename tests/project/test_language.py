"""The language of the project: words that no name contains, phrases that no text contains, one name for one class.

docs/design/glossary.md has the terms to use instead.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
PYTHON = sorted([*(ROOT / "dist_prims").rglob("*.py"), *EXAMPLES.glob("*.py"), *TESTS])
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp"))
SCRIPTS = sorted((ROOT / "launch_scripts").iterdir())
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])

# Metaphors and riddles that were names once. Each is a word of an identifier: in snake_case or CamelCase.
WORDS = ["inquest", "patience", "heed", "doze", "told", "heard", "whoever", "everyones", "parcel", "lender", "lending"]
WORDS += ["loan", "strangers", "twins", "foretold", "gradual", "dice", "spanning", "teaching", "lessons"]

# What a reader has to translate before it means something.
PHRASES = ["for ever", "anew", "whoever", "it must not need", "is all there is", "nobody", "everybody", "somebody"]
PHRASES += ["is told", "are told", "who has", "who have", "who is", "in a box"]


def words_of(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier)}


def python_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def without_comments(text: str) -> str:
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)


def names() -> Iterator[tuple[Path, str]]:
    for path in PYTHON:
        yield path, path.stem
        for name in python_names(ast.parse(path.read_text())):
            yield path, name
    for path in CPP:
        yield path, path.stem
        for name in set(re.findall(r"[A-Za-z_]\w*", without_comments(path.read_text()))):
            yield path, name


def test_no_name_contains_a_banned_word() -> None:
    found = sorted({f"{path.relative_to(ROOT)}: {name}" for path, name in names() if words_of(name) & set(WORDS)})
    assert not found, "\n".join(found)


def test_no_term_of_the_glossary_is_banned() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/design/glossary.md").read_text(), re.MULTILINE)
    assert not {word for row in rows for word in re.findall(r"\w+", row.lower())} & set(WORDS)


def test_no_text_contains_a_banned_phrase() -> None:
    phrases, found = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE), []
    for path in [*PYTHON, *CPP, *PAGES, *SCRIPTS]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if phrases.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_no_two_classes_of_a_language_have_one_name() -> None:
    """The helpers of tests are a language of their own; files of tests and examples may each have a ``Net``."""
    python: dict[str, list[Path]] = defaultdict(list)
    helpers: dict[str, list[Path]] = defaultdict(list)
    cpp: dict[str, list[Path]] = defaultdict(list)
    for path in PYTHON:
        if path.parent == EXAMPLES or (path in TESTS and ROOT / "tests/helpers" not in path.parents):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                (helpers if path in TESTS else python)[node.name].append(path)
    for path in CPP:
        if "tests" not in path.parts:
            for name in re.findall(
                r"^(?:class|struct) (\w+)(?: final)?(?: : [^;{]*)? \{", without_comments(path.read_text()), re.MULTILINE
            ):
                cpp[name].append(path)
    for language in (python, helpers, cpp):
        several = {
            name: [str(path.relative_to(ROOT)) for path in paths] for name, paths in language.items() if len(paths) > 1
        }
        assert not several, several
