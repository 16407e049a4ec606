"""The stores that processes serve while they run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from netns import needs_hosts

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


ONE_PORT_WHICH_IS_TAKEN = """
import socket, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
open("/proc/sys/net/ipv4/ip_local_port_range", "w").write("1024 1024")
taken = socket.create_server(("127.0.0.1", 1024))
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "address", "says"),
    [("", "[::1]:9", "{}"), (ONE_PORT_WHICH_IS_TAKEN, "127.0.0.1:1024", "this host has no port for a connection")],
    ids=["no source address", "no port"],
)
def test_only_a_host_without_ports_has_no_port(prepare: str, address: str, says: str) -> None:
    """The kernel reports both by EADDRNOTAVAIL. A host whose interface has no address was said to have no port."""
    code = f"{prepare}\nfrom dist_prims.rendezvous.served import answers\nprint(answers([{address!r}], seconds=1))"
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert says in ran.stdout + ran.stderr
