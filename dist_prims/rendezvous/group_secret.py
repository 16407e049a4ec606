"""The secret of a group that ``torch.distributed`` makes, by the store that its ranks share."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from .._output import print_notice
from .secret import REMEDY, Secret, choose, has_rendezvous, remembered

__all__: list[str] = []


def secret_of_group(store: Any, has_several_launchers: bool) -> Secret | None:
    """The secret of a group whose ranks share ``store``; None: they are not authenticated.

    If a launcher has started all ranks, and they met by its rendezvous, it is the secret of that rendezvous. Where
    several launchers have started the ranks, some of them do not know that secret.
    """
    secret = None if has_several_launchers else remembered()
    return secret or choose(address_of_store(store))


def would_lose_secret(address: str) -> bool:
    """Whether the ranks have a secret of their launcher, and would have none in a group with other ranks that is made
    at this address.

    The secret of this user for one host does not count: ranks on several hosts cannot have it.
    """
    secret = remembered()
    return secret is not None and secret.is_of_launcher and choose(address) is None


def announce_missing_secret(store: Any) -> None:
    """Print that the default group is not authenticated, on rank 0 that makes it; ``init`` has a line of its own."""
    is_quiet = os.environ.get("DIST_PRIMS_QUIET") == "1" or dist.is_initialized() or has_rendezvous()
    if not is_quiet and address_of_store(store) is not None:
        print_notice(f"the ranks are not authenticated; {REMEDY}")


def address_of_store(store: Any) -> str | None:
    """The address of the server of a TCPStore; None for another store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None
