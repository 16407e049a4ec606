"""A fuzz of the backend on one host: groups, calls, callbacks, faults, signals and forks in random order.

    python tests/helpers/fuzz_backend.py --seed 7 --rounds 20
    python tests/helpers/fuzz_backend.py --seed 7 --first 13 --rounds 1 --verbose   # one round again
    python tests/helpers/fuzz_backend.py --seed 7 --without signals,fork            # without these steps

A round is 2 to 4 ranks that follow one script, drawn from the seed: see fuzzing/script.py. Results are compared with
what they must be; what must fail has to fail soon, and may write nothing afterwards. A rank that hangs shows its
stacks. After a round no process, mapping or descriptor is left. The scheduler does not follow the seed, so a
round may have to be run a few times before it fails again. The extension is the one that Python finds: for one under a
sanitizer see test_sanitized_backend.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time

import torch._dynamo  # noqa: F401 - imported once here, and not in each rank
import torch.distributed as dist
from fuzzing import faults, steps  # noqa: F401 - they register their steps
from fuzzing.rank import LIMIT, Rank
from fuzzing.script import ENDINGS, STEPS, Script, write

import dist_prims
import dist_prims.backend.extension

__all__ = ["main"]

_LENGTH = 15  # steps of a round
_WITH_DEATHS = ("exits", "killed", "killed_in_make")


def run_round(script: Script, is_verbose: bool) -> None:
    before = open_files(), shared_files()
    min_ranks = script.size - 1 if script.ending in _WITH_DEATHS else None
    with tempfile.TemporaryDirectory() as folder:
        arguments = script, f"{folder}/store", is_verbose
        dist_prims.spawn(run_rank, script.size, arguments, init=False, timeout=2 * LIMIT, min_ranks=min_ranks)
    after = open_files(), shared_files()
    assert after == before, f"left behind by the ranks: {before} before, {after} after"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "dist_prims" in name}


def run_rank(script: Script, store: str, is_verbose: bool) -> None:
    rank = Rank(int(os.environ["RANK"]), script.size, is_verbose)
    try:
        rank.join(dist.FileStore(store, script.size))
        for number, name in enumerate(script.steps):
            rank.private = script.private(number, rank.number)
            rank.trace(f"step {number}: {name}")
            STEPS[name][1](rank, script.shared(number))
            rank.between_steps()
        rank.private = script.private(-1, rank.number)
        rank.trace(f"the end: {script.ending}")
        rank.wait_for()
        ENDINGS[script.ending][1](rank, script.shared(-1))
        signal.setitimer(signal.ITIMER_REAL, 0)
        rank.leave()
    except BaseException:
        print(*rank.lines, sep="\n", file=sys.stderr, flush=True)
        raise


def arguments(words: list[str] | None) -> argparse.Namespace:
    known = [*STEPS, *ENDINGS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--without", default="", help=f"leave these out, with commas: {', '.join(known)}")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks do")
    options = parser.parse_args(words)
    options.names = set(known) - set(options.without.split(","))
    return options


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    os.environ["DIST_PRIMS_SLOT_BYTES"] = str(1 << 16)  # large is soon several segments
    extension = dist_prims.backend.extension.extension()
    print(f"seed {options.seed}, extension {extension.__file__}", flush=True)
    began, number = time.monotonic(), options.first
    while number < options.first + options.rounds and time.monotonic() - began < options.seconds:
        script = write(options.seed, number, _LENGTH, options.names)
        print(f"round {number} of seed {options.seed}: {script.size} ranks, {*script.steps, script.ending}", flush=True)
        run_round(script, options.verbose)
        number += 1
    print(f"{number - options.first} rounds of seed {options.seed} in {time.monotonic() - began:.0f} s, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
