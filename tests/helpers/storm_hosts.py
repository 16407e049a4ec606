"""The hosts of a storm of failures (storm.py): names of groups of processes, or network namespaces."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h


class NamedHosts:
    """Hosts that are only names: all processes use the loopback interface, and no link can be cut."""

    can_be_cut = False

    def __init__(self, count: int) -> None:
        self.count = count

    def enter(self, host: int) -> None:
        """Make this process, a new one, a process of the host."""
        if self.count > 1:
            os.environ["DIST_PRIMS_HOST_ID"] = f"host{host}"
            os.environ["MASTER_ADDR"] = "127.0.0.1"

    def cut(self, host: int) -> None:
        raise NotImplementedError

    def mend(self, host: int) -> None:
        raise NotImplementedError


class NamespaceHosts(NamedHosts):
    """The hosts of ``netns-hosts.sh --login``, for a program that it has started beside them.

    A forked process enters the namespace of its host. The alternative, an agent on each host that forks processes on
    command, would need a protocol, and the storm could not signal the processes itself.
    """

    can_be_cut = True

    def enter(self, host: int) -> None:
        with open(f"/var/run/netns/host{host}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter host{host}")
        socket.sethostname(f"host{host}")  # gloo listens on the address of this name

    def cut(self, host: int) -> None:
        """From now on the packets of the host vanish; no connection is closed."""
        self._set_link(host, "down")

    def mend(self, host: int) -> None:
        self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        subprocess.run(["ip", "link", "set", f"host{host}", state], check=True, timeout=20)
