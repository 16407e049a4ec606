"""Hosts made of network namespaces: launch_scripts/netns-hosts.sh does what it says, and init() sees the hosts."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import needs_mpirun
from netns import SCRIPT, SUM, cluster, needs_hosts, on_hosts

pytestmark = needs_hosts

PAIR = """
import os, socket, struct, sys, time
def meet(host):
    if host == "0":
        return socket.create_server(("", 4000)).accept()[0]
    while True:
        try:
            return socket.create_connection(("host0", 4000))
        except OSError:
            time.sleep(0.01)
def receive(peer, count):
    while count:
        count -= len(peer.recv(min(count, 1 << 18)))
host = os.environ["HOST"]
peer = meet(host)
"""


ONE_MACHINE = """
import torch.distributed as dist
from dist_prims.backend import link_costs
from dist_prims.rendezvous.hosts import host_id, on_one_machine
hosts = [None] * 4
dist.all_gather_object(hosts, host_id())
machine, space = hosts[2][-16:-8], hosts[2][-8:]
elsewhere = f"switch-{int(machine, 16) ^ 1:08x}{space}"
found = [on_one_machine(each) for each in (hosts, [hosts[0], elsewhere], [hosts[0], "rack-1"])]
print(len({*hosts}), "hosts:", found, link_costs.uncalibrated(hosts)["one_machine"], flush=True)
"""


@pytest.mark.slow
@needs_mpirun
def test_ranks_on_two_hosts_meet_and_know_that_they_share_a_machine() -> None:
    """Hosts share the cores of a machine: large data is cut into fewer segments there."""
    done = on_hosts(2, 2, SUM + ONE_MACHINE, rate="1gbit", mpirun=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [f"rank {rank} on host{rank // 2}: 10, ((0, 1), (2, 3))" for rank in range(4)]
    assert sorted(line for line in lines if line.startswith("rank")) == expected
    assert lines.count("2 hosts: [True, False, False] True") == 4
    assert re.search("4 ranks on 2 hosts by mpirun.* over eth0", done.stderr)


MANY_ADDRESSES = r"""
import os, subprocess
host = int(os.environ["PMI_RANK"])
lines = ["route add 203.0.113.0/24 via 10.0.0.77"]  # where no host is
if host == 0:
    lines = [f"link add d{n} type veth\naddr add 203.0.113.{n}/32 dev d{n}" for n in range(1, 61)]
subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
"""


@pytest.mark.slow
@needs_mpirun
def test_rank_0_has_many_addresses_that_other_hosts_cannot_reach() -> None:
    """MPI exchanged texts of at most 1,024 bytes, and a rank tried the addresses one after the other, each for 3 s."""
    done = on_hosts(2, 1, MANY_ADDRESSES + SUM.replace("timeout=60", "timeout=30"), mpirun=True)
    assert done.returncode == 0, done.stderr
    assert re.search("2 ranks on 2 hosts by mpirun.* over eth0", done.stderr)


@pytest.mark.slow
@needs_mpirun
def test_mpi_itself_crosses_the_link() -> None:
    """MPI could also go through shared memory, which these hosts have in common."""
    done = on_hosts(
        2,
        1,
        """
