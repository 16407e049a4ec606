"""The backend of torchcomms, called through torchcomms where it is installed, else through the stand-in."""

from __future__ import annotations

import importlib.util
import os
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchcomms_stand_in
from launching import ROOT
from ranks import spawn, store

from dist_prims import CommError, CommTimeoutError

CPU = torch.device("cpu")


def own_numbers() -> None:
    """Give torchcomms the rank and the size of this process in the default group."""
    os.environ.update(TORCHCOMM_RANK=str(dist.get_rank()), TORCHCOMM_SIZE=str(dist.get_world_size()))


def new_comm(name: str = "main", at: Any = None) -> tuple[Any, Any]:
    """torchcomms and a new communicator."""
    torchcomms = torchcomms_stand_in.load()
    return torchcomms, torchcomms.new_comm("dist_prims", CPU, name=name, timeout=timedelta(seconds=50), store=at)


def test_the_entry_points_for_frameworks_name_modules_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    points = dict(re.findall(r'entry-points\."([\w.]+)"\].*\n\w+ = "(dist_prims\.integrations[\w.:]+)"', text))
    assert points["vllm.general_plugins"].endswith(":register")
    assert ":" not in points["torchcomms.backends"]  # torchcomms imports the module and calls nothing
    assert all(importlib.util.find_spec(point.partition(":")[0]) for point in points.values())


def results_of_calls() -> dict[str, Any]:
    own_numbers()
    torchcomms, comm = new_comm(at=store())
    rank, size, op = comm.get_rank(), comm.get_size(), torchcomms.ReduceOp
    mine = torch.full((2,), float(rank))
    pieces = [torch.full((2,), 10.0 * rank + piece) for piece in range(size)]

    def outputs(*lengths: int) -> list[torch.Tensor]:
        return [torch.zeros(length) for length in lengths or [2] * size]

    found = {"all_reduce": mine.clone(), "largest": mine.clone(), "broadcast": mine.clone(), "reduce": mine.clone()}
    comm.all_reduce(found["all_reduce"], op.SUM, False)
    work = comm.all_reduce(found["largest"], op.MAX, True)
    assert not work.is_completed()  # until it is waited for, also if the data is there
    work.wait()
    assert work.is_completed()
    comm.broadcast(found["broadcast"], 1, False)
    comm.reduce(found["reduce"], 2, op.AVG, False)
    comm.all_gather(gathered := outputs(), mine, False)
    comm.all_gather_v(of_lengths := outputs(*range(1, size + 1)), torch.full((rank + 1,), float(rank)), False)
    found |= {"all_gather": torch.cat(gathered), "all_gather_v": torch.cat(of_lengths)}
    comm.all_gather_single(single := torch.zeros(2 * size), mine, False)
    comm.reduce_scatter(part := torch.zeros(2), pieces, op.SUM, False)
    comm.reduce_scatter_v(
        part_of_length := torch.zeros(rank + 1), [torch.ones(1 + each) for each in range(size)], op.SUM, False
    )
    comm.reduce_scatter_single(part_of_single := torch.zeros(2), torch.cat(pieces), op.SUM, False)
    found |= {"all_gather_single": single, "reduce_scatter": part, "reduce_scatter_v": part_of_length}
    comm.all_to_all(exchanged := outputs(), pieces, False)
    comm.all_to_all_single(exchanged_single := torch.zeros(2 * size), torch.cat(pieces), False)
    lengths = [rank + 1] * size  # to each rank
    from_ranks = [each + 1 for each in range(size)]
    received = torch.zeros(sum(from_ranks))
    comm.all_to_all_v_single(received, torch.full((sum(lengths),), float(rank)), from_ranks, lengths, False)
    found |= {"reduce_scatter_single": part_of_single, "all_to_all": torch.cat(exchanged)}
    found |= {"all_to_all_single": exchanged_single, "all_to_all_v_single": received}
    comm.gather(at_root := outputs() if rank == 1 else [], mine, 1, False)
    comm.scatter(from_root := torch.zeros(2), pieces if rank == 1 else [], 1, False)
    if rank == 0:
        comm.send(mine + 7, 2, False)
    message = torch.zeros(2)
    if rank == 2:
        comm.recv(message, 0, True).wait()
    comm.barrier(False)
    found |= {"gather": torch.cat(at_root or [torch.zeros(0)]), "scatter": from_root, "message": message}
    return {name: value.tolist() for name, value in found.items()}


