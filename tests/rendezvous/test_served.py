"""The stores that processes serve while they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from netns import needs_hosts

from dist_prims.rendezvous import served

SECONDS_OF_A_LOST_REPLY = 5.0  # the timeout of the resolver of the C library


def test_a_lost_reply_of_the_dns_does_not_repeat_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a client connects, torch asks the DNS for its name, within the time of the attempt. The first attempt had
    0.5 s, so each lost reply failed it, and the next attempt asked again: ``shrink`` took 18.8 s once."""
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


DNS_WITHOUT_REPLIES = """
import socket, subprocess, sys, threading, time
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dns.bind(("127.0.0.1", 53))
asked = []

def drop():
    while True:
        dns.recv(2000)
        asked.append(time.monotonic())

threading.Thread(target=drop, daemon=True).start()
from dist_prims.rendezvous.served import open_store, served_store
open_store(served_store("127.0.0.1")[1], 1, timeout=60).set("key", "value")
assert len(asked) > 1, "torch asks for no names"
print(*(later - earlier for earlier, later in zip(asked, asked[1:])))
"""


@needs_hosts
def test_a_lost_reply_of_the_dns_takes_a_second(tmp_path: Path) -> None:
    """The C library asks again after 5 s by default. A rank took so long to serve the store of a smaller group, with a
    limit of 2 s: the others left it out."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1")
    isolated = ["unshare", "--map-root-user", "--net", "--mount", sys.executable, "-c", DNS_WITHOUT_REPLIES]
    environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    ran = subprocess.run(
        [*isolated, tmp_path / "resolv.conf"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    seconds = [float(each) for each in ran.stdout.split()]
    assert max(seconds) < SECONDS_OF_A_LOST_REPLY - 1, seconds


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
