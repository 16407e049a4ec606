"""`show` and `prove` of algorithms that are wrong, and output that the terminal cannot take."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dist_prims.cli import main
from dist_prims.schedules import ScheduleError, Step, algorithm, algorithms, build, pipelines, unregister

HEAD = "from dist_prims.schedules import Step, algorithm\n"
WRONG = HEAD + '@algorithm("all_reduce", name="w", chunks=1)\ndef w(size):\n    yield Step(src=0, dst=1, chunk=0)\n'
ENDLESS = WRONG.replace("    yield Step(src=0, dst=1", "    while True:\n        yield Step(src=0, dst=0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.py"


def shown(file: Path, text: str, what: str = "show") -> tuple[int, str]:
    """Status and output of a command for a file; the algorithm is removed again."""
    file.write_text(text)
    command = [sys.executable, "-m", "dist_prims", what, str(file), *(["--sizes", "4"] if what == "prove" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def test_show_proves_what_it_shows(file: Path) -> None:
    """It once printed "ends: the sum over ranks 0..3" for an algorithm that sums nothing, with status 0."""
    status, out = shown(file, WRONG)
    lines = out.splitlines()
    assert status == 1
    assert lines[2:4] == ["step 0   0 ─0→ 1", ""]
    assert lines[5] == "must end every rank: chunk 0, the sum over ranks 0..3"
    assert lines[6].startswith("✗ at the end rank 0, chunk 0: r1+r2+r3 is missing. It cannot be repaired after step 0")
    assert lines[7:] == ["  For a page that opens at the wrong step, add --html wrong.html"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param(ENDLESS, "there are more than 100,064 steps; does the loop end?", marks=pytest.mark.slow),
        (WRONG.replace("src=0", "src=[][0]"), "line 4: IndexError: list index out of range"),
        (WRONG.replace("yield", "raise SystemExit(0)\n    yield"), "SystemExit"),
    ],
)
def test_an_algorithm_that_cannot_be_shown_is_an_error(text: str, error: str, file: Path) -> None:
    """An endless generator once hung `show` and `prove`; SystemExit(0) once ended both with status 0."""
    for what in ("show", "prove"):
        status, out = shown(file, text, what)
        assert status == 1
        assert error.removeprefix("line 4: ") in out
        assert what == "prove" or (error in out and "Traceback" not in out)


def one_parameter(n: int):  # type: ignore[no-untyped-def]
    yield Step(src=0, dst=0, chunk=n)


def no_default(size: int, k: int):  # type: ignore[no-untyped-def]
    yield Step(src=0, dst=size - 1, chunk=k)


@pytest.mark.parametrize(
    ("collective", "make", "error"),
    [
        (
            "all_reduce",
            one_parameter,
            r"all_reduce one_parameter\(n\): the parameters must be size, then others with a",
        ),
        ("all_reduce", no_default, r"no_default\(size, k\): the parameters must be size, then"),
        ("broadcast", lambda size: iter(()), r"<lambda>\(size\): the parameters must be size, root, then"),
    ],
)
def test_a_generator_that_cannot_be_called_is_not_registered(collective: str, make: object, error: str) -> None:
    """A generator of `n` in place of `size` once raised "multiple values for argument 'n'" when it was built."""
    with pytest.raises(ValueError, match=error):
        algorithm(collective, name="mine")(make)  # type: ignore[type-var]
    assert "mine" not in algorithms(collective)


def test_the_limit_on_steps_is_above_what_large_groups_need() -> None:
    @algorithm("all_reduce", name="mine", chunks=1)
    def mine(size: int, steps: int = 1):  # type: ignore[no-untyped-def]
        step = Step(src=0, dst=0, chunk=0)
        yield from (step for _ in range(steps))

    try:
        assert len(build("all_reduce", "mine", 2, steps=100_016).steps) == 100_016
        with pytest.raises(ValueError, match="more than 100,016 steps"):
            list(build("all_reduce", "mine", 2, steps=100_017).steps)
    finally:
        unregister("all_reduce", "mine")


def test_an_order_of_a_pipeline_that_does_not_end_is_an_error() -> None:
    @pipelines.pipeline_schedule("mine", pipelines.PipelineCard("no end", "0", "0", wins="never", source="a test"))
    def mine(rank, ranks, num_microbatches, stages_a_rank):  # type: ignore[no-untyped-def]
        while True:
            yield pipelines.Action("F", rank, 0)

    try:
        with pytest.raises(ScheduleError, match="occurs twice"):
            pipelines.pipeline_plan("mine", 2, 2).verify()
    finally:
        pipelines.unregister("mine")


@pytest.mark.parametrize(("name", "format"), [("a.json", None), ("a.xml", "msccl"), ("b.json", "mscclpp")])
def test_show_reads_the_schedule_of_a_file(
    name: str, format: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a file was taken for the name of a collective."""
    path, page = build("all_gather", "ring", 3).save(tmp_path / name, format), tmp_path / "page.html"
    assert main(["show", str(path), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "ends     every rank: chunks 0-2, data of ranks 0..2" in out
    assert "wins" not in out  # the file is not the registered algorithm of its name
    assert page.read_text().startswith("<!doctype html>")
    assert main(["show", str(path), "ring"]) == 2
    assert "the file has one schedule; omit the algorithm" in capsys.readouterr().err
    assert main(["show", str(path), "--size", "8"]) == 2
    assert "the file has its size and its root; omit --size and --root" in capsys.readouterr().err
    if format == "msccl":
        path.write_text(path.read_text().replace('depid="0"', 'depid="-1"'))
        assert main(["show", str(path)]) == 1
        assert f"✗ {path}: race: " in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [["show", "all_reduce", "ring"], ["learn", "check", "7"], ["recommend"]])
def test_output_in_ascii(arguments: list[str], tmp_path: Path) -> None:
    """A stdout in ASCII once ended these commands with a UnicodeEncodeError."""
    (tmp_path / "exercise_07_ring_all_reduce.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "dist_prims", *arguments],
        capture_output=True, timeout=100, check=False, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == (arguments[0] == "learn"), done.stderr
    assert done.stdout.isascii()
    assert {"show": b"0 -0> 1", "learn": b"x the file does not define", "recommend": b" us "}[
        arguments[0]
    ] in done.stdout


def test_a_reader_that_closes_its_end_ends_the_command_without_a_word() -> None:
    """`| head` once added "Broken pipe", or a traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dist_prims", "show"]
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_stdout_is_no_error() -> None:
    """The command ended by an AttributeError, because Python has no ``sys.stdout`` then."""
    command = f"exec {shlex.quote(sys.executable)} -m dist_prims algorithms barrier >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
