"""Meet the other ranks of the launcher, in the way that it offers: at a URL, over MPI or over PMI.

``init`` does so, and ``torch.distributed.init_process_group`` where it is not told an address.
"""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from . import mpi, pmi, rendezvous
from .detect import Launcher, detect
from .network import loopback_interface
from .rendezvous import Meeting
from .text_exchange import meet_by

__all__ = ["handler", "meet"]


def meet(launcher: Launcher, timeout: float) -> Meeting:
    """The meeting; from then on engines keep to the interface that leads to the ranks, unless the user has chosen."""
    if launcher.url is None and launcher.medium:
        meeting = _meet_over(launcher, timeout)
    else:
        meeting = rendezvous.meet(launcher, timeout)
    one_host = len(set(meeting.hosts)) == 1
    if interface := loopback_interface() if one_host else meeting.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # groups that are made later read this, too
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    return meeting


def _meet_over(launcher: Launcher, timeout: float) -> Meeting:
    name = launcher.name.partition(" of ")[0]  # the library is named by itself
    try:
        if launcher.medium == "MPI":
            world = mpi.Mpi(launcher)
            return meet_by(world, timeout, f"{name} ({world.library})")
        return meet_by(pmi.connect(launcher, time.monotonic() + timeout), timeout, name)
    except TimeoutError as error:
        raise TimeoutError(
            f"init: rank {launcher.rank} ({launcher.name}) did not meet the others over {launcher.medium} within "
            f"{timeout:g} s: {error}"
        ) from error


def handler(url: str, timeout: timedelta = timedelta(minutes=5), **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The rendezvous of ``torch.distributed.init_process_group`` under a launcher: store, rank, size."""
    launcher = detect()
    if url.startswith("mpi://") and launcher.medium != "MPI":
        raise ValueError(
            f"init_process_group: init_method={url!r} is for ranks that mpirun has started, and this one was started "
            f"by {launcher.name}; start it with: mpirun -n 4 python program.py"
        )
    meeting = meet(launcher, timeout.total_seconds())
    rank, size = meeting.rank, len(meeting.hosts)
    told = dict(parse_qsl(urlsplit(url).query))
    for name, found in (("rank", rank), ("world_size", size)):
        if int(told.get(name, -1)) not in (-1, found):  # now that we have met, this ends the others, too
            raise ValueError(
                f"init_process_group: {name} is {told[name]}, and {found} by {launcher.name}; leave it out"
            )
    try:
        yield meeting.store, rank, size
    finally:  # torch lets go of us when the group is made and its own hook is in place
        if launcher.medium == "MPI":
            mpi.abort_on_exception()
