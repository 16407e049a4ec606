"""The choice of mistakes: one in each part of the project, their kinds in turn, fixed by a seed."""

from __future__ import annotations

import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from planting.cpp_mistakes import cpp_mistakes
from planting.mistake import Edit, Mistake
from planting.python_mistakes import python_mistakes

__all__ = ["KINDS", "choose"]

KINDS = ["swapped operands", "off by one", "dropped call", "wrong root", "negated check", "missing check"]
KINDS += ["skipped verify"]


def choose(
    root: Path, count: int, seed: int, is_tested: Callable[[str, int], bool], compiles: Callable[[Mistake], bool]
) -> list[Mistake]:
    """Choose mistakes from the sources in ``root``: parts in turn until there are ``count``.

    Args:
        is_tested: whether a test executes this line of this file.
        compiles: whether C++ with the mistake compiles.
    """
    chance = random.Random(seed)
    of_parts = {part: _by_kind(root, files, chance) for part, files in sorted(_parts(root).items())}
    parts = list(of_parts)
    chance.shuffle(parts)
    chosen: list[Mistake] = []
    turn = 0
    while len(chosen) < count and any(any(kinds.values()) for kinds in of_parts.values()):
        of_kinds = of_parts[parts[turn % len(parts)]]
        for step in range(len(KINDS)):  # the next kind that the part has
            candidates = of_kinds.get(KINDS[(turn + step) % len(KINDS)], [])
            found = next(_suitable(candidates, is_tested, compiles), None)
            if found:
                chosen.append(found)
                break
        turn += 1
    return chosen


def _suitable(
    candidates: list[Mistake], is_tested: Callable[[str, int], bool], compiles: Callable[[Mistake], bool]
) -> Iterator[Mistake]:
    """The candidates that can be planted; each is taken from the list."""
    while candidates:
        mistake = candidates.pop()
        if is_tested(mistake.file, mistake.edit.number) and compiles(mistake):
            yield mistake


def _by_kind(root: Path, files: list[str], chance: random.Random) -> dict[str, list[Mistake]]:
    """The mistakes of a part by kind, in an order by chance."""
    of_kinds: dict[str, list[Mistake]] = defaultdict(list)
    for name in files:
        text = (root / name).read_text()
        edits: Iterator[Edit] = python_mistakes(text) if name.endswith(".py") else cpp_mistakes(text)
        for edit in edits:
            of_kinds[edit.kind].append(Mistake(name, edit))
    for _, mistakes in sorted(of_kinds.items()):
        chance.shuffle(mistakes)
    return of_kinds


def _parts(root: Path) -> dict[str, list[str]]:
    """The tracked sources by package of dist_prims and by folder of csrc."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "dist_prims/*.py", "csrc/*.h", "csrc/*.cpp"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    parts: dict[str, list[str]] = defaultdict(list)
    for name in sorted(listed):
        if not name.startswith("csrc/tests/"):
            parts["/".join(name.split("/")[:2]) if name.count("/") > 1 else "dist_prims"].append(name)
    return parts
