"""No deprecated part of torch: not in the Python that calls it, and not in the C++ that is compiled against it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
import torch.distributed as dist
import dist_prims
import dist_prims.ops
from dist_prims.training.compression import PowerSGD

def body():
    dist.barrier()
    group = dist.new_group(pg_options=dist_prims.BackendOptions(all_reduce="ring"))
    tensor = torch.ones(8)
    for algorithm in (None, "ring"):
        dist_prims.all_reduce(tensor, group=group, algorithm=algorithm)
        dist_prims.all_gather(torch.ones(16), tensor, algorithm=algorithm)
        dist_prims.reduce_scatter(torch.ones(4), tensor, algorithm=algorithm)
        dist_prims.broadcast(tensor, 0, algorithm=algorithm and "binomial")
        dist_prims.all_to_all(torch.ones(8), tensor)
    dist_prims.ops.all_reduce(tensor.requires_grad_(), "avg").sum().backward()
    part = dist.group.WORLD.split_group([0, 1])
    part.allreduce([torch.ones(3)]).wait()
    model = torch.nn.Linear(4, 2)
    averager = dist_prims.GradientAverager(model, compress=PowerSGD(rank=1))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    averager.remove()

if __name__ == "__main__":
    dist_prims.spawn(body, 2, backend="dist_prims", timeout=90)
    print("no warning")
"""


@pytest.mark.slow
def test_python_calls_nothing_deprecated(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    categories = ("DeprecationWarning", "FutureWarning")
    command = [sys.executable, *(option for each in categories for option in ("-W", f"error::{each}")), str(program)]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": ",".join(f"error::{each}" for each in categories),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("no warning")
    assert not re.search("deprecat", done.stderr), done.stderr  # those of C++, which are not exceptions


def test_warnings_of_deprecated_declarations_are_on() -> None:
    """-Wall includes -Wdeprecated-declarations, unless an option after it switches it off."""
    build = (ROOT / "dist_prims/backend/compile_native.py").read_text()
    assert '"-Wall"' in build
    assert "-Wno-deprecated" not in build
    for source in (ROOT / "csrc").rglob("*.[ch]*"):
        assert "Wdeprecated" not in source.read_text(), f"{source} switches the warnings off"
