"""Rendezvous by exchange of short texts, over MPI or PMI: one of the texts is the address of the store.

No address has to be derived or configured: rank 0 listens on a free port, and offers every address of its host.
"""

import json
import secrets
import socket
import time
from typing import Protocol

import torch.distributed as dist

from .hosts import host_id
from .network import LOOPBACK, address_towards, addresses, interface_of, split_address
from .secret import REMEDY, Secret, provided_by_user
from .served import connect, served_store
from .url_rendezvous import Rendezvous

__all__: list[str] = []

_SECONDS_PER_ADDRESS = 3.0


class TextExchange(Protocol):
    """An all-gather of texts among the ranks of a job, as a launcher offers it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_texts(self, text: str, deadline: float, awaited: str) -> list[str]:
        """Return the texts by rank. At the deadline raise a TimeoutError that names what was ``awaited``."""


def rendezvous_by_text(exchange: TextExchange, timeout: float, launcher: str) -> Rendezvous:
    """Complete the rendezvous within ``timeout`` seconds; ``launcher`` is its name for messages."""
    deadline = time.monotonic() + timeout
    hosts = exchange.all_texts(host_id(), deadline, "the hosts of all ranks")
    one_host = len(set(hosts)) == 1
    offer = _offer(one_host) if exchange.rank == 0 else None
    port: int
    candidates: list[str]
    port, candidates, name, key = json.loads(
        exchange.all_texts(json.dumps(offer), deadline, "the address of rank 0")[0]
    )
    of_launcher = Secret(bytes.fromhex(key), launcher, is_of_launcher=True) if key else None
    secret = of_launcher or _same_secret(exchange, name, deadline)
    address = candidates[0] if one_host else _reachable_by_all(exchange, port, candidates, deadline)
    store = connect(address, port, exchange.size, deadline - time.monotonic())
    interface = interface_of(address_towards(address, port))
    return Rendezvous(dist.PrefixStore(name, store), exchange.rank, hosts, interface, launcher, secret)


def _offer(one_host: bool) -> tuple[int, list[str], str, str]:
    """Port and addresses of rank 0's store, a name for this attempt, and a secret: empty, if the user provides one."""
    key = "" if provided_by_user() else secrets.token_hex(32)
    _, port = split_address(served_store(LOOPBACK if one_host else "")[1])
    return port, [LOOPBACK] if one_host else addresses(), secrets.token_hex(8), key


def _same_secret(exchange: TextExchange, name: str, deadline: float) -> Secret:
    """The user's secret of this rank; RuntimeError on all ranks, if one of them has another secret than rank 0."""
    own = provided_by_user()
    codes = exchange.all_texts(own.code("text exchange", name) if own else "", deadline, "the codes of all ranks")
    for rank, code in enumerate(codes):
        if code != codes[0]:
            what = "another secret than rank 0" if code else "no secret, and rank 0 has one"
            raise RuntimeError(f"init: rank {exchange.rank}: rank {rank} of {exchange.size} has {what}; {REMEDY}")
    assert own, "its code is that of rank 0"
    return own


def _reachable_by_all(exchange: TextExchange, port: int, candidates: list[str], deadline: float) -> str:
    """Return the first address of rank 0 that every rank can connect to: some may not be routed from every host."""
    mine = "".join(str(int(exchange.rank == 0 or _can_connect(address, port))) for address in candidates)
    every = exchange.all_texts(mine, deadline, "the address that all ranks can reach")
    for address, *answers in zip(candidates, *every, strict=True):
        if set(answers) == {"1"}:
            return str(address)
    raise RuntimeError(
        f"init: no address of rank 0 ({', '.join(candidates)}; port {port}) can be reached by all ranks; "
        "open the network between the hosts, or start with torchrun and --master-addr"
    )


def _can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _SECONDS_PER_ADDRESS).close()
    except OSError:
        return False
    return True
