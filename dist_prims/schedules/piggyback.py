"""The price of data that travels in the messages of the agreement on a call, instead of by a schedule after it.

Before each call the ranks of a group on several hosts agree that all of them make the same call. For this agreement the
leaders of the hosts, their first ranks, exchange a message each (``csrc/net/multi_host.h``). The data of the collective
can be added to these messages (*piggyback*), and then needs no further messages. In some collectives the links then
carry more than by the best schedule: a host that broadcasts sends all data to every other host.

Example: two hosts of two ranks at 1 Gbit/s. Each host sends the sum of its ranks to the other host. The data adds the
time of these bytes on the link, and of the additions of the leader:

>>> from dist_prims.schedules.topology import Level
>>> cluster = Topology((2, 2), Level(1e-6, 1e-10), Level(50e-6, 8e-9), gamma=1e-10)
>>> round(1e6 * added_seconds("all_reduce", 8192, cluster)), round(1e6 * added_seconds("all_reduce", 65536, cluster))
(69, 551)
"""

from __future__ import annotations

import numpy as np

from .topology import Topology

__all__: list[str] = []

# As in csrc/net/multi_host.h. Between more hosts only some collectives can travel so, and at most 1 KB.
MOST_BYTES, MOST_HOSTS = 1 << 17, 4

_ONE_BLOCK = ("all_reduce", "reduce", "broadcast")  # the data of a rank is one block; elsewhere a block for each rank
_REDUCE = ("all_reduce", "reduce", "reduce_scatter")
_ADDRESSED = ("reduce_scatter", "scatter", "all_to_all")  # each rank gets a block of its own
_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")


def added_seconds(collective: str, nbytes: float, topology: Topology) -> float:
    """The seconds that data of ``nbytes`` adds to an agreement in which every host sends one message to every other.

    The root of a collective is assumed to be on the smallest host: then the other hosts have the most data for it, or
    need the most data from it.
    """
    # 1. The bytes messages[sending host, receiving host]; the diagonal is the data that stays on its host.
    ranks = np.array(topology.hosts, np.float64)
    hosts, root = len(ranks), int(ranks.argmin())
    block = nbytes if collective in _ONE_BLOCK else nbytes / topology.size
    sources = np.ones(hosts) if collective in (*_REDUCE, *_FROM_ROOT) else ranks
    messages = block * np.outer(sources, ranks if collective in _ADDRESSED else np.ones(hosts))
    if collective in _FROM_ROOT:
        messages[np.arange(hosts) != root] = 0
    if collective in _TO_ROOT:
        messages[:, np.arange(hosts) != root] = 0
    # 2. The time of the slowest link.
    between = messages * (1 - np.eye(hosts))
    sent, received = between.sum(axis=1), between.sum(axis=0)
    crowded = np.where((between > 0).sum(axis=0) > 1, received, 0)
    link = (np.maximum(sent, received) * topology.outer.beta + crowded * topology.congestion).max()
    # 3. The time of each leader: it writes its messages, also the one for its own host, and reads the ones it receives.
    # A rank without others on its host does so in the memory of the caller. Otherwise each rank copies its data to
    # shared memory first and its result from there, and a message of the inner level is two copies as well.
    written = messages.sum(axis=1) if collective in _ADDRESSED else messages.max(axis=1)
    read = messages.sum(axis=0)
    leader = (written + read) * topology.inner.beta * np.where(ranks > 1, 1, 0.5)
    if collective in _REDUCE:  # to write a message, the leader adds up the data of its ranks
        leader = (written * ranks + read) * topology.gamma
    # 4. Hosts on one machine share its cores, for their messages as well as for the work of the leaders.
    if topology.one_machine and topology.cores:
        link = max(link, between.sum() * topology.core.beta / topology.cores)
        return float(link + max(leader.max(), leader.sum() / topology.cores))
    return float(link + leader.max())


def fits(collective: str, nbytes: float, topology: Topology) -> bool:
    """Whether data of ``nbytes`` can travel with an agreement in which every host sends one message to every other."""
    most = nbytes * max(topology.hosts) if collective == "all_to_all" else nbytes
    return len(topology.hosts) <= MOST_HOSTS and most <= MOST_BYTES