from mpi4py import MPI
import numpy
world, data = MPI.COMM_WORLD, numpy.ones(8_000_000, numpy.uint8)
sent = lambda: int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
before = sent()
world.Send(data, 1) if world.Get_rank() == 0 else world.Recv(data, 0)
world.Barrier()
print(f"{sent() - before} bytes", flush=True)
""",
        mpirun=True,
    )
    assert done.returncode == 0, done.stderr
    assert max(int(number) for number in re.findall(r"(\d+) bytes", done.stdout)) > 8_000_000


@pytest.mark.parametrize(
    ("command", "options", "status", "words"),
    [
        ("[ $HOST = 0 ] && exit 7; exec sleep 60", {"how": "each", "env": {"GRACE": "1"}}, 7, ""),
        ("hostname; ssh host1 'hostname; exit 3'", {"how": "login"}, 3, "switch\nhost1\n"),
        ("sleep 60", {"how": "each", "timeout": 1}, 124, "not over after TIMEOUT=1 s"),
    ],
    ids=["a host fails", "a shell on a host fails", "no host ends"],
)
def test_the_first_failure_is_the_status_and_ends_all(
    command: str, options: dict[str, Any], status: int, words: str
) -> None:
    began = time.monotonic()
    with cluster(2, 1, ["bash", "-c", command], **options) as job:
        done = job.result()
    assert done.returncode == status
    assert words in done.stdout + done.stderr
    assert time.monotonic() - began < 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_script(number: signal.Signals) -> None:
    interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
    command = ["bash", "-c", "stat -Lc 'space %i' /proc/self/ns/net; sleep 60 & exec sleep 60"]
    with cluster(2, 1, command, how="each", rate="1gbit") as job:
        job.wait_for("space", times=2)
        spaces = set(re.findall(r"space (\d+)", job.stdout.read_text()))
        assert len(spaces) == 2
        assert len(processes_in(spaces)) >= 4
        job.process.send_signal(number)
        assert job.result().returncode == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 10
    while processes_in(spaces) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_in(spaces) == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [space for space in spaces if f"net:[{space}]" in mounts], "what holds a namespace without a process"
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == interfaces


def processes_in(spaces: set[str]) -> list[str]:
    """The processes whose network namespace is one of these."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if str(path.stat().st_ino) in spaces:
                found.append(path.parts[2])
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.slow
def test_links_are_shaped_both_ways_and_can_be_slowed(tmp_path: Path) -> None:
    """Ratios only: the machine may be busy."""
    program = (
        PAIR
        + """
for rate in "before", "after":
    while rate == "after" and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    for sender in "01":
        began = time.monotonic()
        if host == sender:
            peer.sendall(bytes(2_000_000))
            receive(peer, 1)
        else:
            receive(peer, 2_000_000)
            peer.sendall(b"x")
        print(f"host{host}: {rate} {sender} {time.monotonic() - began}", flush=True)
"""
    )
    slowed = tmp_path / "slowed"
    with cluster(2, 1, [sys.executable, "-c", program, str(slowed)], how="each", rate="200mbit") as job:
        job.wait_for("before 1", times=2)
        job.slow(0, "10mbit")
        slowed.touch()
        done = job.result()
    assert done.returncode == 0, done.stderr
    seconds = {what: float(text) for what, text in re.findall(r"host0: (\w+ \d) (\S+)", done.stdout)}
    for sender in "01":
        assert seconds[f"after {sender}"] > 5 * seconds[f"before {sender}"]  # 20 times, if nothing else runs


def test_each_host_can_have_a_rate_of_its_own() -> None:
    with cluster(3, 1, ["tc", "qdisc", "show", "dev", "eth0"], how="each", rate="10mbit 200mbit") as job:
        done = job.result()
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rate (\S+)", done.stdout)) == ["10Mbit", "200Mbit", "200Mbit"]


@pytest.mark.slow
def test_a_cut_link_is_silent_and_can_be_mended() -> None:
    program = (
        PAIR
        + """
peer.settimeout(0.2)
silent, received = 0, 0
while received < 40:
    time.sleep(0.02)
    try:
        peer.sendall(b"x")
        received += len(peer.recv(1))
        what = "alive"
    except TimeoutError:
        silent += 1
        what = "silent"
    print(f"host{host} {what}", flush=True)
print(f"host{host} ends after silence" if silent else f"host{host} heard all", flush=True)
peer.settimeout(20)
peer.shutdown(socket.SHUT_WR)
while peer.recv(1):
    pass
"""
    )
    with cluster(2, 1, [sys.executable, "-c", program], how="each") as job:
        job.wait_for("host0 alive")
        job.cut(1)
        for host in "01":
            job.wait_for(f"host{host} silent", times=2)
        job.mend(1)
        done = job.result()
    assert done.returncode == 0, done.stderr  # a reset would have been a ConnectionError
    assert done.stdout.count("ends after silence") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "HOSTS is ''; give a number"),
        ("2 x none -- true", "RANKS is 'x'"),
        ("2 2 10mb -- true", "RATE is '10mb'; give 10gbit"),
        ("2 2 '1gbit 10mb' -- true", "RATE is '10mb'; give 10gbit"),
        ("2 2 none --ssh -- true", "after RATE come --torchrun, --mpirun"),
        ("2 2 none --each true", "and then -- command"),
        ("--cut", "give --cut NAME HOST"),
        ("--cut missing 1", "no cluster named 'missing' is running"),
    ],
)
def test_what_it_cannot_do_it_says_in_one_line(arguments: str, words: str) -> None:
    done = subprocess.run([SCRIPT, *shlex.split(arguments)], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_two_clusters_at_once_but_not_of_one_name() -> None:
    with cluster(2, 1, ["bash", "-c", "echo up; sleep 30"], how="each") as job:
        job.wait_for("up", times=2)
        with cluster(2, 1, ["hostname"], how="each") as other:
            assert sorted(other.result().stdout.split()) == ["host0", "host1"]
        with cluster(2, 1, ["hostname"], how="each", env={"NAME": job.name}) as other:
            assert "is running; give another NAME" in other.result().stderr
