"""MPI as the transport between hosts, also for a torch that was built without MPI.

mpi4py has loaded and initialised an MPI library in the process. The transport must use the same library: two MPIs in
one process would not know about each other. The calls of MPI are therefore in a library of this package that is linked
to no MPI, and its symbols are resolved when it is loaded, by the MPI on which mpi4py's own module depends. There is one
such library for each *family*, the MPIs of one ABI of handles: MPICH with Intel MPI and MVAPICH, and Open MPI.
``setup.py`` builds the libraries for which it finds an ``mpicc``; another is compiled at first use.
"""

import atexit
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..rendezvous.detect_launcher import detect
from ..rendezvous.mpi_exchange import is_mpi_inherited
from .compile_native import FAMILIES, Library, mpi, mpi_file, mpi_headers
from .extension import extension
from .native_libraries import NativeLibrary

__all__: list[str] = []

_LARGEST_COUNT = 2**31 - 1  # MPI counts in ints
# The family of an MPI, by a word of its version.
_FAMILIES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "mpich", "MVAPICH": "mpich", "CRAY": "mpich"}


def make(ranks: Sequence[int], timeout: timedelta) -> Any:
    """Create the transport of a group of these ranks of MPI.COMM_WORLD, in their order. All of them must call this.

    ``timeout`` limits the wait for the other ranks.
    """
    if reason := unusable_reason():
        raise RuntimeError(f"no group over MPI: {reason}")
    MPI = _mpi4py()
    me, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if me not in ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"rank {me} of MPI.COMM_WORLD, which has {size}, cannot make a group of {list(ranks)}: a group must "
            "contain the calling rank, and no rank twice"
        )
    return _library().make(ranks=list(ranks), timeout=timeout, largest_count=_LARGEST_COUNT)


def group_unusable_reason(ranks: Sequence[int], rank: int) -> str:
    """Return why MPI cannot be used for a group of these ranks in this process; an empty string if it can.

    ``rank`` is the rank of this process in the group. A working MPI is not sufficient: in a process that mpirun has not
    started, but which has initialised MPI, the world has one rank.
    """
    if reason := unusable_reason():
        return reason
    world = _mpi4py().COMM_WORLD
    me, size = world.Get_rank(), world.Get_size()
    if me == ranks[rank] and max(ranks) < size:
        return ""
    return f"it is rank {me} of {size} in MPI.COMM_WORLD, but the group expects rank {ranks[rank]}"


def unusable_reason() -> str:
    """Return why MPI cannot be used in this process, with a remedy; an empty string if it can.

    In a process that mpirun has not started, the function neither initialises MPI, which would have one rank, nor
    imports mpi4py, which may initialise it.

    >>> unusable_reason()
    'this process was started by python, not by mpirun; start it with: mpirun -n 4 python program.py'
    """
    if is_mpi_inherited():
        return "this process was forked from one that uses MPI; start it by spawn or forkserver instead of fork"
    imported = sys.modules.get("mpi4py.MPI")
    if imported is None or not imported.Is_initialized():
        try:
            launcher = detect()
        except ValueError as error:  # variables of a launcher are wrong: a reason, since a caller may need no launcher
            return str(error)
        if launcher.medium != "MPI":
            return (
                f"this process was started by {launcher.name}, not by mpirun; "
                "start it with: mpirun -n 4 python program.py"
            )
    try:
        MPI = _mpi4py()
        if not MPI.Is_initialized():
            MPI.Init_thread()
        reason: str = _library().unusable()
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library to load
        return str(error)
    return reason


def _mpi4py() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"mpi4py does not load: {error}; pip install mpi4py") from error
    return MPI


@functools.cache
def _library() -> Any:
    """Load the library of this package for the MPI that mpi4py has loaded."""
    MPI = _mpi4py()
    version = MPI.Get_library_version()
    family = next((family for name, family in _FAMILIES.items() if name in version), None)
    if family is None:
        raise ImportError(
            f"mpi4py has loaded an MPI with neither MPICH's nor Open MPI's ABI: {version.split(chr(10))[0]}"
        )
    # MPI is loaded already, with symbols that only mpi4py can use: make them global for the library.
    ctypes.CDLL(MPI.__file__, os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    adapter = extension()
    file = native(family).path()
    try:
        library: Any = adapter.MpiLibrary(str(file))
    except ImportError as error:
        raise ImportError(f"the library of dist_prims for {FAMILIES[family]} does not load: {error}") from error
    atexit.register(library.close)
    _close_before_finalize(MPI, library.close)
    return library


def native(family: str) -> NativeLibrary:
    """The library of this package for a family of MPI."""

    def recipe(csrc: Path) -> Library:
        headers = mpi_headers().get(family)
        if headers is None:
            raise ImportError(
                f"the library of dist_prims for {FAMILIES[family]} was not built, and no mpicc of that MPI is found to "
                "compile it; put one on the PATH, or name it: DIST_PRIMS_MPICC=/path/to/mpicc"
            )
        return mpi(csrc, family, headers)

    return NativeLibrary(f"the library of dist_prims for {FAMILIES[family]}", mpi_file(family), recipe)


def _close_before_finalize(MPI: Any, close: Callable[[], None]) -> None:
    """Make a program's call of ``MPI.Finalize()`` stop the thread of the library first, by ``close``.

    MPI also notifies the library itself, by an attribute of MPI.COMM_SELF, wherever the call comes from. But MPICH
    stops locking before the notification: a thread of the library that is within a call of MPI at that moment leaves a
    lock behind. Finalize then fails to destroy the lock, and the process aborts.
    """
    finalize = MPI.Finalize

    @functools.wraps(finalize)
    def close_and_finalize() -> None:
        close()
        finalize()

    MPI.Finalize = close_and_finalize
