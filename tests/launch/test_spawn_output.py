"""What spawned ranks print: whole lines, on the parent's streams, with the rank where a person reads them."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import dist_prims
from dist_prims.launch import RankFailedError
from dist_prims.launch.output import Output


def said_by(body: Callable[[], Any], size: int, **how: Any) -> tuple[str, str]:
    """What the ranks wrote, as the parent's own streams show it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        dist_prims.spawn(body, size, timeout=60, **how)
    return out.getvalue(), errors.getvalue()


def test_lines_of_ranks_do_not_mix() -> None:
    def body() -> None:
        for number in range(200):
            for word in ("rank", f"{dist.get_rank()}", "line", f"{number}\n"):
                sys.stdout.write(word if word.endswith("\n") else f"{word} ")
                sys.stdout.flush()  # as print does in a notebook, and with PYTHONUNBUFFERED

    out, _ = said_by(body, 4, prefix=False)
    wanted = [f"rank {rank} line {number}" for rank in range(4) for number in range(200)]
    assert sorted(out.splitlines()) == sorted(wanted)
    for rank in range(4):
        assert [line for line in out.splitlines() if f"rank {rank} " in line] == wanted[200 * rank : 200 * (rank + 1)]


def test_lines_of_all_origins_have_the_rank_as_a_prefix() -> None:
    def body() -> None:
        print("one", "two", sep="\n", flush=True)
        os.write(1, b"by C\n")
        subprocess.run(["echo", "by a child"], check=True)
        print("error", file=sys.stderr, flush=True)
        os.write(2, b"an error of C\n")

    out, errors = said_by(body, 2, prefix=True)
    for rank in range(2):
        lines = [line.partition("] ")[2] for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == ["one", "two", "by C", "by a child"]
        assert [line for line in errors.splitlines() if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] error",
            f"[rank {rank}] an error of C",
        ]
    assert "[rank" not in said_by(body, 2)[0], "no prefix where no person reads"


def test_much_output_does_not_block() -> None:
    def body() -> None:
        for _ in range(100):
            print("x" * 30_000)

    out, _ = said_by(body, 2)
    assert out == ("x" * 30_000 + "\n") * 200


def print_and_die() -> None:
    print("partial", end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def print_and_raise() -> None:
    print("partial", end="")
    raise LookupError


def print_and_hang() -> None:
    print("partial")
    time.sleep(1000)


@pytest.mark.parametrize(
    ("body", "timeout", "error"),
    [(print_and_die, 60, "SIGKILL"), (print_and_raise, 60, "LookupError"), (print_and_hang, 1, "timeout=1 s")],
)
def test_what_a_rank_that_fails_has_printed_is_shown(body: Callable[[], None], timeout: float, error: str) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        pytest.raises((RankFailedError, TimeoutError), match=error),
    ):
        dist_prims.spawn(body, 1, timeout=timeout, prefix=True)
    assert out.getvalue() == "[rank 0] partial\n"


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"a\nb"], "> a\n> b\n"),
        ([b"a", b"b\n"], "> ab\n"),
        ([b"\n"], "> \n"),
        ([b"10 %\r20 %\r", b"30 %\n"], "> 10 %\r> 20 %\r> 30 %\n"),  # a bar of progress
        ([b"\r10 %", b"\r20 %\n"], "\r> 10 %\r> 20 %\n"),
        ([b"dos\r", b"\nunix\n"], "> dos\r\n> unix\n"),
        (["Å".encode()[:1], "Å".encode()[1:] + b"\n"], "> Å\n"),
        ([b"\xff\n"], "> \\xff\n"),
        ([b"\r"], ""),
    ],
)
def test_lines_are_complete_whatever_the_pieces(pieces: list[bytes], shown: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        output = Output("stdout", 0, prefix=True)
        writes = os.open(f"/proc/self/fd/{output.descriptor}", os.O_WRONLY)
        for piece in pieces:
            os.write(writes, piece)
            output.forward()
        os.close(writes)
        output.close()
    assert out.getvalue().replace("[rank 0]", ">") == shown


def test_a_long_line_in_many_pieces() -> None:
    """The search for line ends took time by the square of an incomplete line's length: 10 s for 30 KB, at each read."""
    piece, number = b"x" * 1_000, 60
    with contextlib.redirect_stdout(io.StringIO()) as out:
        output = Output("stdout", 0, prefix=False)
        writes = os.open(f"/proc/self/fd/{output.descriptor}", os.O_WRONLY)
        for _ in range(number):
            os.write(writes, piece)
            output.forward()
        assert out.getvalue() == "", "the line is not complete"
        os.write(writes, b"\n")
        os.close(writes)
        output.close()
    assert out.getvalue() == "x" * 60_000 + "\n"


def test_a_stream_that_knows_fewer_letters_gets_escapes() -> None:
    text = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(text):
        dist_prims.spawn(lambda: print("✓ Åse"), 1, timeout=60)
    assert text.buffer.getvalue() == b"\\u2713 \\xc5se\n"


def test_a_stream_that_breaks_ends_the_ranks_and_leaves_nothing() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("the reader has closed")

    def body() -> None:
        print("a line")
        time.sleep(1000)

    before = len(os.listdir("/proc/self/fd"))
    with contextlib.redirect_stdout(Broken()), pytest.raises(BrokenPipeError, match="the reader has closed"):
        dist_prims.spawn(body, 2, timeout=60)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [1, 2])
def test_on_a_terminal_lines_of_several_ranks_have_a_prefix(size: int) -> None:
    def body() -> None:
        print("a line of", "words", sys.stdout.isatty())

    ours, theirs = pty.openpty()
    try:
        with open(theirs, "w", closefd=False) as terminal, contextlib.redirect_stdout(terminal):
            dist_prims.spawn(body, size, timeout=60)
        said = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    wanted = [f"[rank {rank}] a line of words True" for rank in range(2)] if size == 2 else ["a line of words True"]
    assert sorted(re.split(r"[\r\n]+", said.strip())) == wanted