def test_each_call_of_torchcomms_has_its_result() -> None:
    by_rank = [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    flat = [value for values in by_rank for value in values]
    for rank, found in enumerate(spawn(results_of_calls, 3)):
        sums, sent = [30.0 + 3 * rank] * 2, [value for source in range(3) for value in [10.0 * source + rank] * 2]
        assert found == {
            "all_reduce": [3.0, 3.0],
            "largest": [2.0, 2.0],
            "broadcast": [1.0, 1.0],
            "reduce": [1.0, 1.0] if rank == 2 else by_rank[rank],
            "all_gather": flat,
            "all_gather_v": [0.0, 1.0, 1.0, 2.0, 2.0, 2.0],
            "all_gather_single": flat,
            "reduce_scatter": sums,
            "reduce_scatter_v": [3.0] * (rank + 1),
            "reduce_scatter_single": sums,
            "all_to_all": sent,
            "all_to_all_single": sent,
            "all_to_all_v_single": [0.0, 1.0, 1.0, 2.0, 2.0, 2.0],
            "gather": flat if rank == 1 else [],
            "scatter": [10.0 + rank] * 2,
            "message": [7.0, 7.0] if rank == 2 else [0.0, 0.0],
        }


def communicators() -> list[Any]:
    """Without a store the ranks meet at MASTER_ADDR, as torchrun sets it. Then they split, and finalize."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port if dist.get_rank() == 0 else 0
    ports = torch.tensor(port)
    dist.broadcast(ports, 0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports.item()))
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    torchcomms, comm = new_comm()
    rank = comm.get_rank()
    assert (comm.get_size(), comm.get_name(), comm.get_backend()) == (4, "main", "dist_prims")
    assert comm.split([], "none") is None
    child = comm.split([2, 0] if rank % 2 == 0 else [1, 3], "half")  # two communicators of one name
    child.all_reduce(total := torch.tensor(rank + 1.0), torchcomms.ReduceOp.SUM, False)
    across = comm.split([0, 1] if rank < 2 else [2, 3], "half")  # the second communicator "half" of this process
    for parent in (child, across):  # the first one was taken for the second, whose ranks meet elsewhere
        part = parent.split([0, 1], "part")
        part.barrier(False)
        part.finalize()
    across.finalize()
    with pytest.raises((ValueError, RuntimeError), match="PREMUL_SUM; scale the tensor, and use SUM"):
        comm.all_reduce(total, torchcomms.ReduceOp.PREMUL_SUM(2.0), False)
    with pytest.raises((ValueError, RuntimeError), match="takes tensors on the CPU; pass cpu"):
        torchcomms.new_comm("dist_prims", torch.device("meta"), name="other", store=store())
    with pytest.raises(RuntimeError, match=rf"rank {rank} is not one of the ranks"):
        comm.get_backend_impl().split([(rank + 1) % 4], "wrong", None)
    comm.set_timeout(timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(CommTimeoutError, match="timeout after 500 ms"):
            comm.barrier(False)
    dist.barrier()
    child.finalize()
    comm.finalize()
    return [child.get_rank(), child.get_size(), child.get_name(), total.item()]


def test_communicators_split_and_have_errors_with_a_remedy() -> None:
    halves = [[1, 2, "half", 4.0], [0, 2, "half", 6.0], [0, 2, "half", 4.0], [1, 2, "half", 6.0]]
    assert spawn(communicators, 4) == halves


def repaired() -> list[tuple[int, float]]:
    """Rank 1 ends its communicator, the others go on without it, and at last it joins as a new process does."""
    own_numbers()
    rank = dist.get_rank()
    torchcomms, comm = new_comm(at=store())
    backend = comm.get_backend_impl()
    sums: list[tuple[int, float]] = []

    def reconfigure(uuid: int, members: list[int], one: Any) -> None:
        store().set(f"handle {uuid} {rank}", one.get_init_handle())
        handles = [store().get(f"handle {uuid} {member}").decode() for member in members]
        one.reconfigure(torchcomms.ReconfigureOptions(uuid, handles, timedelta(seconds=30)))
        total = torch.tensor(10.0**rank)
        one.all_reduce(total, torchcomms.ReduceOp.SUM, False)
        sums.append((one.get_rank(), total.item()))

    if rank == 1:
        backend.abort()
        os.environ.update(TORCHCOMM_RANK="0", TORCHCOMM_SIZE="1")
        _, alone = new_comm("alone", dist.HashStore())
        backend = alone.get_backend_impl()
    else:
        with pytest.raises(CommError, match="rank 1"):
            comm.all_reduce(torch.ones(1), torchcomms.ReduceOp.SUM, False)
        reconfigure(1, [2, 0], backend)
        with pytest.raises(RuntimeError, match="the uuid 1 was already used"):
            backend.reconfigure(torchcomms.ReconfigureOptions(1, [backend.get_init_handle()]))
    reconfigure(2, [0, 1, 2], backend)
    return sums


def test_reconfigure_shrinks_a_communicator_and_lets_it_grow() -> None:
    first, second, third = spawn(repaired, 3)
    assert first == [(1, 101.0), (0, 111.0)]
    assert second == [(1, 111.0)]
    assert third == [(0, 101.0), (2, 111.0)]
