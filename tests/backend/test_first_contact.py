"""Errors of a group that cannot be made because its ranks do not reach each other: firewalls, ports, names of hosts."""

from __future__ import annotations

import re
import socket
import sys

import pytest
import torch.distributed as dist
from netns import cluster, needs_hosts
from ranks import span

from dist_prims.errors import CommError
from dist_prims.rendezvous.network import KEEPALIVE, join_address, keep_alive

SECRET = {"DIST_PRIMS_SECRET": "x" * 32, "DIST_PRIMS_QUIET": "1"}
PROGRAM = """
import os, socket, subprocess, sys, time, torch, torch.distributed as dist, dist_prims
from dist_prims.errors import CommError
def begin(rank, size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT="29500")
    dist_prims.init("dist_prims", timeout=5)
def say(error): print(f"{type(error).__name__} {error}\\n", end="", flush=True)
"""

# A host that lets only the port of the store pass.
BEHIND_FIREWALL = """
for rule in ("add pref 9 lookup local", "del pref 0", "add pref 1 iif eth0 ipproto tcp dport 20000-20100 blackhole"):
    subprocess.run(["ip", "rule", *rule.split()], check=True)
os.environ["MASTER_ADDR"] = "10.0.0.1"
try:
    begin(int(os.environ["HOST"]), 2)
except CommError as error:
    say(error)
time.sleep(3)  # rank 0 serves the store
"""


@needs_hosts
@pytest.mark.slow
def test_a_firewall_that_opens_the_port_of_the_store_alone_is_a_cause() -> None:
    """The error called for a look at the other rank alone."""
    env = {**SECRET, "DIST_PRIMS_PORTS": "20000-20100"}
    with cluster(2, 1, [sys.executable, "-c", PROGRAM + BEHIND_FIREWALL], how="each", env=env) as job:
        said = job.result().stdout.splitlines()
    assert len(said) == 2, said
    for line in said:
        assert "died" not in line, line
        assert re.search(r"has not replied to rank [01] on host host[01] in time", line), line
        assert "let the ports DIST_PRIMS_PORTS=20000-20100 pass" in line, line


def test_a_refused_connection_names_the_address_and_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(host: str, port: int) -> str:
        return "127.0.0.1:1"

    def body() -> str:
        made = closed if dist.get_rank() else join_address
        monkeypatch.setattr("dist_prims.backend.tcp_endpoint.join_address", made)
        try:
            dist.new_group()
        except CommError as error:
            return str(error)
        return "no error"

    text = span("a b", body)[0]
    assert re.search(r"rank 1 on host b cannot be reached, in .*\(127\.0\.0\.1:1: Connection refused", text), text
    assert "died" not in text
    assert text.endswith("let the ports of a range pass, and set DIST_PRIMS_PORTS to it"), text


@needs_hosts
@pytest.mark.slow
def test_hosts_with_one_name_are_a_cause() -> None:
    """DIST_PRIMS_HOST_ID promises that ranks share memory."""
    program = (
        PROGRAM
        + """
os.environ["MASTER_ADDR"] = "10.0.0.1"
try:
    begin(int(os.environ["HOST"]), 2)
except CommError as error:
    say(error)
time.sleep(3)
"""
    )
    env = {**SECRET, "DIST_PRIMS_HOST_ID": "node"}
    with cluster(2, 1, [sys.executable, "-c", program], how="each", env=env) as job:
        said = job.result().stdout.splitlines()
    cause = "is on another host: DIST_PRIMS_HOST_ID=node is set on both, and must be different on each host"
    assert len(said) == 2, said
    assert all(cause in line for line in said), said


# Ranks 0 and 1 on one host, 2 and 3 on another, all in one network namespace, whose last ports rank 3 takes.
WITHOUT_PORTS = """
def take_all_ports(kind):
    subprocess.run(["sysctl", "-qw", "net.ipv4.ip_local_port_range=50000 50003"], check=True)
    sockets = [socket.socket(socket.AF_INET, kind) for _ in range(4)]
    for each in sockets:
        each.bind(("", 0))
    return sockets
os.environ["MASTER_ADDR"] = "10.0.0.1"
rank = next((each for each in (1, 2, 3) if os.fork() == 0), 0)
os.environ["DIST_PRIMS_HOST_ID"] = "aabb"[rank]
begin(rank, 4)
dist.barrier()
kept = [take_all_ports(kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) if rank == 3]
dist.barrier()
try:
    dist.all_to_all_single(torch.empty(400_000), torch.ones(400_000))
except CommError as error:
    say(error)
if rank == 3:
    del os.environ["GLOO_SOCKET_IFNAME"]
    try:
        dist_prims.rendezvous.network.own_address()
    except ValueError as error:
        say(error)
time.sleep(3)
"""


@needs_hosts
@pytest.mark.slow
def test_a_host_without_free_ports_is_the_cause() -> None:
    """A rank that had no port for a connection said that the other rank had died. One that had no port for a datagram,
    which shows which interface leads to rank 0, advised to set GLOO_SOCKET_IFNAME."""
    with cluster(1, 1, [sys.executable, "-c", PROGRAM + WITHOUT_PORTS], how="each", env=SECRET) as job:
        done = job.result()
    assert len(done.stdout.splitlines()) == 5, (done.stdout, done.stderr)
    *ranks, own = sorted(done.stdout.splitlines())
    for line in ranks:
        assert re.search(r"rank \d on host [ab] has no file descriptor left for a connection, or no port, in", line), (
            line
        )
    assert re.search("ValueError MASTER_ADDR=10.0.0.1: all ports of net.ipv4.ip_local_port_range are in use", own), own
    assert "GLOO_SOCKET_IFNAME" not in own


@pytest.mark.parametrize("text", ["", "5", "-6", "1.5", "40000"])
def test_a_limit_of_idle_connections_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEEPALIVE, text)
    with (
        socket.socket() as listening,
        pytest.raises(ValueError, match=f"{KEEPALIVE}='{text}': give seconds, 6 to 32767"),
    ):
        keep_alive(listening)
