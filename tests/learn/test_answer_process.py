"""The verdict on an answer is made by a process that never imports it: no answer that misbehaves is accepted."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from solutions import IMPORTS, SOLUTIONS

from dist_prims.cli import main
from dist_prims.learn import answer_process, wire
from dist_prims.learn.answer import Answer
from dist_prims.learn.check import check
from dist_prims.learn.exercise import WrongAnswerError
from dist_prims.learn.exercises import ORDER
from dist_prims.schedules import COLLECTIVES, algorithms, lookup
from dist_prims.schedules.pipelines.registry import _registry as pipelines
from dist_prims.schedules.pipelines.registry import pipeline_plans

RIGHT = "✓ Right: proved for 1, 2, 3, 4, 5, 6, 7, 8, 9 ranks"
NOTHING = "def all_reduce(size):\n    return iter(())\n"


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def wrong(text: str, folder: Path, task: str = "ring_all_reduce", seconds: float = 60) -> str:
    """Why the check refuses an answer."""
    path = folder / "answer.py"
    path.write_text(text)
    with pytest.raises(WrongAnswerError) as caught:
        check(ORDER.index(task) + 1, path, seconds)
    return str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", ["ring_pass", "ring_all_reduce", "ring_order", "one_f_one_b"])
def test_a_right_answer_of_each_kind_is_accepted(task: str, tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text(SOLUTIONS[task])
    assert check(ORDER.index(task) + 1, path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        ("def all_reduce(size):\n    raise SystemExit", "line 2: SystemExit:"),
        ("def all_reduce(size):\n    raise KeyboardInterrupt", "line 2: KeyboardInterrupt:"),
        ("import os\nos._exit(0)", "ended with status 0 before it had replied"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL before it had replied"),
        ("import os, signal\nos.killpg(0, signal.SIGKILL)", "ended by SIGKILL before it had replied"),
        (f"import dist_prims.learn.schedule_check as c\nc._prove = lambda s: None\n{NOTHING}", "2 ranks: "),
        (f"import dist_prims.learn.check as c\nc.check = c.check_answer = lambda *a: 'Right'\n{NOTHING}", "2 ranks: "),
        (f"from dist_prims.schedules import Schedule\nSchedule.verify = print\n{NOTHING}", "2 ranks: "),
        ("import sys\nsys.stdout.close()\n" + NOTHING, "2 ranks: "),
        ("x = input()", "line 1: EOFError"),
        ("def all_reduce(size):\n    yield 1", "all_reduce(1): step 0 is 1; yield Step("),
        (f"data = bytearray(8 << 30)\n{NOTHING}", "line 1: MemoryError"),
    ],
)
def test_an_answer_decides_nothing_about_its_verdict(text: str, why: str, tmp_path: Path) -> None:
    """`raise SystemExit(0)` and a patched `_prove` were once accepted, because the answer ran where it was checked."""
    assert why in wrong(text, tmp_path)


def test_a_forged_verdict_has_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "answer.py").write_text(f"print({RIGHT!r})\n1 / 0\n")
    assert main(["learn", "check", "7", str(tmp_path / "answer.py")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"  the answer prints: {RIGHT}",
        "✗ line 2: ZeroDivisionError: division by zero",
        "  A hint: python -m dist_prims learn hint 7",
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("ring_all_reduce", "print(FORGED)\n1 / 0"),
        ("ring_all_reduce", "raise ValueError(FORGED)"),
        ("ring_all_reduce", "def all_reduce(size):\n    yield TEXT"),
        ("ring_pass", "def program(rank, size, value):\n    return TEXT\n    yield"),
        ("ring_pass", "def program(rank, size, value):\n    return FORGED\n    yield"),
        ("ring_pass", "from dist_prims.learn.messages import Send\ndef program(*_): yield Send(TEXT, 1)"),
        ("desync", "from dist_prims.learn.messages import AllReduce\ndef program(_): yield AllReduce(FORGED)"),
        ("crossover", "def crossover(*_): return TEXT"),
        ("ring_order", "def add(*_): return TEXT"),
        ("shards", "def shard(*_): return (TEXT, FORGED)"),
        ("one_f_one_b", f"{IMPORTS}\ndef order(*_): yield Action(FORGED, 0, 0)"),
        ("one_f_one_b", f"{IMPORTS}\ndef order(*_): yield Action('F', TEXT, 0)"),
    ],
)
def test_no_text_of_an_answer_looks_like_a_verdict(
    task: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of a returned object once had lines of its own; a carriage return or an escape sequence hid a prefix."""
    forged = f"FORGED = {f'x{chr(13)}{chr(10)}{RIGHT}{chr(13)}{chr(27)}[1A{chr(27)}[2K{RIGHT}'!r}\n"
    forged += "class Text:\n    def __repr__(self): return FORGED\nTEXT = Text()\n"
    (tmp_path / "answer.py").write_text(forged + text)
    assert main(["learn", "check", str(ORDER.index(task) + 1), str(tmp_path / "answer.py")]) == 1
    lines = capsys.readouterr().out.split("\n")
    assert not [line for line in lines if line and not line.isprintable()]
    assert [line[:1] for line in lines if not line.startswith("  ")] == ["✗", ""]


