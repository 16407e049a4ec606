"""What all tests share.

Modules that are imported at first use are imported once here, and not by each rank that a test forks: those of the
package, and torch's compiler, which the first optimizer, profiler or nested tensor of a process imports, for seconds
where many do it at once. Programs that tests start find compiled modules: an environment may ask Python to write none,
and then each of several hundred processes would compile the package.
"""

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from dist_prims.schedules import algorithms

pytest_plugins = ["costs", "native_stacks", "tiers"]

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for name in ("torch._dynamo", "dist_prims.backend.create", "dist_prims.collectives"):
    importlib.import_module(name)
algorithms("all_reduce")  # imports the files of all algorithms

# TCPStore asks for the name of each address, on the client and on the server. If a reply of the DNS is lost, the C
# library waits 5 s: longer than some limits of tests, which failed by chance. This process and the ranks that it forks
# look into /etc/hosts only; programs that tests start wait 1 s.
if hasattr(library := ctypes.CDLL(None), "__nss_configure_lookup"):  # glibc
    library.__nss_configure_lookup(b"hosts", b"files myhostname")
os.environ["RES_OPTIONS"] = "timeout:1"

# Examples are the same in each run: no test fails by chance. More examples belong to the long tests.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Ranks that tests fork do not collect the garbage of this process. The destructor of a store or of a group joins its
# thread, which a forked process does not have. A thread that the forked process has started may have the same handle,
# and is then joined twice: a rank waited without end, or crashed. Such ranks compute with one thread: the threads of
# OpenMP do not exist in a forked process, and an operation on a large tensor waited for them.
os.register_at_fork(after_in_child=gc.freeze)
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collapse the memory of this process into huge pages, where Linux can do it: to fork a rank, it then copies the
    page tables of a few megabytes, and not the page tables of all modules of torch."""
    collapse, page = 25, 1 << 21  # MADV_COLLAPSE of Linux 6.1
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        begin, end = (int(each, 16) for each in span.split("-"))
        begin, end = -(-begin // page) * page, end // page * page
        if access == "rw-p" and name in ("", "[heap]") and begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), collapse)


# Failing assertions of the helpers show both values, as those of the tests do.
pytest.register_assert_rewrite(*(path.stem for path in (Path(__file__).parent / "helpers").glob("*.py")))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: the default tests wait so often that one worker more than cores keeps the cores busy; the slow ones
    compute."""
    return (os.cpu_count() or 1) + (config.option.tier in ("default", "smoke"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Restore the environment after each test: ``init()`` sets variables, which the ranks of later tests inherited."""
    before = dict(os.environ)
    yield
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture
def alone() -> Iterator[None]:
    """The default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As spawned ranks have: the order of additions depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
