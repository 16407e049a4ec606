"""A fuzz of the backend on one host: groups, calls, callbacks, faults, signals and forks in random order.

    python tests/helpers/fuzz_backend.py --seed 7 --rounds 20
    python tests/helpers/fuzz_backend.py --seed 7 --first 13 --rounds 1 --verbose     # one round again
    python tests/helpers/fuzz_backend.py --seed 7 --first 13 --rounds 1 --steps 4-9   # a part of it
    python tests/helpers/fuzz_backend.py --without signals,fork --seed 7              # without these steps

A round is 2 to 4 ranks that follow one script, drawn from the seed: see fuzzing/script.py. Results are compared with
what they must be; what must fail has to fail soon, and may write nothing afterwards. A rank that hangs shows its
stacks. After a round no process, mapping or descriptor is left. The scheduler does not follow the seed, so a
round may have to be run a few times before it fails again. The extension is the one that Python finds: for one under a
sanitizer see test_sanitized_backend.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from typing import IO, NoReturn

import torch
import torch._dynamo  # once here, and not in each rank
import torch.distributed as dist
from fuzzing import calls, faults, groups, processes, script
from fuzzing.rank import LIMIT, Rank

import dist_prims.backend.extension

__all__ = ["main"]

_MODULES = (calls, groups, faults, processes)  # they register their steps
_REPORT = re.compile(r"(WARNING: ThreadSanitizer|AddressSanitizer:|runtime error:)")
_LINES_SHOWN = 60
_SECONDS_TO_DUMP = 20.0  # for a rank that hangs to show its stacks
_PR_SET_PDEATHSIG = 1
_SECONDS_TO_FOLLOW = 1.0  # for the others, when one has failed


@dataclass
class Round:
    """One round in its parent: the ranks, and what they wrote."""

    script: script.Script
    chosen: range
    without: tuple[str, ...]
    deadline: float = LIMIT * 2
    pids: list[int] = field(default_factory=list)
    logs: list[IO[bytes]] = field(default_factory=list)

    def run(self) -> str:
        """Run it; what went wrong, or nothing."""
        store = os.memfd_create("fuzz store")
        files, shm = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
        try:
            for number in range(self.script.size):
                self.start(number, f"/proc/{os.getpid()}/fd/{store}")
            wrong = self.wait()
        finally:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # and what it started
            for log in self.logs:
                log.close()
            os.close(store)
        left = sorted(name for name in set(os.listdir("/dev/shm")) - shm if "dist_prims" in name)
        if left:
            wrong += f"left in /dev/shm: {left}\n"
        if len(os.listdir("/proc/self/fd")) > files - 1:
            wrong += "descriptors are left in the parent\n"
        return wrong

    def start(self, number: int, store: str) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by run()
        self.logs.append(log)
        pid = os.fork()
        if pid == 0:
            self.run_rank(number, store, log)
        self.pids.append(pid)

    def run_rank(self, number: int, store: str, log: IO[bytes]) -> NoReturn:
        """What a rank does."""
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)
            os.dup2(log.fileno(), 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            faulthandler.dump_traceback_later(self.deadline, exit=True, file=2)
            rank = Rank(number, self.script.size, self.without, "asan" in os.environ.get("LD_PRELOAD", ""))
            signal.signal(signal.SIGALRM, lambda *_: None)
            self.run_script(rank, store)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(status)

    def run_script(self, rank: Rank, store: str) -> None:
        rank.join(dist.FileStore(store, self.script.size))
        for number, name in enumerate(self.script.steps):
            if number not in self.chosen:
                continue
            rank.private = self.script.private(number, rank.number)
            rank.trace(f"step {number}: {name}")
            script.STEPS[name][1](rank, self.script.shared(number))
            rank.between_steps()
        rank.trace(f"the end: {self.script.ending}")
        rank.private = self.script.private(-1, rank.number)
        script.ENDINGS[self.script.ending][1](rank, self.script.shared(-1))
        rank.leave()

    def wait(self) -> str:
        """Reap the ranks, and kill them all when one fails: the others would only fail after it."""
        limit = time.monotonic() + self.deadline + _SECONDS_TO_DUMP
        ended: dict[int, int] = {}
        bad: list[int] = []
        while len(ended) < len(self.pids) and not bad and time.monotonic() < limit:
            time.sleep(0.005)
            for number, pid in enumerate(self.pids):
                found, status = os.waitpid(pid, os.WNOHANG) if number not in ended else (0, 0)
                if found:
                    ended[number] = os.waitstatus_to_exitcode(status)
                    if ended[number] not in self.expected(number):
                        bad.append(number)
        if bad:
            time.sleep(_SECONDS_TO_FOLLOW)
        for number, pid in enumerate(self.pids):
            if number not in ended:
                bad.append(number)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                ended[number] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [self.text(number) for number in range(len(self.pids))]
        bad += [number for number, text in enumerate(texts) if _REPORT.search(text) and number not in bad]
        shown = ""
        for number in bad:
            shown += f"---- rank {number} ended with {ended[number]}\n{_tail(texts[number])}\n"
        return shown

    def expected(self, number: int) -> tuple[int, ...]:
        return (0, -signal.SIGKILL) if self.script.ending in ("killed", "dies-in-make") else (0,)

    def text(self, number: int) -> str:
        self.logs[number].seek(0)
        return self.logs[number].read().decode(errors="replace")


def _tail(text: str) -> str:
    """The last lines of a rank, and all that a sanitizer reports."""
    found = _REPORT.search(text)
    lines = text.splitlines()
    start = max(0, len(lines) - _LINES_SHOWN)
    if found:
        start = min(start, max(0, text[: found.start()].count("\n") - 10))
    return "\n".join(lines[start:])


def _numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    assert _MODULES
    known = [*script.STEPS, *script.ENDINGS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--length", type=int, default=15, help="steps of a round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--steps", type=_numbers, default=range(1 << 30), help="only these of each round, as 4-9")
    parser.add_argument("--without", default="", help=f"leave these out: {', '.join(known)}")
    parser.add_argument("--only", default="", help="of the steps, these alone")
    parser.add_argument("--deadline", type=float, default=2 * LIMIT, help="seconds of a round")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks of each round do")
    given = parser.parse_args(words)
    without, only = ([name for name in text.split(",") if name] for text in (given.without, given.only))
    if unknown := {*without, *only} - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    given.without = (*without, *(name for name in script.STEPS if only and name not in only))
    return given


def main(words: list[str] | None = None) -> int:
    given = _arguments(words)
    torch.set_num_threads(1)  # a forked rank has no other threads of OpenMP
    extension = dist_prims.backend.extension.extension()
    print(f"seed {given.seed}, extension {extension.__file__}", flush=True)
    began = time.monotonic()
    failed = run = 0
    for number in range(given.first, given.first + given.rounds):
        if time.monotonic() - began > given.seconds:
            break
        plan = script.write(given.seed, number, given.length, given.without)
        one = Round(plan, given.steps, given.without, given.deadline)
        since = time.monotonic()
        wrong = one.run()
        run += 1
        how = "FAILED" if wrong else "ok"
        words_of = f"{plan.size} ranks, {' '.join(plan.steps)}, {plan.ending}"
        print(f"round {number} of seed {given.seed}: {how} in {time.monotonic() - since:.1f} s: {words_of}", flush=True)
        if wrong:
            failed += 1
            print(wrong, flush=True)
    print(f"{run} rounds of seed {given.seed} in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