ENDLESS = {
    "a loop that yields nothing": "def all_reduce(size):\n    while True: pass",
    "output": "import sys\nsys.stdout.reconfigure(errors='ignore')\nwhile True: print('x' * 1000)",
    "a thread that prints": "import threading\ndef work():\n    while True: print('x' * 1000)\n"
    "threading.Thread(target=work).start()\nwhile True: pass",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_an_endless_answer_meets_its_deadline(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong(text, tmp_path, seconds=1) == "the answer has not ended after 1 s. Does a loop of it end?"
    assert len(capsys.readouterr().out) < 2 * answer_process._MOST_PRINTED


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"value": 1},
        {"value": [1]},
        {"value": [[[0], [0], [0], [0], [0]]]},
        {"value": [[[0], [0], [0], [0, 1], [False]]]},
        {"value": [[[2**63], [0], [0], [0], [False]]]},
        {"call": ["Send", "1", 0]},
        {"call": ["AllReduce", None, "1"]},
        {"call": ["Other", None, None]},
    ],
)
def test_replies_of_another_form_are_refused(reply: dict[str, object]) -> None:
    answer = Answer(lambda rank, request: reply)
    with pytest.raises(WrongAnswerError, match=r"the process of the answer has sent|must be a (whole )?number"):
        answer.steps("all_reduce", 2, None) if "call" not in reply else next(answer.program("program", 0))


@pytest.mark.parametrize("line", [b"1", b"[]", b'{"value": {"code": "1"}}', b"[" * 5000, b"\xff", b"{" * 5000])
def test_lines_that_are_no_messages_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        wire.from_line(line)


def test_what_an_answer_writes_to_the_connection_itself_is_refused(tmp_path: Path) -> None:
    text = "import os, sys, time\nos.write(int(sys.argv[2]), b'1\\n')\ntime.sleep(60)"
    assert "the process of the answer has sent a reply that is not a message" in wrong(text, tmp_path)


def test_a_reply_without_end_is_refused(tmp_path: Path) -> None:
    text = "import os, sys\nwhile True: os.write(int(sys.argv[2]), b'x' * 65536)"
    assert wrong(text, tmp_path) == "the process of the answer has sent more than 4 MiB in a reply"


SENDS_NOTHING = {
    "ring_pass": "def program(rank, size, value):\n    return (rank - 1) % size\n    yield",
    "deadlock": "def program(rank, size, value):\n    return None, None\n    yield",
    "desync": "from dist_prims.learn.messages import Barrier\nevery = []\ndef program(values):\n"
    "    every.extend(values)\n    yield Barrier()\n    return sum(every)",
}


@pytest.mark.parametrize("task", SENDS_NOTHING)
def test_the_results_of_messages_depend_on_messages(task: str, tmp_path: Path) -> None:
    """A program that sent nothing was once accepted: it could compute what it should have received."""
    assert "rank 0 returns" in wrong(SENDS_NOTHING[task], tmp_path, task)


