"""The backend "dist_prims" of ``torch.distributed``.

The ranks of one host reduce in shared memory. A group that spans hosts follows schedules over a transport, gloo or MPI.
Sparse tensors go to gloo, and CUDA tensors to NCCL where torch has it, behind the same name. Ranks share a host if they
report the same host (see :mod:`dist_prims.launch.hosts`) and can pass memory to each other over a local socket.

    torch.distributed.init_process_group("dist_prims")
    torch.distributed.init_process_group("dist_prims", pg_options=dist_prims.Options(all_reduce="ring"))
"""

from ..collectives.native import all_reduce_
from .create import make
from .extension import empty
from .flight_record import dump
from .options import Options, options_of

__all__ = ["Options", "all_reduce_", "dump", "empty", "make", "options_of"]
