"""A backend of ``torch.distributed`` over MPI, in a torch that was built without it.

mpi4py has an MPI library in the process and has initialised it; our extension uses that one, or there would be two MPIs
which know nothing of each other. So it is linked to none: its calls are resolved when it is loaded, by the library that
mpi4py's own module depends on. There is an extension for each way in which an MPI's handles are made, MPICH's (which
Intel MPI and MVAPICH share) and Open MPI's; ``setup.py`` builds those for which it finds an ``mpicc``.
"""

import atexit
import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..launch.detect import detect

__all__ = ["lacks", "make", "why_not"]

_LARGEST_COUNT = 2**31 - 1  # MPI counts in ints
_FAMILIES = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "mpich", "MVAPICH": "mpich", "CRAY": "mpich"}


def make(ranks: Sequence[int], timeout: timedelta, *, largest_count: int = _LARGEST_COUNT) -> Any:
    """The backend for a group of these ranks of MPI.COMM_WORLD, in their order; each of them must call this.

    Data of more than ``largest_count`` bytes or elements goes in several pieces.
    """
    if reason := why_not():
        raise RuntimeError(f"no group over MPI: {reason}")
    MPI = _mpi4py()
    me, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if me not in ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < size for rank in ranks):
        raise ValueError(
            f"rank {me} of MPI.COMM_WORLD, which has {size}, cannot make a group of {list(ranks)}: a group holds its "
            "maker and each rank once"
        )
    return _extension().MpiBackend(ranks=list(ranks), timeout=timeout, largest_count=largest_count)


def lacks(ranks: Sequence[int], rank: int) -> str:
    """Why MPI cannot serve a group of these ranks on this process, which is number ``rank`` of them; an empty string if
    it can.

    A working MPI is not enough: in a process that no mpirun has started, but which has imported mpi4py, it has a world
    of one.
    """
    if reason := why_not():
        return reason
    world = _mpi4py().COMM_WORLD
    me, size = world.Get_rank(), world.Get_size()
    if me == ranks[rank] and max(ranks) < size:
        return ""
    return f"it is rank {me} of {size} in MPI.COMM_WORLD, and the group takes it for rank {ranks[rank]}"


def why_not() -> str:
    """Why there is no MPI to work with here, and what to do about it; an empty string if there is.

    A process that no mpirun has started is left as it is: importing mpi4py there would initialise an MPI of one rank.

    >>> why_not()
    'this process was started by python, not by mpirun; start it with: mpirun -n 4 python program.py'
    """
    if "mpi4py.MPI" not in sys.modules:
        try:
            launcher = detect()
        except ValueError as error:  # the caller may have made a group all the same, with a store of its own
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
        reason: str = _extension().unusable()
    except (ImportError, RuntimeError) as error:  # the latter: mpi4py found no MPI library to load
        return str(error)
    return reason


def _mpi4py() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"mpi4py does not load: {error}; pip install mpi4py") from error
    return MPI


@functools.cache
def _extension() -> Any:
    """The extension for the MPI that mpi4py has loaded."""
    MPI = _mpi4py()
    version = MPI.Get_library_version()
    family = next((family for name, family in _FAMILIES.items() if name in version), None)
    if family is None:
        raise ImportError(
            f"mpi4py has loaded an MPI of neither MPICH's nor Open MPI's kind: {version.split(chr(10))[0]}"
        )
    # The library is in the process already, where only mpi4py sees it: let the extension see it, too.
    ctypes.CDLL(MPI.__file__, os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    name = f"_mpi_{family}"
    remedy = (
        "build dist_prims again with an mpicc of that MPI on the PATH, or named by DIST_PRIMS_MPICC=/path/to/mpicc: "
        "pip install --no-build-isolation --force-reinstall --no-deps <the source of dist_prims>"
    )
    try:
        extension: Any = importlib.import_module(f"dist_prims.{name}")
    except ImportError as error:
        raise ImportError(f"the extension dist_prims.{name} does not load: {error}; {remedy}") from error
    if torch.__version__ != extension.built_for:
        raise ImportError(
            f"the extension dist_prims.{name} was built for torch {extension.built_for}, and this is "
            f"{torch.__version__}; {remedy}"
        )
    atexit.register(extension.close)  # while Python is whole: callbacks of what is under way may need it
    _close_before_finalize(MPI, extension.close)
    return extension


def _close_before_finalize(MPI: Any, close: Callable[[], None]) -> None:
    """A program's own ``MPI.Finalize()`` stops our thread first.

    The library would tell us, by an attribute of MPI.COMM_SELF, and so it does where something else than Python
    finalises. But MPICH stops locking before it tells: a thread of ours that is inside a call at that moment leaves a
    lock behind, which Finalize then fails to destroy, and the process is aborted.
    """
    finalize = MPI.Finalize

    @functools.wraps(finalize)
    def close_and_finalize() -> None:
        close()
        finalize()

    MPI.Finalize = close_and_finalize
