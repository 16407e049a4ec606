"""What tests/conftest.py does for all tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

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
