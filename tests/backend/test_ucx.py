"""The transport over UCX: how it is found, what it leaves alone, and what remains of it. test_multi_host.py and
test_hosts.py run what all transports must do."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import clean, run_scripts
from ranks import span
from transports import require

import dist_prims
from dist_prims.backend import ucx_library
from dist_prims.rendezvous.network import addresses_of


@pytest.fixture(autouse=True)
def transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", "ucx")


@pytest.fixture
def needs_ucx() -> None:
    require("ucx")


def transport_of(group: dist.ProcessGroup | None = None) -> str:
    group = group or dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    return str(backend.transport)


def total(group: dist.ProcessGroup | None = None, count: int = 5) -> float:
    tensor = torch.ones(count)
    dist.all_reduce(tensor, group=group)
    return tensor[-1].item()


# The ranks are forks of a process that has not loaded UCX.
JOIN = """
def join(meeting):
    method = f"file://{folder}/{meeting}"
    dist_prims.init("dist_prims", init_method=method, rank=number, world_size=3, timeout=30)
os.environ["DIST_PRIMS_HOST_ID"] = str(number)
"""

WITHOUT_UCX = """
if number == 1:
    os.environ["DIST_PRIMS_UCX"] = str(folder)
try:
    join("first")
except RuntimeError as error:
    print(error)
os.environ["DIST_PRIMS_TRANSPORT"] = "tcp"
join("second")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"over tcp {tensor.item()}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_without_ucx_is_named_on_all_ranks(tmp_path: Path, needs_ucx: None) -> None:
    """The library of rank 1 is an empty file."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libucp.so.0").touch()
    for text in run_scripts(JOIN + WITHOUT_UCX, 3, tmp_path, clean(DIST_PRIMS_TRANSPORT="ucx")):
        assert "UCX cannot be the transport between the hosts of this group (rank 1: " in text
        assert "cannot open shared object file" in text
        assert "pip install libucx-cu12" in text
        assert "to use TCP instead: DIST_PRIMS_TRANSPORT=tcp" in text
        assert text.startswith("0: ")
        assert text.endswith("over tcp 3.0\n")


def test_a_rank_that_cannot_create_a_worker_is_named_on_all_ranks(needs_ucx: None) -> None:
    def rank() -> str:
        me = dist.get_rank()
        dist.destroy_process_group()
        os.environ |= {"DIST_PRIMS_HOST_ID": "ab"[me]} | ({"UCX_TLS": "no_such_transport"} if me == 1 else {})
        with pytest.raises(RuntimeError) as error:
            dist_prims.init("dist_prims", timeout=30)
        return str(error.value)

    for text in dist_prims.spawn(rank, 2, timeout=60):
        assert "rank 1 cannot create a worker of UCX (see UCX_LOG_LEVEL=info on that rank): ucp_" in text


def test_the_transport_is_an_option_of_a_group(monkeypatch: pytest.MonkeyPatch, needs_ucx: None) -> None:
    def body() -> None:
        groups = [dist.new_group(pg_options=dist_prims.BackendOptions(transport=name)) for name in ("ucx", "tcp")]
        assert [transport_of(group) for group in (None, *groups)] == ["tcp", "ucx", "tcp"]
        assert [total(group, 100_000) for group in groups] == [2, 2]

    monkeypatch.setenv("DIST_PRIMS_TRANSPORT", "tcp")
    span("a b", body)


def test_groups_leave_no_descriptors_and_threads(needs_ucx: None) -> None:
    def body() -> None:
        def count() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def use_a_group() -> None:
            group = dist.new_group(backend="dist_prims")
            assert transport_of(group) == "ucx"
            assert total(group, 100_000) == 3
            dist.destroy_process_group(group)

        use_a_group()  # what the first one makes for all
        before = count()
        for _ in range(8):
            use_a_group()
        assert count() == before

    span("a b b", body)


def test_signal_handlers_environment_and_libc_stay_as_they_are(needs_ucx: None) -> None:
    """UCX would replace the first instructions of mmap() and others."""

    def rank() -> None:
        def instructions() -> list[bytes]:
            libc = ctypes.CDLL(None)
            starts = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value for name in ("mmap", "munmap", "madvise")]
            return [ctypes.string_at(start, 12) for start in starts if start]

        def caught() -> str:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(line for line in lines if line.startswith("SigCgt"))

        me = dist.get_rank()
        assert total() == 2
        dist.destroy_process_group()
        os.environ["DIST_PRIMS_HOST_ID"] = "ab"[me]
        before = caught(), instructions(), {name for name in os.environ if name.startswith("UCX_")}
        dist_prims.init("dist_prims", timeout=30)
        assert (transport_of(), total()) == ("ucx", 2)
        after = caught(), instructions(), {name for name in os.environ if name.startswith("UCX_")}
        assert after == before

    dist_prims.spawn(rank, 2, backend="gloo", timeout=60)  # whose threads have glibc handle a signal


def test_forked_children_change_nothing(needs_ucx: None) -> None:
    """One ends at once, one as an interpreter does, and some are the workers of a DataLoader."""

    def body() -> None:
        for end in ("os._exit(3)", "sys.exit(3)"):
            if (child := os.fork()) == 0:
                try:
                    assert "was forked from one that uses UCX" in ucx_library.unusable_reason()
                    exec(end)
                except SystemExit as left:
                    os._exit(left.code if isinstance(left.code, int) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            assert total(count=100_000) == 2
        loader: Any = torch.utils.data.DataLoader(list(range(32)), batch_size=4, num_workers=2)  # type: ignore[arg-type]
        for batch in loader:
            dist.all_reduce(batch)
        assert total() == 2

    span("a b", body)


AFTER_MPI = """
import os, sys
try:
    from mpi4py import MPI
