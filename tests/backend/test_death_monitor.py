"""Which processes of other hosts have ended."""

from __future__ import annotations

from dist_prims.backend.death_monitor import RemoteProcesses
from dist_prims.rendezvous.served import listening_address

REFUSED = "127.0.0.1:1"


def test_each_process_is_asked_although_a_probe_asks_some_of_them() -> None:
    addresses = {rank: listening_address("127.0.0.1") if rank % 2 else REFUSED for rank in range(150)}
    processes = RemoteProcesses(addresses, between_probes=0)
    found = [len(processes.ended()) for _ in range(4)]
    assert found == [32, 64, 75, 75]
    assert processes.ended() == [*range(0, 150, 2)]


def test_no_process_is_asked_before_the_first_probe_is_due() -> None:
    assert RemoteProcesses({1: REFUSED}, between_probes=60).ended() == []
