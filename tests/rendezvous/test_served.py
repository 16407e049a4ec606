"""The stores that processes serve while they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dist_prims.rendezvous import served

SECONDS_OF_A_LOST_REPLY = 5.0  # the timeout of the resolver of the C library


def test_a_lost_reply_of_the_dns_does_not_repeat_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it connects, torch asks the DNS for the name of the address, within the time of the attempt. The first
    attempt had 0.5 s, so each lost reply failed it, and the next attempt asked again: ``shrink`` took 18.8 s once."""
    attempts: list[float] = []
    module: Any = served
    connect = module.connect

    def slow(host: str, port: int, size: int, timeout: float) -> Any:
        attempts.append(timeout)
        if timeout < SECONDS_OF_A_LOST_REPLY:
            raise dist.DistNetworkError("The client socket has timed out")
        return connect(host, port, size, timeout)

    _, address = served.served_store("127.0.0.1")
    monkeypatch.setattr(served, "connect", slow)
    served.open_store(address, 1, timeout=60).set("key", "value")
    assert len(attempts) == 1
