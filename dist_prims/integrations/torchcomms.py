"""The backend "dist_prims" of torchcomms: ``torchcomms.new_comm("dist_prims", torch.device("cpu"), name)``.

torchcomms imports this module by the entry point ``torchcomms.backends``. A *communicator* of torchcomms is here a
group of this backend that ``torch.distributed`` does not list.

Groups that go on after a failure: ``abort`` ends the group on this rank, and ``reconfigure`` makes a group of the
processes with given handles. With fewer handles the group shrinks, with more it grows; a new process joins from a
communicator of one rank. torchcomms passes neither call on to a backend in Python, so programs call both, and
``get_init_handle``, on ``comm.get_backend_impl()``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchcomms import TorchCommBackend, register_backend

from ..backend.create import made_group
from ..backend_name import NAME
from ..rendezvous.detect_launcher import detect
from ..repair import reconfigure_handle, reconfigured_backend
from ..torch_compat import AllgatherOptions
from .unlisted_group import make_backend

__all__: list[str] = []

Tensor = torch.Tensor


class TorchCommPrims(TorchCommBackend):
    """A communicator. Its methods have the names and parameters of torchcomms' interface.

    A collective returns None when it is done, or, if ``async_op`` is true, a Work at once.
    """

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Make the group.

        Rank and size come from TORCHCOMM_RANK and TORCHCOMM_SIZE, or from the launcher. The ranks meet in the store of
        the options; without one, at MASTER_ADDR and MASTER_PORT, which torchrun sets.
        """
        if device.type != "cpu":
            raise ValueError(f"torchcomms: {name!r} is for {device}, and {NAME} takes tensors on the CPU; pass cpu")
        launcher = detect()
        rank = int(os.environ.get("TORCHCOMM_RANK", launcher.rank))
        size = int(os.environ.get("TORCHCOMM_SIZE", launcher.size or -1))
        store = options.store
        if store is None:
            store, rank, size = next(dist.rendezvous("env://", rank, size, timeout=options.timeout))
        self._make(store, rank, size, name, f"torchcomms/{name}", options.timeout)

    def _make(self, store: dist.Store, rank: int, size: int, name: str, title: str, timeout: timedelta) -> None:
        """Make the group. ``title``: its name in dist_prims, which no other group of this process has."""
        self._name, self._timeout, self._handle, self._uuids = name, timeout, "", set[int]()
        self._title, self._splits = title, 0
        self._backend = make_backend(dist.PrefixStore(title, store), rank, size, timeout, title)

    def split(self, ranks: Sequence[int], name: str, options: Any) -> TorchCommPrims | None:
        """Make a communicator of these ranks, each of which calls this; None for a rank that passes no ranks."""
        self._splits += 1  # all ranks of this communicator call this, so it is the same on all
        if not ranks:
            return None
        if (rank := self.get_rank()) not in ranks:
            raise RuntimeError(f"split: rank {rank} is not one of the ranks {[*ranks]}; pass [] on such a rank")
        parent = made_group(self.options.group_name).request.store
        child = TorchCommPrims()
        title = f"{self._title}/{name}/{self._splits}/{[*ranks]}"
        child._make(parent, ranks.index(rank), len(ranks), name, title, self._timeout)
        return child

    def finalize(self) -> None:
        self._backend.shutdown()

    def get_rank(self) -> int:
        return int(self._backend.rank())

    def get_size(self) -> int:
        return int(self._backend.size())

    def get_backend_name(self) -> str:
        return NAME

    def get_comm_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._backend.set_timeout(timeout)

    def abort(self) -> None:
        """End the group on this rank: calls that run here raise, and so do calls of ranks that wait for this rank."""
        self._backend.abort()

    def get_init_handle(self) -> str:
        self._handle = self._handle or reconfigure_handle(self.get_rank())
        return self._handle

    def reconfigure(self, options: Any) -> None:
        """Replace the members by the processes with ``options.init_handles``, each of which calls this.

        The new ranks have the order of a list; for a set all members get the same order.
        """
        handles, limit = options.init_handles, options.timeout or self._timeout
        self._backend = reconfigured_backend(
            self, options.uuid, self.get_init_handle(), [*handles], isinstance(handles, list), limit
        )

    @property
    def options(self) -> Any:  # reconfigured_backend() reads it, and calls use_uuid() and abort()
        return self._backend.options

    def use_uuid(self, uuid: int) -> None:
        if uuid in self._uuids:
            raise RuntimeError(f"rank {self.get_rank()}: reconfigure: the uuid {uuid} was already used; pass another")
        self._uuids.add(uuid)

    def _run(self, name: str, options: Any, async_op: bool, *tensors: Any, op: Any = None, root: int = 0) -> Any:
        options.asyncOp = async_op
        if op is not None:
            if op.type.name == "PREMUL_SUM":
                raise ValueError(f"{name}: torchcomms hides the factor of PREMUL_SUM; scale the tensor, and use SUM")
            options.reduceOp = getattr(dist.ReduceOp, op.type.name)
        if hasattr(options, "rootRank"):
            options.rootRank = root
        return _done(getattr(self._backend, name)(*tensors, options), async_op)

    def send(self, tensor: Tensor, dst: int, async_op: bool) -> Any:
        return _done(self._backend.send([tensor], dst, 0), async_op)

    def recv(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        return _done(self._backend.recv([tensor], src, 0), async_op)

    def barrier(self, async_op: bool) -> Any:
        return self._run("barrier", dist.BarrierOptions(), async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Any:
        return self._run("broadcast", dist.BroadcastOptions(), async_op, [tensor], root=root)

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        return self._run("allreduce", dist.AllreduceOptions(), async_op, [tensor], op=op)

    def reduce(self, tensor: Tensor, root: int, op: Any, async_op: bool) -> Any:
        return self._run("reduce", dist.ReduceOptions(), async_op, [tensor], op=op, root=root)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool) -> Any:
        return self._run("allgather", AllgatherOptions(), async_op, [tensor_list], [tensor])

    def all_gather_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        return self._run("_allgather_base", AllgatherOptions(), async_op, output, input)

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any, async_op: bool) -> Any:
        return self._run("reduce_scatter", dist.ReduceScatterOptions(), async_op, [output], [input_list], op=op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        return self._run("_reduce_scatter_base", dist.ReduceScatterOptions(), async_op, output, input, op=op)

    all_gather_v, reduce_scatter_v = all_gather, reduce_scatter  # the lengths may differ

    def all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], async_op: bool) -> Any:
        return self._run("alltoall", dist.AllToAllOptions(), async_op, outputs, inputs)

    def all_to_all_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        return self.all_to_all_v_single(output, input, [], [], async_op)

    def all_to_all_v_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], async_op: bool
    ) -> Any:
        options = dist.AllToAllOptions()
        return self._run("alltoall_base", options, async_op, output, input, output_sizes, input_sizes)

    def gather(self, outputs: list[Tensor], input: Tensor, root: int, async_op: bool) -> Any:
        at_root = [outputs] if self.get_rank() == root else []
        return self._run("gather", dist.GatherOptions(), async_op, at_root, [input], root=root)

    def scatter(self, output: Tensor, inputs: list[Tensor], root: int, async_op: bool) -> Any:
        at_root = [inputs] if self.get_rank() == root else []
        return self._run("scatter", dist.ScatterOptions(), async_op, [output], at_root, root=root)


def _done(work: dist.Work, async_op: bool) -> Any:
    """The work of an asynchronous call; for a synchronous one None, after its end."""
    if async_op:
        return work
    work.wait()
    return None


register_backend(NAME, TorchCommPrims)