except (ImportError, RuntimeError):
    sys.exit(77)
import dist_prims
from dist_prims.backend import mpi_library, ucx_library
def reasons():
    return ucx_library.unusable_reason(), mpi_library.unusable_reason()
for forked in dist_prims.spawn(reasons, 2, timeout=60):
    assert all("was forked from one that uses MPI" in reason for reason in forked), forked
assert not any("forked" in reason for reason in reasons())
"""


@pytest.mark.slow
def test_ranks_that_are_forked_where_mpi_is_used(tmp_path: Path, needs_ucx: None) -> None:
    """MPICH uses UCX. A forked rank lacked the thread that accepts connections, and waited for its group in vain."""
    path = tmp_path / "program.py"
    path.write_text(AFTER_MPI)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, env=clean())
    if done.returncode == 77:
        pytest.skip("no MPI library for mpi4py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_doctor_reports_the_ucx_that_a_group_will_use(needs_ucx: None) -> None:
    """The report had the version of the UCX that MPI contains, also in a process that mpirun had not started."""
    program = """
from dist_prims.backend import ucx_library
from dist_prims.cli.doctor import report
print(report(), ucx_library.version(), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=clean())
    version = done.stdout.splitlines()[-1]
    assert re.search(rf"^UCX +{re.escape(version)}, over", done.stdout, re.MULTILINE), done.stdout


def test_a_rank_that_cannot_be_reached_is_not_taken_for_dead(needs_ucx: None) -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo" and addresses_of(name)]
    if not others:
        pytest.skip("this host has no network interface but loopback")

    def rank() -> str:
        number = dist.get_rank()
        os.environ["DIST_PRIMS_HOST_ID"] = str(number)
        os.environ["UCX_NET_DEVICES"] = (others[0], "lo")[number]
        dist.destroy_process_group()
        with pytest.raises(dist_prims.errors.CommError) as caught:
            dist_prims.init("dist_prims", timeout=30)
        assert type(caught.value) is dist_prims.errors.CommError
        return str(caught.value)

    # One rank notices the missing way, and the other rank gets the notice. The error of the other rank said that this
    # very rank had died; all ranks raise the error that is written first, so the remedy was missing at times.
    for error in dist_prims.spawn(rank, 2, timeout=60):
        assert re.search(
            r"rank \d on host . cannot be reached from .*Destination is unreachable .* set UCX_NET_DEVICES", error
        )


PROGRAM = """
join("meeting")
tensor = torch.ones(1_000_000)
for _ in range(5):
    tensor.fill_(1)
    dist.all_reduce(tensor)
assert dist.group.WORLD._get_backend(torch.device("cpu")).transport == "ucx"
if (child := os.fork()) == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
dist.all_reduce(tensor)
print(tensor[-1].item(), flush=True)
"""


@pytest.mark.slow
def test_a_program_may_end_without_destroying_the_group(
    tmp_path: Path, needs_ucx: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither do its ranks crash, nor its forked children, nor does UCX print anything."""
    assert run_scripts(JOIN + PROGRAM, 3, tmp_path, clean(DIST_PRIMS_TRANSPORT="ucx")) == ["0: 9.0\n"] * 3
    assert "ucx" not in capfd.readouterr().err.lower()


def test_active_ports_for_rdma_are_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, state in (
        ("mlx5_0/ports/1", "4: ACTIVE\n"),
        ("mlx5_0/ports/2", "1: DOWN\n"),
        ("mlx5_1/ports/1", "4: ACTIVE\n"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "state").write_text(state)
    assert ucx_library._rdma_ports(tmp_path) == ["mlx5_0:1", "mlx5_1:1"]
    assert ucx_library._rdma_ports(tmp_path / "absent") == []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    monkeypatch.setattr(ucx_library, "_rdma_ports", lambda: ["mlx5_0:1"])
    assert ucx_library.settings({}, "10.0.0.1")["NET_DEVICES"] == "eth0,eth1,mlx5_0:1"
    assert "NET_DEVICES" not in ucx_library.settings({"UCX_NET_DEVICES": "all"}, "10.0.0.1")


def test_a_named_folder_without_ucx_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another UCX was used without a word."""
    monkeypatch.setenv("DIST_PRIMS_UCX", str(tmp_path))
    with pytest.raises(OSError, match=f"DIST_PRIMS_UCX={tmp_path} has no lib/libucp"):
        next(ucx_library._folders())
