"""The price of data that travels in the messages of the agreement on a call, instead of by a schedule after it.

A group that spans hosts agrees on each call: the leaders of the hosts, their first ranks, exchange a message each
(``csrc/net/multi_host.h``). Data can be added to these messages, so that it needs no further ones. The link then
carries more than by the best schedule in some collectives: a host that broadcasts sends all data to every other host.

Example: two hosts of two ranks at 1 Gbit/s. Each host sends the sum of its ranks to the other; what it adds to the
agreement is the time of these bytes on the link, and of the additions of the leader.

>>> from dist_prims.schedules.topology import Level
>>> cluster = Topology((2, 2), Level(1e-6, 1e-10), Level(50e-6, 8e-9), gamma=1e-10)
>>> round(1e6 * added_seconds("all_reduce", 8192, cluster)), round(1e6 * added_seconds("all_reduce", 65536, cluster))
(69, 551)
"""

from __future__ import annotations

import numpy as np

from .topology import Topology

__all__: list[str] = []

MOST_BYTES, MOST_HOSTS = 1 << 17, 4  # as in csrc/net/multi_host.h; between more hosts only 1 KB, of some collectives

_ONE_BLOCK = ("all_reduce", "reduce", "broadcast")  # a rank has one block; elsewhere one for each rank
_REDUCE = ("all_reduce", "reduce", "reduce_scatter")
_ADDRESSED = ("reduce_scatter", "scatter", "all_to_all")  # each rank gets a block of its own
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")


def added_seconds(collective: str, nbytes: float, topology: Topology) -> float:
    """The seconds that the data adds to an agreement in which every host sends one message to every other.

    The root of a collective is assumed on the smallest host, for which the others have most.
    """
    ranks = np.array(topology.hosts, np.float64)
    hosts, root = len(ranks), int(ranks.argmin())
    block = nbytes if collective in _ONE_BLOCK else nbytes / topology.size
    sources = np.ones(hosts) if collective in (*_REDUCE, *_FROM_ROOT) else ranks
    messages = block * np.outer(sources, ranks if collective in _ADDRESSED else np.ones(hosts))  # [from, to]
    if collective in _FROM_ROOT:
        messages[np.arange(hosts) != root] = 0
    if collective in _TO_ROOT:
        messages[:, np.arange(hosts) != root] = 0
    between = messages * (1 - np.eye(hosts))
    sent, received = between.sum(axis=1), between.sum(axis=0)
    crowded = np.where((between > 0).sum(axis=0) > 1, received, 0)
    link = (np.maximum(sent, received) * topology.outer.beta + crowded * topology.congestion).max()
    # A leader writes the messages, also the one for its own host, and combines those that it receives.
    packed = messages.sum(axis=1) if collective in _ADDRESSED else messages.max(axis=1)
    combined = messages.sum(axis=0)
    spent = (packed + combined) * topology.inner.beta
    if collective in _REDUCE:
        spent = (packed * ranks + combined) * topology.gamma
    if topology.one_machine and topology.cores:
        served = max(link, between.sum() * topology.core.beta / topology.cores)
        return float(served + max(spent.max(), spent.sum() / topology.cores))
    return float(link + spent.max())


def fits(collective: str, nbytes: float, topology: Topology) -> bool:
    """Whether so much data can travel with an agreement in which every host sends one message to every other."""
    most = nbytes * max(topology.hosts) if collective == "all_to_all" else nbytes
    return len(topology.hosts) <= MOST_HOSTS and most <= MOST_BYTES
