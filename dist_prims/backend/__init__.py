"""The backend "dist_prims" of ``torch.distributed``.

The ranks of one host reduce in shared memory. A group on several hosts executes schedules over a transport: TCP,
UCX or MPI. The backend passes sparse tensors to gloo, and CUDA tensors to NCCL if torch was built with it; tensors of
other devices travel through the CPU (``docs/torch_distributed.md``). Two ranks share a host if they have the same host
id (see ``dist_prims.rendezvous.hosts``) and can send memory descriptors to each other over a local socket.

    torch.distributed.init_process_group("dist_prims")
    torch.distributed.init_process_group("dist_prims", pg_options=dist_prims.BackendOptions(all_reduce="ring"))
"""

from .dump_flight_record import dump
from .extension import empty
from .options import BackendOptions, options_of

__all__ = ["BackendOptions", "dump", "empty", "options_of"]
