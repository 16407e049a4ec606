"""Rendezvous of the ranks that one launcher started: at a URL, over MPI or over PMI, as the launcher offers.

``init`` uses it, and ``torch.distributed.init_process_group`` where the caller gives no address.
"""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from . import mpi_exchange, pmi, url_rendezvous
from .detect_launcher import Launcher, detect
from .network import loopback_interface, ports
from .secret import remember
from .text_exchange import rendezvous_by_text
from .url_rendezvous import Rendezvous

__all__: list[str] = []


def rendezvous_of(launcher: Launcher, timeout: float) -> Rendezvous:
    """Complete the rendezvous within ``timeout`` seconds.

    Afterwards gloo and NCCL use the network interface that leads to the ranks, unless the user has set one.
    """
    ports()  # raises if the variable is wrong, before anything starts
    if launcher.url is None and launcher.medium:
        rendezvous = _by_medium(launcher, timeout)
    else:
        rendezvous = url_rendezvous.rendezvous_at_url(launcher, timeout)
    remember(rendezvous.secret)
    one_host = len(set(rendezvous.hosts)) == 1
    if interface := loopback_interface() if one_host else rendezvous.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # groups that are created later read it, too
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return rendezvous


def _by_medium(launcher: Launcher, timeout: float) -> Rendezvous:
    """Complete the rendezvous over MPI or PMI."""
    name = launcher.name.partition(" of ")[0]  # without the name of the MPI: the library itself names it
    try:
        if launcher.medium == "MPI":
            world = mpi_exchange.Mpi(launcher)
            return rendezvous_by_text(world, timeout, f"{name} ({world.library})")
        return rendezvous_by_text(pmi.connect(launcher, time.monotonic() + timeout), timeout, name)
    except TimeoutError as error:
        raise TimeoutError(
            f"init: rank {launcher.rank} ({launcher.name}): the rendezvous over {launcher.medium} did not complete "
            f"within {timeout:g} s: {error}"
        ) from error


def torch_handler(
    url: str, timeout: timedelta = timedelta(minutes=5), **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Rendezvous handler of ``torch.distributed.init_process_group`` under a launcher: yields store, rank and size."""
    launcher = detect()
    if url.startswith("mpi://") and launcher.medium != "MPI":
        raise ValueError(
            f"init_process_group: init_method={url!r} is for ranks that mpirun has started, and this one was started "
            f"by {launcher.name}; start it with: mpirun -n 4 python program.py"
        )
    rendezvous = rendezvous_of(launcher, timeout.total_seconds())
    rank, size = rendezvous.rank, len(rendezvous.hosts)
    requested = dict(parse_qsl(urlsplit(url).query))
    for name, actual in (("rank", rank), ("world_size", size)):
        if int(requested.get(name, -1)) not in (-1, actual):  # after the rendezvous, so that the other ranks fail, too
            raise ValueError(
                f"init_process_group: {name} is {requested[name]}, but {launcher.name} says {actual}; omit {name}"
            )
    try:
        yield rendezvous.store, rank, size
    finally:  # torch ends the generator when the group is created and torch has installed its own hook
        if launcher.medium == "MPI":
            mpi_exchange.abort_on_exception()
