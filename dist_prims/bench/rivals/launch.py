"""Commands with a deadline: after it, a command and all processes that it started are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__: list[str] = []

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


class Failed(Exception):
    """A command failed; the message is the reason in one line."""


def environment(home: Path | None, settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus ``settings``, with the commands of ``home`` first and one thread by default."""
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    if home:
        own["PATH"] = f"{home / 'bin'}{os.pathsep}{own.get('PATH', '')}"
        own.pop("PYTHONPATH", None)
    else:
        root = str(Path(__file__).parents[3])
        own["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [own.get("PYTHONPATH")])])
    return {**own, **settings}


def run(commands: Sequence[Sequence[str]], seconds: float, environments: Sequence[Mapping[str, str]]) -> None:
    """Run all commands at the same time. If one fails, or after ``seconds``, all are ended and Failed is raised."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for command, each in zip(commands, environments, strict=True):
                started.append(_start(command, each, output))
            _wait(started, time.monotonic() + seconds)
        except TimeoutError:
            raise Failed(f"not done in {seconds:g} s; {_reason(output)}") from None
        except OSError as error:
            raise Failed(str(error)) from None
        finally:
            for process in started:
                _end(process)
        if any(process.returncode for process in started):
            raise Failed(_reason(output))


def _start(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def _wait(started: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    while any(process.poll() is None for process in started):
        if any(process.returncode for process in started):
            time.sleep(0.5)  # let the others print their reasons, too
            return
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, on which an MPI launcher ends its ranks, then SIGKILL for the whole session."""
    for kind, grace in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)


def _reason(output: IO[bytes]) -> str:
    """The last line that mentions an error, else the last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith(("File", "raise"))]
    return ([*lines[-1:], *errors] or ["no output"])[-1][:200]
