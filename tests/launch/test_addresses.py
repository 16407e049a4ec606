"""Ranks on hosts with IPv4, IPv6 or both, and the ports at which they listen."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import sys

import pytest
import torch.distributed as dist
from launching import clean, forked, free_port, listening, together
from netns import cluster, needs_hosts
from ranks import span
from transports import require

import dist_prims
from dist_prims.rendezvous.network import PORTS, ports

SECRET = {"DIST_PRIMS_SECRET": "s" * 32}
PROGRAM = """
import os, signal, sys, time, torch, torch.distributed as dist, dist_prims
host = int(os.environ["HOST"])
def say(text): print(f"{host}: {text}\\n", end="", flush=True)
def total():
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    return int(tensor[-1])
"""

LIFE = """
from dist_prims.errors import CommError
os.environ.update(RANK=str(host), WORLD_SIZE=os.environ["HOSTS"], MASTER_ADDR=sys.argv[1], MASTER_PORT="29500")
if host == 2 and os.fork():
    os.wait()
    dist_prims.join("tcp://[fd00::1]:4100", timeout=60)  # in the place of the rank that dies
else:
    dist_prims.init("dist_prims", timeout=60)
    assert total() == 3
    dist.broadcast(torch.ones(1000), src=2)
    if host == 2:
        os._exit(0) if os.kill(os.getpid(), signal.SIGKILL) else None
    try:
        while True:
            total()
    except CommError:
        dist_prims.shrink()
    assert total() == 2
    if host == 0:
        meeting = dist.TCPStore("localhost", 4100, is_master=True, wait_for_workers=False)
    while dist.get_world_size() == 2:
        dist_prims.grow("tcp://localhost:4100")
say(f"{total()} over {dist.group.WORLD._get_backend(torch.device('cpu')).transport}")
dist.barrier()
dist.destroy_process_group()
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["tcp", "ucx"])
@pytest.mark.parametrize(
    ("families", "address"),
    [("6", "[fd00::1]"), ("46 6 46", "host0")],
    ids=["IPv6 only", "a host with IPv6 only among hosts with both"],
)
def test_a_group_lives_on_hosts_with_ipv6(families: str, address: str, transport: str) -> None:
    """Its ranks meet, add up, shrink after a death, and grow. gloo worked on such hosts, and the backend raised one of
    three errors. The command also tests MASTER_ADDR in brackets."""
    require(transport)
    env = {**SECRET, "FAMILIES": families, "DIST_PRIMS_TRANSPORT": transport}
    command = [sys.executable, "-c", PROGRAM + LIFE, address]
    with cluster(3, 1, command, how="each", timeout=120, env=env) as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{host}: 3 over {transport}" for host in range(3)], done.stderr


REFUSED = """
for number, address in enumerate(sys.argv[1:]):
    try:
        url = f"tcp://{address}:{29500 + number}"
        dist_prims.init("dist_prims", init_method=url, rank=host, world_size=int(os.environ["HOSTS"]), timeout=4)
    except RuntimeError as error:
        say(f"{number} {error}")
"""


@needs_hosts
@pytest.mark.slow
def test_an_address_that_does_not_lead_to_rank_0_is_the_cause_in_the_error() -> None:
    """It was a timeout without a cause."""
    places = ["localhost", "unknown", "host1"]
    command = [sys.executable, "-c", PROGRAM + REFUSED, *places]
    with cluster(2, 1, command, how="each", env=SECRET) as job:
        said = job.result().stdout
    advice = r"give an address of the host of rank 0 \(MASTER_ADDR\) that all hosts reach"
    unknown = r"no sign of rank 0 or its store: this host does not know unknown: \w.*"
    there = r"host1 is 10\.0\.0\.2 on this host; 10\.0\.0\.2:29502: .*Connection refused"
    for words in (
        rf"0: 0 .*no sign of ranks \[1\]; ranks on other hosts cannot connect to localhost, the loopback.*{advice}",
        rf"1: 0 .*localhost is 127\.0\.0\.1 on this host; 127\.0\.0\.1:29500: .*Connection refused; a loop.*{advice}",
        rf"0: 1 .*{unknown}",
        rf"1: 1 .*{unknown}",
        rf"0: 2 .*{there}; rank 0 serves the store on a host with the addresses 10\.0\.0\.1, and host1 must lead there",
        rf"1: 2 .*{there}",
    ):
        assert re.search(f"^{words}", said, re.MULTILINE), (words, said)


