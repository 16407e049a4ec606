"""Rendezvous over MPI or PMI, which exchange short texts between the ranks: one text is the address of the store.

No address has to be derived or configured: rank 0 listens on a free port, and offers every address of its host.
"""

import json
import secrets
import socket
import time
from typing import NamedTuple, Protocol

import torch.distributed as dist

from .hosts import host_id
from .network import LOOPBACK, address_towards, addresses, interface_of, join_address, split_address
from .secret import REMEDY, Secret, provided_by_user
from .served import answers, connect, served_store
from .url_rendezvous import Rendezvous

__all__: list[str] = []

_SECONDS_TO_CONNECT = 3.0  # to all addresses of rank 0, at the same time


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
    # 1. Are the ranks on one host? Rank 0 then serves the store at the loopback address, else at all addresses.
    deadline = time.monotonic() + timeout
    hosts = exchange.all_texts(host_id(), deadline, "the hosts of all ranks")
    one_host = len(set(hosts)) == 1
    # 2. Rank 0 offers addresses and a secret to all.
    own_offer = _offer(one_host) if exchange.rank == 0 else None
    texts = exchange.all_texts(json.dumps(own_offer), deadline, "the address of rank 0")
    port, candidates, attempt, key = _Offer(*json.loads(texts[0]))
    of_launcher = Secret(bytes.fromhex(key), launcher, is_of_launcher=True) if key else None
    secret = of_launcher or _same_secret(exchange, attempt, deadline)
    # 3. Connect at an address that all ranks can reach.
    address = candidates[0] if one_host else _reachable_by_all(exchange, port, candidates, deadline)
    store = connect(address, port, exchange.size, deadline - time.monotonic())
    interface = interface_of(address_towards(address, port))
    return Rendezvous(dist.PrefixStore(attempt, store), exchange.rank, hosts, interface, launcher, secret)


class _Offer(NamedTuple):
    """What rank 0 sends to all ranks."""

    port: int  # of its store
    addresses: list[str]  # of its host
    attempt: str  # a name for this rendezvous
    key: str  # the secret in hexadecimal digits; empty if the user provides the secret


def _offer(one_host: bool) -> _Offer:
    key = "" if provided_by_user() else secrets.token_hex(32)
    _, port = split_address(served_store(LOOPBACK if one_host else "")[1])
    return _Offer(port, [LOOPBACK] if one_host else addresses(), secrets.token_hex(8), key)


def _same_secret(exchange: TextExchange, attempt: str, deadline: float) -> Secret:
    """The user's secret of this rank; RuntimeError on all ranks, if one of them has another secret than rank 0."""
    own = provided_by_user()
    codes = exchange.all_texts(own.code("text exchange", attempt) if own else "", deadline, "the codes of all ranks")
    for rank, code in enumerate(codes):
        if code != codes[0]:
            what = "another secret than rank 0" if code else "no secret, and rank 0 has one"
            raise RuntimeError(f"init: rank {exchange.rank}: rank {rank} of {exchange.size} has {what}; {REMEDY}")
    assert own, "its code is the same as rank 0's"
    return own


def _reachable_by_all(exchange: TextExchange, port: int, candidates: list[str], deadline: float) -> str:
    """Return the first address of rank 0 that every rank can connect to: some may not be routed from every host."""
    reached = [True] * len(candidates) if exchange.rank == 0 else _reached(candidates, port, deadline)
    own_answers = "".join(str(int(is_reached)) for is_reached in reached)
    answers_of_ranks = exchange.all_texts(own_answers, deadline, "the address that all ranks can reach")
    for address, *answers_of_address in zip(candidates, *answers_of_ranks, strict=True):
        if set(answers_of_address) == {"1"}:
            return str(address)
    raise RuntimeError(
        f"init: no address of rank 0 ({', '.join(candidates)}; port {port}) can be reached by all ranks; "
        "open the network between the hosts, or start with torchrun and --master-addr"
    )


def _reached(candidates: list[str], port: int, deadline: float) -> list[bool]:
    """Whether this rank can connect to each address. A name may stand for several addresses, and one is sufficient."""
    resolved: list[set[str]] = []
    for candidate in candidates:
        try:
            infos = socket.getaddrinfo(candidate, port, type=socket.SOCK_STREAM)
        except OSError:  # this host does not know the name
            infos = []
        resolved.append({join_address(str(info[4][0]), port) for info in infos})
    seconds = min(_SECONDS_TO_CONNECT, deadline - time.monotonic())
    is_listening = answers(set().union(*resolved), seconds)
    return [any(is_listening.get(address) for address in of_candidate) for of_candidate in resolved]
