"""Run programs that show defects, and report which defects show.

    python tests/helpers/reproducers.py FOLDER [WORD ...]

FOLDER contains the programs by area (backend/, schedules/, ecosystem/, training/). With words, only programs whose path
contains one of the words run, and their output is printed. The status is 1 if a defect shows, or if a program is
missing, did not end, or stopped because this version of the library lacks what it uses.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_DEADLINE = 120  # seconds for a program
_DID_NOT_RUN = re.compile(
    "ImportError|ModuleNotFoundError|SyntaxError|AttributeError|NameError|can't open file|did not end"
)


def _contains(pattern: str) -> Callable[[str], bool]:
    return lambda output: re.search(pattern, output) is not None


def _lacks(pattern: str, times: int = 1) -> Callable[[str], bool]:
    return lambda output: len(re.findall(pattern, output)) < times


def _server_spins_or_grows(output: str) -> bool:
    calls = re.search(r"(\d+) calls of _accept", output)
    memory = re.search(r"memory: (\d+) MB, with 400 strangers (\d+) MB", output)
    return not calls or not memory or int(calls[1]) > 100 or int(memory[2]) - int(memory[1]) > 64


def _call_numbers_differ(output: str) -> bool:
    of_error, of_doctor = (set(re.findall(pattern, output)) for pattern in (r"call number (\d+)", r"call (\d+)"))
    return not of_error or of_error != of_doctor


def _gradients_are_inaccurate(output: str) -> bool:
    errors = [(float(ours), float(reference)) for ours, reference in re.findall(r"\[([\d.]+), ([\d.]+)\]", output)]
    return len(errors) < 5 or any(ours > 1.5 * reference + 0.002 for ours, reference in errors)


def _top_k_diverges(output: str) -> bool:
    losses = {
        (momentum, rate, compress): float(loss)
        for momentum, rate, compress, loss in re.findall(r"^(\S+) (\S+) (\S+) \[([\w.]+)", output, re.MULTILINE)
    }
    runs = [key for key in losses if key[2] == "topk"]
    return not runs or any(not losses[key] < 2 * losses[key[0], key[1], "None"] + 0.1 for key in runs)


_PYTHON = ("{python}", "{file}")
_SHELL = ("sh", "{file}")


def _torchrun(ranks: int, *arguments: str) -> tuple[str, ...]:
    launcher = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    return (*launcher, str(ranks), "{file}", *arguments)


# The program, its command, and whether the defect shows in what the command prints.
_CASES: tuple[tuple[str, tuple[str, ...], Callable[[str], bool]], ...] = (
    ("backend/overlapping_buffers.py", _PYTHON, _contains("dist_prims .*WRONG")),
    ("backend/float8_kinds.py", _PYTHON, _lacks("MismatchError")),
    ("backend/slot_bytes_overflow.py", _PYTHON, _contains("SIGSEGV|signal 11|TypeError|incompatible")),
    ("backend/register_server_without_descriptors.py", _PYTHON, _server_spins_or_grows),
    ("backend/stopped_while_made_between_hosts.py", _PYTHON, _lacks("CommTimeoutError.*rank 1", 2)),
    ("schedules/stale_registration.py", _torchrun(3, "gloo"), _lacks(r"version 2.*\[3.0, 30.0\]|MismatchError", 3)),
    (
        "schedules/stale_registration.py",
        _torchrun(3, "dist_prims"),
        _lacks(r"version 2.*\[3.0, 30.0\]|MismatchError", 3),
    ),
    ("schedules/named_hierarchical_hosts.py", _torchrun(6), _lacks(r"\(3, 3\).* same bits")),
    ("schedules/partial_algorithm.py", _torchrun(4, "raise"), _lacks(r"4\.0", 4)),
    ("schedules/partial_algorithm.py", _torchrun(4, "wrong"), _lacks(r"4\.0", 4)),
    ("schedules/exit_zero.sh", _SHELL, _contains("rc 0")),
    ("schedules/show_wrong.sh", _SHELL, _contains("rc 0|Traceback|EncodeError|unhashable")),
    ("ecosystem/dump_folder.py", _torchrun(2), _contains("folder exists: False")),
    ("ecosystem/call_numbers.py", _torchrun(3), _call_numbers_differ),
    ("training/01_averager_and_ddp_halve_gradients.py", _PYTHON, _contains("DEFECT")),
    ("training/03_pipeline_of_tied_stages.py", _PYTHON, _contains("DEFECT")),
    ("training/04_pipeline_detached_loss.py", _PYTHON, _contains("DEFECT")),
    ("training/05_pipeline_after_ctrl_c.py", _PYTHON, _contains("TimeoutError|KeyError|ValueError|TypeError")),
    ("training/06_join_of_two_averagers.py", _PYTHON, _lacks("'right', 'right'")),
    ("training/07_averager_of_dtensor.py", _PYTHON, _contains("aten.cat|sharding strategy")),
    ("training/09_ring_attention_math_bf16.py", _PYTHON, _gradients_are_inaccurate),
    ("training/10_topk_with_momentum_diverges.py", _PYTHON, _top_k_diverges),
    ("training/11_parameter_data_of_another_shape.py", _PYTHON, _contains("DEFECT")),
)


def _run(command: tuple[str, ...], file: Path) -> str:
    """Run a program in an empty folder, and return what it printed."""
    words = [word.format(python=sys.executable, file=file.resolve()) for word in command]
    bin_folder = str(Path(sys.executable).parent)
    with tempfile.TemporaryDirectory() as folder:
        dump = str(Path(folder, "missing", "dump"))
        path = os.pathsep.join([bin_folder, os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "DIST_PRIMS_DUMP": dump}
        ended = subprocess.run(  # timeout kills the launcher; torchrun's ranks end with it
            ["timeout", "-k", "5", str(_DEADLINE), *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        output = ended.stdout
        if file.name == "call_numbers.py":
            doctor = [sys.executable, "-m", "dist_prims", "doctor", "--dump", dump]
            output += subprocess.run(doctor, stdout=subprocess.PIPE, text=True, check=False, timeout=_DEADLINE).stdout
        return output + ("\nThe program did not end." if ended.returncode in (124, 137) else "")


def main(folder: str, *words: str) -> int:
    cases = [case for case in _CASES if not words or any(word in case[0] for word in words)]
    missing = sorted({name for name, *_ in cases if not Path(folder, name).is_file()})
    if missing or not cases:
        raise SystemExit(f"{folder} lacks {', '.join(missing)}" if missing else f"no program contains {words}")
    count = 0
    for name, command, shows in cases:
        output = _run(command, Path(folder, name))
        is_shown = shows(output) or _DID_NOT_RUN.search(output) is not None
        count += is_shown
        print(
            f"{'SHOWS' if is_shown else 'gone ':5}  {name} {' '.join(command[command.index('{file}') + 1 :])}",
            flush=True,
        )
        if is_shown and words:
            print(output)
    print(f"{count} defects show")
    return int(count > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