@pytest.mark.parametrize("text", ["build('all_reduce', 'ring', size).steps", "ring.all_reduce(size)"])
def test_the_algorithm_of_the_library_is_no_answer(text: str, tmp_path: Path) -> None:
    """An answer that returned the library's own steps was once accepted in four exercises."""
    answer = f"def all_reduce(size):\n    from dist_prims.schedules import build\n    IMPORT\n    return {text}\n"
    imports = "from dist_prims.schedules.algorithms import ring" if "build" not in text else "pass"
    error = wrong(answer.replace("IMPORT", imports), tmp_path)
    assert "an answer cannot use the algorithms of the library" in error


def test_no_built_in_algorithm_or_plan_can_be_imported_by_an_answer() -> None:
    from dist_prims.learn.run_answer import NoAlgorithms

    makes = [lookup(kind, name).make for kind in COLLECTIVES for name in algorithms(kind)]
    orders = [pipelines[name].order for name in pipeline_plans()]
    for module in {each.__module__ for each in [*makes, *orders] if each.__module__.startswith("dist_prims")}:
        with pytest.raises(ImportError, match="write the steps yourself"):
            NoAlgorithms().find_spec(module)


def has_ended(pid: int) -> bool:
    """Whether a process ends within 30 seconds."""
    status, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":  # dead, and its parent has not waited for it
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_no_process_is_left(tmp_path: Path) -> None:
    """A process that the answer has started, and that holds its connection, ends with the check."""
    text = f"import os, sys, time\nif os.fork():\n    os._exit(0)\nopen({str(tmp_path / 'pid')!r}, 'w')"
    text += ".write(str(os.getpid()))\nos.write(int(sys.argv[2]), b'1\\n')\ntime.sleep(600)"
    assert "the process of the answer has sent a reply that is not a message" in wrong(text, tmp_path)
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_no_process_is_left_when_the_check_is_killed(tmp_path: Path) -> None:
    """The process of an answer that sleeps once stayed, because only the check ended it."""
    answer, pid = tmp_path / "answer.py", tmp_path / "pid"
    answer.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(90)\n")
    with subprocess.Popen([sys.executable, "-m", "dist_prims", "learn", "check", "7", str(answer)]) as command:
        deadline = time.monotonic() + 60
        while not pid.exists() or not pid.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        command.kill()
    assert has_ended(int(pid.read_text()))


def test_a_state_folder_that_cannot_be_written_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    answer = tmp_path / "answer.py"
    answer.write_text(SOLUTIONS["ring_all_reduce"])
    assert main(["learn", "check", "7", str(answer)]) == 0
    assert "`learn` cannot show it as done: " in capsys.readouterr().out
    assert main(["learn"]) == 0
    assert "✓" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("move", "says"),
    [
        ("src=0, dst=-1", "The page of it opens at the wrong step: "),
        ("src=[0] * 60_001, dst=0", "Its page cannot be written: page: all_reduce answer for 1 ranks has 60,001 tran"),
        ("src=0, dst=1", "Its page cannot be written: [Errno 21] Is a directory: "),
    ],
)
def test_a_page_that_cannot_be_written_changes_no_verdict(
    move: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status was 2, "Nothing was checked", for a wrong answer without a page."""
    if "Errno 21" in says:
        (tmp_path / "answer.html").mkdir()
    text = f"from dist_prims.schedules import Step\ndef all_reduce(size):\n    yield Step({move}, chunk=0)\n"
    (tmp_path / "answer.py").write_text(text)
    assert main(["learn", "check", "7", str(tmp_path / "answer.py")]) == 1
    verdict, page, hint = capsys.readouterr().out.splitlines()
    assert verdict.startswith("✗ ")
    assert page.startswith(f"  {says}")
    assert hint == "  A hint: python -m dist_prims learn hint 7"


def test_an_answer_that_kills_the_check_gives_no_status_0(tmp_path: Path) -> None:
    answer = tmp_path / "answer.py"
    answer.write_text("import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGTERM)\n")
    command = [sys.executable, "-m", "dist_prims", "learn", "check", "7", str(answer)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, start_new_session=True)
    assert done.returncode == -signal.SIGTERM
