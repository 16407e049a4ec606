"""Text exchange over MPI, under mpirun. MPI connects the ranks already, so it transfers the address of the store.

The module handles two failures that occur in practice:

- The mpirun of one MPI may start ranks that load another MPI. Each rank then has a world of one, and four jobs of one
  rank run side by side. ``Mpi`` therefore compares the size with the size of the launcher. Where no variable contains
  the size it compares the rank: rank 0 alone cannot detect the failure then, and the other ranks end the job.
- A rank that ends by an exception waits in MPI_Finalize for ranks that wait for it in a collective. An uncaught
  exception therefore aborts the job.

MPI's blocking calls have no deadline. The module uses nonblocking calls and polls them.
"""

import os
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from .deadline import until, until_output_is_read
from .detect_launcher import Launcher

__all__: list[str] = []

_is_mpi_inherited = False
_outermost: Callable[..., None] | None = None  # the excepthook that aborts the job


def is_mpi_inherited() -> bool:
    """Whether this process was forked from a process that uses MPI. The threads of that MPI are not in this process."""
    return _is_mpi_inherited


def _note_inherited_mpi() -> None:
    global _is_mpi_inherited
    MPI = sys.modules.get("mpi4py.MPI")
    _is_mpi_inherited = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()


os.register_at_fork(after_in_child=_note_inherited_mpi)


class Mpi:
    """Text exchange over MPI.COMM_WORLD."""

    def __init__(self, launcher: Launcher) -> None:
        MPI = _load(launcher)
        self.library = library_name(MPI.Get_library_version())
        self._world = MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        if self.rank != launcher.rank if launcher.size is None else self.size != launcher.size:
            raise RuntimeError(_mismatch(launcher, self.library, self.rank, self.size))
        abort_on_exception()

    def all_texts(self, text: str, deadline: float, awaited: str) -> list[str]:
        """See TextExchange."""
        raw = np.frombuffer(text.encode(), np.uint8)
        lengths = np.zeros(self.size, np.int32)
        until(self._world.Iallgather(np.array([len(raw)], np.int32), lengths).Test, deadline, awaited)
        texts = np.zeros(lengths.sum(), np.uint8)
        until(self._world.Iallgatherv(raw, [texts, lengths]).Test, deadline, awaited)
        return [part.tobytes().decode() for part in np.split(texts, lengths.cumsum()[:-1])]


def library_name(version: str) -> str:
    """Extract name and version number from the text of MPI_Get_library_version.

    >>> library_name("MPICH Version:      5.0.2\\nMPICH Release date: ...")
    'MPICH 5.0.2'
    >>> library_name("Open MPI v5.0.8, package: Open MPI root@host Distribution, ident: 5.0.8, ...")
    'Open MPI 5.0.8'
    >>> library_name("Intel(R) MPI Library 2021.13 for Linux* OS")
    'Intel MPI 2021.13'
    """
    name = next(
        (name for name in ("Open MPI", "MVAPICH", "MPICH", "Intel(R) MPI") if name in version),
        version.split("\n")[0][:40],
    )
    number = re.search(r"\d+\.[\d.]*\w*", version)
    return f"{name} {number.group()}".replace("(R)", "") if number else name


def _load(launcher: Launcher) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: mpi4py found no MPI library to load
        raise RuntimeError(
            f"init: {_started(launcher)}, but mpi4py, which the rendezvous needs, is not usable: {error}. Remedy: pip "
            "install mpi4py, built for that MPI; or use torchrun"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def _mismatch(launcher: Launcher, library: str, rank: int, size: int) -> str:
    mpi_of_launcher = launcher.name.partition(" of ")[2] or launcher.name
    return (
        f"init: {_started(launcher)}, but mpi4py has loaded {library}, which sees rank {rank} of {size}: another MPI "
        f"than the launcher's. Remedy: start the ranks with the mpirun of {library} (is it in {sys.prefix}/bin?), or "
        f"pip install an mpi4py for {mpi_of_launcher}"
    )


def _started(launcher: Launcher) -> str:
    ranks = "several ranks" if launcher.size is None else f"{launcher.size} ranks"
    return f"{launcher.name} started {ranks} ({', '.join(launcher.evidence)})"


def abort_on_exception() -> None:
    """Make an uncaught exception abort the MPI job.

    Call the function again after another library has installed an excepthook of its own, as torch does: the outermost
    hook must abort.
    """
    global _outermost
    from mpi4py import MPI

    show = sys.excepthook  # of torch, or of an earlier call

    def show_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if _outermost is show_and_abort and MPI.COMM_WORLD.Get_size() > 1:
            until_output_is_read()
            MPI.COMM_WORLD.Abort(1)

    _outermost = sys.excepthook = show_and_abort
