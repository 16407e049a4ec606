"""What a type checker knows of the collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch
from typing_extensions import assert_type
import dist_prims
from dist_prims.collectives.call import AnyWork

data, parts, flag = torch.ones(2), [torch.ones(2)], bool(input())
for work in (
    dist_prims.all_reduce(data, async_op=True, output=data),
    dist_prims.reduce_scatter(data, parts, async_op=True),
    dist_prims.all_gather(parts, data, async_op=True, algorithm="ring"),
    dist_prims.all_to_all(data, data, async_op=True),
    dist_prims.scan(data, async_op=True),
    dist_prims.barrier(async_op=True),
    dist_prims.broadcast(data, 0, async_op=True),
    dist_prims.reduce(data, 0, async_op=True),
    dist_prims.gather(data, parts, 0, async_op=True),
    dist_prims.scatter(data, parts, 0, async_op=True),
):
    assert_type(work, AnyWork)
    work.wait()
assert_type(dist_prims.all_reduce(data, async_op=flag), AnyWork | None)
"""


@pytest.mark.timeout(600)
def test_an_asynchronous_call_returns_a_work(tmp_path: Path) -> None:
    """Its type was that of a work or None, so ``work.wait()`` was an error of the type checker."""
    (tmp_path / "program.py").write_text(CODE)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
