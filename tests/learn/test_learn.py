"""Exercises: right answers are accepted, templates and mutated answers that are wrong are refused."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from solutions import SOLUTIONS

from dist_prims.cli import main
from dist_prims.learn import wire
from dist_prims.learn.answer import Answer
from dist_prims.learn.check import check_answer
from dist_prims.learn.exercise import WrongAnswerError
from dist_prims.learn.exercises import ORDER, exercise, file_name
from dist_prims.learn.messages import AllReduce, Barrier, Receive, Send, run
from dist_prims.learn.run_answer import AnswerFile
from dist_prims.schedules import build

NUMBERS = range(1, len(ORDER) + 1)


def solution(number: int) -> str:
    return SOLUTIONS[ORDER[number - 1]]


def verdict(number: int, text: str, folder: Path) -> str | None:
    """What the check finds wrong; None for an answer that it accepts.

    The answer runs in this process, by the same messages: test_answer_process.py starts processes.
    """
    path = folder / "answer.py"
    path.write_text(text)
    of_rank: dict[int, AnswerFile] = {}

    def ask(rank: int, request: dict[str, Any]) -> dict[str, Any]:
        answer = of_rank.setdefault(rank, AnswerFile(str(path)))
        return wire.from_line(wire.to_line(answer.reply(wire.from_line(wire.to_line(request)))))

    try:
        check_answer(number, Answer(ask))
    except WrongAnswerError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", NUMBERS)
def test_a_right_answer_is_accepted(number: int, tmp_path: Path) -> None:
    assert verdict(number, solution(number), tmp_path) is None


@pytest.mark.parametrize("number", NUMBERS)
def test_the_template_is_refused(number: int, tmp_path: Path) -> None:
    text = exercise(number).text(number)
    ast.parse(text)
    error = verdict(number, text, tmp_path)
    assert error
    assert len(exercise(number).hints) == 3
    assert [exercise(each).title for each in NUMBERS].count(exercise(number).title) == 1
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("task", "name", "right"),
    [
        ("same_bits", "recursive_doubling", True),
        ("ring_all_reduce", "ring", True),
        ("ring_all_reduce", "swing", False),  # right results, but with other chunks, more bytes or more steps
        ("ring_all_reduce", "tree", False),
    ],
)
def test_other_answers_are_judged_by_their_steps(task: str, name: str, right: bool, tmp_path: Path) -> None:
    """Registered algorithms written out as tables, where they have the chunks that the exercise demands."""
    tables = {size: [step.rows() for step in build("all_reduce", name, size).steps] for size in range(1, 10)}
    text = f"""
from dist_prims.schedules import Step

def all_reduce(size):
    for rows in {tables}[size]:
        src, dst, chunk, into, reduce = zip(*rows)
        yield Step(src=src, dst=dst, chunk=chunk, into=into, reduce=reduce)
"""
    assert (verdict(ORDER.index(task) + 1, text, tmp_path) is None) == right


def test_the_steps_that_are_judged_are_the_steps_that_are_proved(tmp_path: Path) -> None:
    """A second reply was once judged. A generator that has ended replies with no steps, which take no time."""
    once = "\nSTEPS = steps(6)\ndef all_reduce(size):\n    return STEPS\n"
    ring, right = (
        text.replace("def all_reduce", "def steps") for text in (SOLUTIONS["ring_all_reduce"], SOLUTIONS["two_hosts"])
    )
    number = ORDER.index("two_hosts") + 1
    assert "takes 1.00 of the time of the flat ring" in (verdict(number, ring + once, tmp_path) or "")
    assert verdict(number, right + once, tmp_path) is None


def test_two_messages_in_one_step_are_refused_whatever_the_other_steps_do(tmp_path: Path) -> None:
    """The messages of all steps were once counted together, so that a step without a message made up for another."""
    text = """
import numpy as np
from dist_prims.schedules import Step

def all_to_all(size):
    rank = np.arange(size)
    own = Step(src=rank, dst=rank, chunk=rank, into=size + rank)
    for _ in range(size - 2):
        yield own
    yield Step.concat([own, *(
        Step(src=rank, dst=(rank + k) % size, chunk=(rank + k) % size, into=size + rank) for k in range(1, size)
    )])