@needs_hosts
@pytest.mark.slow
def test_ranks_without_a_common_kind_of_address_say_which() -> None:
    command = [sys.executable, "-c", PROGRAM + REFUSED, "host0"]
    with cluster(3, 1, command, how="each", env={**SECRET, "FAMILIES": "46 4 6"}) as job:
        said = job.result().stdout
    lacking = r"ranks \[2\] have no IPv4 address, and ranks \[1\] no IPv6 address"
    assert len(re.findall(rf"neither IPv4 nor IPv6 in common: {lacking}", said)) == 3, said


def test_a_second_init_at_the_same_address_meets_the_other_ranks_again() -> None:
    """Rank 0 failed: it still held the port, by the group that it had destroyed. The second one is torch's own."""
    program = f"""
import os, torch, torch.distributed as dist, dist_prims
place = dict(init_method="tcp://127.0.0.1:{free_port()}", rank=int(os.environ["NUMBER"]), world_size=2)
for init in (dist_prims.init, dist.init_process_group, dist_prims.init):
    kept = init("gloo", **place)
    group, tensor = dist.group.WORLD, torch.ones(1)
    dist.all_reduce(tensor)
    print(int(tensor), end=" ", flush=True)
    dist.destroy_process_group()
"""
    assert together(*((program, clean(NUMBER=number)) for number in "01")) == ["2 2 2 "] * 2


def free_ports(count: int) -> str:
    """A range of ports for DIST_PRIMS_PORTS, in which no socket is, and no connection was closed a minute ago."""
    for first in random.sample(range(20000, 30000), 1000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for port in range(first, first + count):
                opened.enter_context(socket.socket()).bind(("", port))
            return f"{first}-{first + count - 1}"
    raise OSError(f"no range of {count} free ports")


def test_the_ranks_listen_at_the_given_ports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks: for repairs one port each, one for each group, and the store of the new group."""
    monkeypatch.setenv(PORTS, free_ports(40))

    def body() -> set[int]:
        inherited = listening(os.getpid())
        os.environ["DIST_PRIMS_HOST_ID"] = "aabb"[int(os.environ["RANK"])]
        dist_prims.init("dist_prims", timeout=60)
        dist.new_group()
        dist.new_group([0, 2])
        dist_prims.shrink()
        return {int(each.rpartition(":")[2], 16) for each in set(listening(os.getpid())) - set(inherited)}

    found = dist_prims.spawn(body, 4, init=False, timeout=90)
    assert all(ports_of_rank <= set(ports()) for ports_of_rank in found), found
    assert sum(map(len, found)) == len(set().union(*found)) >= 3 * 4


@pytest.mark.parametrize(
    ("transport", "count", "failure"),
    [("tcp", 4, "cannot listen for the ranks of other hosts"), ("ucx", 8, r"cannot create a worker of UCX \(.*\)")],
)
def test_an_end_of_the_given_ports_is_said_by_all_ranks(
    transport: str, count: int, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It advised to choose another interface, and UCX tried the ports of its range without end."""
    require(transport)
    allowed = free_ports(count)
    monkeypatch.setenv(PORTS, allowed)
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", transport)

    def body() -> str:
        try:
            dist.new_group()
        except RuntimeError as error:
            return str(error)
        return "no error"

    for text in span("a b", body):
        words = f"{failure}: all ports of DIST_PRIMS_PORTS={allowed} are in use on this host"
        assert re.search(rf"rank [01] {words}; give a wider range", text), text
        assert "GLOO_SOCKET_IFNAME" not in text


@pytest.mark.parametrize("text", ["20000", "0-10", "20100-20000", "20000-70000", "a-b", "20000-20100,30000"])
def test_a_range_of_ports_that_is_none_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(ValueError, match=f"DIST_PRIMS_PORTS='{text}': give the first and the last port"):
        ports({PORTS: text})


def test_init_refuses_it_as_well() -> None:
    program = "import dist_prims; dist_prims.init('gloo', init_method='tcp://127.0.0.1:9', rank=1, world_size=2)"
    [done] = forked((program, clean(DIST_PRIMS_PORTS="some")))
    assert "ValueError: DIST_PRIMS_PORTS='some'" in done.stderr
