"""What tests/conftest.py does for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


def stores(count: int) -> list[Any]:
    """TCPStores, each of which has a thread."""
    return [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(count)]


def test_a_forked_rank_does_not_collect_what_is_garbage_of_the_tests() -> None:
    """Such a rank waited without end in the destructor of a store, or crashed later: see conftest.py."""
    was_enabled = gc.isenabled()
    gc.disable()
    garbage: list[Any] = [stores(6)]
    garbage.append(garbage)
    del garbage
    if (child := os.fork()) == 0:
        signal.alarm(20)  # its default action ends the process
        own = stores(6)
        gc.collect()
        del own
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if was_enabled:
        gc.enable()
    gc.collect()
    assert status == 0


def test_the_summary_counts_processes_and_groups_of_each_test(tmp_path: Path) -> None:
    tests = tmp_path / "test_two_ranks.py"
    tests.write_text(
        "import dist_prims, subprocess\n"
        "def test_ranks(): dist_prims.spawn(lambda: None, 2, timeout=60)\n"
        "def test_program(): subprocess.run(['true'], check=True)\n"
    )
    options = ["-p", "costs", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", str(tests)]
    with (tmp_path / "output").open("w") as file:
        if (child := os.fork()) == 0:  # a fork has imported torch
            os.chdir(tmp_path)
            for name in [name for name in os.environ if name.startswith("PYTEST")]:
                del os.environ[name]
            os.dup2(file.fileno(), 1)
            sys.stdout = os.fdopen(1, "w")
            pytest.main(options)
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
    output = (tmp_path / "output").read_text()
    rows = {line.split()[-1].split("::")[-1]: line.split()[1:4] for line in output.splitlines() if "::" in line}
    assert rows == {"test_ranks": ["1", "2", "2"], "test_program": ["1", "1", "0"]}, output
