"""Commands with a deadline. What does not end by then is ended, with all that it started."""

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

__all__ = ["Failed", "environment", "run"]

_GRACE = 5.0  # seconds to leave in peace


class Failed(Exception):
    """Says why in one line."""


def environment(home: Path | None, settings: Mapping[str, str]) -> dict[str, str]:
    """Ours, with the commands of the one at ``home`` first, and one thread for a rank unless told otherwise."""
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    if home:
        own["PATH"] = f"{home / 'bin'}{os.pathsep}{own.get('PATH', '')}"
        own.pop("PYTHONPATH", None)
    else:
        root = str(Path(__file__).parents[3])
        own["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [own.get("PYTHONPATH")])])
    return {**own, **settings}


def run(commands: Sequence[Sequence[str]], seconds: float, environments: Sequence[Mapping[str, str]]) -> None:
    """All commands at once. As soon as one fails the others are ended, and so they are after ``seconds``."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as said:
        try:
            for command, each in zip(commands, environments, strict=True):
                started.append(_start(command, each, said))
            _wait(started, time.monotonic() + seconds)
        except TimeoutError:
            raise Failed(f"not done in {seconds:g} s; {_reason(said)}") from None
        except OSError as error:
            raise Failed(str(error)) from None
        finally:
            for process in started:
                _end(process)
        if any(process.returncode for process in started):
            raise Failed(_reason(said))


def _start(command: Sequence[str], environment: Mapping[str, str], said: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
    )


def _wait(started: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    while any(process.poll() is None for process in started):
        if any(process.returncode for process in started):
            time.sleep(0.5)  # let the others say why too
            return
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """A launcher of MPI takes its ranks with it when it is asked to; nobody of its session outlives the second call."""
    for kind, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def _reason(said: IO[bytes]) -> str:
    """The last line that speaks of an error, else the last one."""
    said.seek(0)
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith(("File", "raise"))]
    return ([*lines[-1:], *errors] or ["it said nothing"])[-1][:200]
