"""Meet under mpirun: MPI connects the ranks already, so the address of the store travels over MPI.

Two things go wrong in practice. The mpirun of one MPI may start ranks that load another: each then believes to be
alone, and four jobs of one rank run side by side; so the sizes are compared. And a rank that ends by an exception waits
in MPI_Finalize for ranks that wait for it in a collective; so an uncaught exception aborts the job.

MPI's calls have no deadline: we use those that return at once, and ask until they are done.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import torch.distributed as dist

from .deadline import until
from .detect import Launcher, detect
from .hosts import host_id
from .network import LOOPBACK, addresses, interface_towards, listen
from .rendezvous import Meeting, connect

__all__ = ["abort_on_exception", "is_launcher", "library_name", "meet", "rendezvous"]

_WIDTH = 1024  # bytes of a text between ranks: a host's name, or where rank 0 listens
_SECONDS_PER_ADDRESS = 3.0


def meet(launcher: Launcher, timeout: float) -> Meeting:
    deadline = time.monotonic() + timeout
    MPI = _load(launcher)
    world = MPI.COMM_WORLD
    library = library_name(MPI.Get_library_version())
    if world.Get_size() != launcher.size:
        raise RuntimeError(_mismatch(launcher, library, world.Get_size()))
    abort_on_exception()
    hosts = _all_texts(world, host_id(), deadline)
    one_host = len(set(hosts)) == 1
    server = listen(LOOPBACK if one_host else "", 0) if launcher.rank == 0 else None
    offer = [server.getsockname()[1], [LOOPBACK] if one_host else addresses(), secrets.token_hex(8)] if server else None
    port, candidates, name = json.loads(_text_of_rank_0(world, json.dumps(offer), deadline))
    address = candidates[0] if one_host else _reachable_by_all(MPI, port, candidates, deadline)
    store = connect(address, port, launcher.size, deadline - time.monotonic(), server.detach() if server else None)
    return Meeting(dist.PrefixStore(name, store), hosts, interface_towards(address, port), f"mpirun ({library})")


def is_launcher() -> bool:
    """Whether mpirun has started this process, and nothing within it."""
    return detect().name.startswith("mpirun")


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=5), **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """How ``torch.distributed.init_process_group`` asks to meet: store, rank, size."""
    launcher = detect()
    if not is_launcher():
        raise ValueError(
            f"init_process_group: init_method={url!r} is for ranks that mpirun has started, and this one was started "
            f"by {launcher.name}; start it with: mpirun -n 4 python program.py"
        )
    store = meet(launcher, timeout.total_seconds()).store
    told = dict(parse_qsl(urlsplit(url).query))
    for name, found in (("rank", launcher.rank), ("world_size", launcher.size)):
        if int(told.get(name, -1)) not in (-1, found):  # now that we have met, this ends the others, too
            raise ValueError(
                f"init_process_group: {name} is {told[name]}, and {found} by {launcher.name}; leave it out"
            )
    try:
        yield store, launcher.rank, launcher.size
    finally:  # torch lets go of us when the group is made and its own hook is in place
        abort_on_exception()


def library_name(version: str) -> str:
    """Name and number, out of all that an MPI says of itself.

    >>> library_name("MPICH Version:      5.0.2\\nMPICH Release date: ...")
    'MPICH 5.0.2'
    >>> library_name("Open MPI v5.0.8, package: Open MPI root@host Distribution, ident: 5.0.8, ...")
    'Open MPI 5.0.8'
    >>> library_name("Intel(R) MPI Library 2021.13 for Linux* OS")
    'Intel MPI 2021.13'
    """
    name = next(
        (name for name in ("Open MPI", "MPICH", "Intel(R) MPI") if name in version), version.split("\n")[0][:40]
    )
    number = re.search(r"\d+\.[\d.]*\w*", version)
    return f"{name} {number.group()}".replace("(R)", "") if number else name


def _load(launcher: Launcher) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter: mpi4py found no MPI library to load
        raise RuntimeError(
            f"init: {launcher.name} started {launcher.size} ranks ({', '.join(launcher.evidence)}), but mpi4py, over "
            f"which they meet, is not usable: {error}. Remedy: pip install mpi4py, built for that MPI; or use torchrun"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def _mismatch(launcher: Launcher, library: str, size: int) -> str:
    wanted = launcher.name.removeprefix("mpirun of ")
    return (
        f"init: {launcher.name} started {launcher.size} ranks ({', '.join(launcher.evidence)}), but mpi4py has loaded "
        f"{library}, which sees {size}: another MPI than the launcher's. Remedy: start the ranks with the mpirun of "
        f"{library} (is it in {sys.prefix}/bin?), or pip install an mpi4py for {wanted}"
    )


def _all_texts(world: Any, text: str, deadline: float) -> list[str]:
    every = np.zeros((world.Get_size(), _WIDTH), np.uint8)
    until(world.Iallgather(_packed(text), every).Test, deadline, "the hosts of all ranks")
    return [_unpacked(row) for row in every]


def _text_of_rank_0(world: Any, text: str, deadline: float) -> str:
    buffer = _packed(text)
    until(world.Ibcast(buffer, root=0).Test, deadline, "the address of rank 0")
    return _unpacked(buffer)


def _reachable_by_all(MPI: Any, port: int, candidates: list[str], deadline: float) -> str:
    """A host may have addresses that others cannot route to: try them all, and take one that works for everybody."""
    world = MPI.COMM_WORLD
    mine = np.array([world.Get_rank() == 0 or _answers(address, port) for address in candidates], np.uint8)
    everybody = np.zeros_like(mine)
    until(world.Iallreduce(mine, everybody, op=MPI.MIN).Test, deadline, "the address that all ranks can reach")
    if not everybody.any():
        raise RuntimeError(
            f"init: no address of rank 0 ({', '.join(candidates)}; port {port}) can be reached by all ranks; "
            "open the network between the hosts, or start with torchrun and --master-addr"
        )
    return candidates[int(everybody.argmax())]


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _SECONDS_PER_ADDRESS).close()
    except OSError:
        return False
    return True


def _packed(text: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    raw = text.encode()
    if len(raw) > _WIDTH:
        raise ValueError(f"init: {text[:40]!r}... is longer than the {_WIDTH} bytes that ranks exchange")
    return np.frombuffer(raw.ljust(_WIDTH, b"\0"), np.uint8).copy()


def _unpacked(row: "np.ndarray[Any, np.dtype[np.uint8]]") -> str:
    return row.tobytes().rstrip(b"\0").decode()


def abort_on_exception() -> None:
    """Call it again after anything that installs a hook of its own, as torch does: the last to show must abort."""
    global _outermost
    from mpi4py import MPI

    show = sys.excepthook

    def show_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if _outermost is show_and_abort and MPI.COMM_WORLD.Get_size() > 1:
            for number, stream in ((1, sys.stdout), (2, sys.stderr)):
                stream.flush()
                _until_read(number)
            MPI.COMM_WORLD.Abort(1)

    _outermost = sys.excepthook = show_and_abort


def _until_read(descriptor: int) -> None:
    """MPICH's launcher heeds an abort at once, and loses what was written before it but not yet read."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        with contextlib.suppress(TimeoutError):
            until(
                lambda: not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))), time.monotonic() + 1.0, "a reader"
            )


_outermost: Callable[..., None] | None = None
