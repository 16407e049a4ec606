"""The hosts of a storm of failures (storm.py): names of groups of processes, or network namespaces; and faults."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h
_SCRIPT = Path(__file__).parents[2] / "launch_scripts/netns-inside.sh"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens for a while to processes, or to the links of hosts. ``hosts`` are two of kind "block"."""

    kind: str
    began: float
    until: float
    end: Callable[[], object]
    processes: frozenset[int] = frozenset()
    hosts: frozenset[int] = frozenset()


class NamedHosts:
    """Hosts that are only names: all processes use the loopback interface, and no link can be cut."""

    have_links = False
    folder: str | None = None  # for files

    def __init__(self, count: int) -> None:
        self.count = count

    def enter(self, host: int) -> None:
        """Make this process, a new one, a process of the host."""
        if self.count > 1:
            os.environ["DIST_PRIMS_HOST_ID"] = f"host{host}"
            os.environ["MASTER_ADDR"] = "127.0.0.1"

    def fail(self, kind: str, hosts: Sequence[int], choose: random.Random) -> tuple[Callable[[], None], str]:
        """Let the links of these hosts fail; return what mends them, and the commands."""
        raise NotImplementedError


class NamespaceHosts(NamedHosts):
    """The hosts of ``netns-hosts.sh --login``, for a program that it has started beside them.

    A forked process enters the namespace of its host. The alternative, an agent on each host that forks processes on
    command, would need a protocol, and the storm could not signal the processes itself.
    """

    have_links = True
    folder = "/var/run"  # which ends with the hosts

    def enter(self, host: int) -> None:
        with open(f"/var/run/netns/host{host}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter host{host}")
        socket.sethostname(f"host{host}")  # gloo listens on the address of this name

    def fail(self, kind: str, hosts: Sequence[int], choose: random.Random) -> tuple[Callable[[], None], str]:
        link, shape = f"ip link set host{hosts[0]}", f"bash {_SCRIPT} shape host{hosts[0]}"
        faults = {
            "cut": [(f"{link} down", f"{link} up")],
            "vanish": [(f"{link} down", f"{link} up")],
            "limit": [(f"{link} mtu 1400", f"{link} mtu 9000")],
            "slow": [(f"{shape} 20mbit", f"{shape} none")],
            "block": _block(hosts, choose) if kind == "block" else [],
        }
        begin, end = ([pair[which] for pair in faults[kind]] for which in (0, 1))
        _run(begin)
        return lambda: _run(end), "; ".join(begin)


def _block(hosts: Sequence[int], choose: random.Random) -> list[tuple[str, str]]:
    """For one direction or both: the commands that let no packet pass, in silence or with an error, and their ends."""
    is_silent, commands = choose.random() < 0.5, []
    for here, there in [hosts, hosts[::-1]][: choose.randint(1, 2)]:
        address, ip = f"10.0.0.{there + 1}", f"ip -n host{here}"
        if is_silent:
            nowhere = f"{ip} neigh replace {address} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
            commands.append((nowhere, f"{ip} neigh del {address} dev eth0"))
        else:
            rule = f"to {address} unreachable pref 0"
            commands.append((f"{ip} rule add {rule}", f"{ip} rule del {rule}"))
    return commands


def _run(commands: Sequence[str]) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=20)