"""
    error = verdict(ORDER.index("pairwise") + 1, text, tmp_path)
    assert error == "3 ranks: a rank sends or receives two messages in one step"


class Mutation(ast.NodeTransformer):
    """Changes one place of a program: a constant, an operator or a comparison."""

    OPERATORS: ClassVar = {
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Add,
        ast.FloorDiv: ast.Mult,
        ast.BitXor: ast.Add,
    }

    def __init__(self, place: int) -> None:
        self.left = place

    def _here(self) -> bool:
        self.left -= 1
        return self.left == -1

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self._here() else node
        if isinstance(node.value, int):
            return ast.Constant(node.value + 1) if self._here() else node
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        other = self.OPERATORS.get(type(node.op))
        return ast.BinOp(node.left, other(), node.right) if other and self._here() else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Not(), node) if self._here() else node


def mutants(text: str) -> Iterator[str]:
    for place in range(1000):
        mutation = Mutation(place)
        tree = ast.fix_missing_locations(mutation.visit(ast.parse(text)))
        if mutation.left >= 0:
            return
        yield ast.unparse(tree)


# The changed line of the mutants that are right too; each was read.
RIGHT_TOO = {
    "ring_pass": {"if rank == 1:", "if not rank == 0:"},  # another rank, or all others, receive first
    "deadlock": {"if not rank % 2 == turn:"},  # the odd ranks send first
    "broadcast_tree": {"place = np.arange(min(2 ** step, size + 2 ** step))"},  # some ranks get the data twice
    "pairwise": {
        "dst = (rank - distance) % size",
        "yield (move if distance > 2 else Step.concat([own, move]))",  # the own block is copied twice
    },
    "dissemination": {"yield Step(src=rank, dst=(rank - 2 ** step) % size, chunk=0, reduce=True)"},
    "two_hosts": {"other = (place - distance) % 3"},
    "desync": {"left = (yield AllReduce(2 if values else 0))"},  # any number but 0
}


def changed_lines(text: str, other: str) -> set[str]:
    lines = difflib.ndiff(ast.unparse(ast.parse(text)).splitlines(), other.splitlines())
    return {line[2:].strip() for line in lines if line.startswith("+")}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", NUMBERS)
def test_mutants_are_refused_or_right(number: int, tmp_path: Path) -> None:
    text, right_too = solution(number), RIGHT_TOO.get(ORDER[number - 1], set())
    found = list(mutants(text))
    assert len(found) >= 3
    for mutant in found:
        if verdict(number, mutant, tmp_path) is None:
            assert changed_lines(text, mutant) <= right_too, mutant


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["learn"]) == 0
    listed = capsys.readouterr().out
    assert [int(each) for each in re.findall(r"^ ?(\d+)   ", listed, re.MULTILINE)] == list(NUMBERS)
    assert main(["learn", "start", "7"]) == 0
    path = Path(file_name(7))
    assert path.name == "exercise_07_ring_all_reduce.py"
    assert main(["learn", "start", "7"]) == 2  # it does not overwrite an answer
    assert main(["learn", "check", "8"]) == 2
    for arguments in (["start", "99"], ["check", "99"], ["check", "7", str(tmp_path)]):
        assert main(["learn", *arguments]) == 2
    assert "the numbers are 1 to" in capsys.readouterr().err
    path.write_text(solution(7).replace("rank + 1 - step", "rank - step"))
    done = subprocess.run(
        [sys.executable, "-m", "dist_prims", "learn", "check", "7"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith("✗ 2 ranks: at the end rank 0, chunk 1: ")
    assert path.with_suffix(".html").exists()
    path.write_text(solution(7))
    assert main(["learn", "check", "7"]) == 0
    assert "✓ Right: proved for 1, 2, 3" in capsys.readouterr().out
    assert main(["learn"]) == 0
    assert re.findall(r"^ ?(\d+) ✓", capsys.readouterr().out, re.MULTILINE) == ["7"]
    assert main(["learn", "hint", "7", "--level", "3"]) == 0
    assert "learn hint" not in capsys.readouterr().out


def test_errors_of_an_answer_name_its_line(tmp_path: Path) -> None:
    assert (
        verdict(7, "def all_reduce(size):\n    yield 1 / 0\n", tmp_path)
        == "line 2: ZeroDivisionError: division by zero"
    )
    assert "SyntaxError" in (verdict(7, "def all_reduce(size:\n", tmp_path) or "")
    assert verdict(7, "", tmp_path) == "the file does not define the function all_reduce"
    forever = (
        "from dist_prims.schedules import Step\ndef all_reduce(size):\n    while True:\n        yield Step(0, 0, 0)\n"
    )
    assert "more than 2000 steps" in (verdict(7, forever, tmp_path) or "")
    assert "it must yield steps" in (verdict(7, "def all_reduce(size): pass", tmp_path) or "")


def crossing_sends(rank: int, size: int) -> Iterator[object]:
    yield Send(to=1 - rank, value=0)
    yield Receive(source=1 - rank)


def different_calls(rank: int, size: int) -> Iterator[object]:
    yield Barrier() if rank else AllReduce(1)


def calls_of_rank_1_alone(rank: int, size: int) -> Iterator[object]:
    yield from [AllReduce(1)] * rank


def one_call(call: object) -> Callable[[int, int], Iterator[object]]:
    def program(rank: int, size: int) -> Iterator[object]:
        yield call

    return program


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (crossing_sends, "rank 0 waits in its send to rank 1; rank 1 waits in its send to rank 0"),
        (different_calls, "rank 0 waits in all_reduce; rank 1 waits in barrier"),
        (calls_of_rank_1_alone, "rank 0 has ended; rank 1 waits in all_reduce"),
        (one_call(Send(to=0, value=1)), "rank 0 of 2: .* names no other rank"),
        (one_call(Send(to=2, value=1)), "rank 0 of 2: .* names no other rank"),
        (one_call(Receive(source=-1)), "rank 0 of 2: .* names no other rank"),
    ],
)
def test_calls_that_cannot_end_are_named(program: Any, words: str) -> None:
    with pytest.raises(WrongAnswerError, match=words):
        run(program, 2)
