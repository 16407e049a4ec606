"""Initial synchronisation: all ranks have the same model in structure, then take the values of one rank.

Ranks whose models differ would pair the gradient of one layer with the gradient of another, and gloo would add them
without an error. Structures are compared by checksum; only if two checksums differ do the ranks send the
descriptions themselves.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ...agreement import check_lists, gather_values

__all__: list[str] = []

_REMEDY = "Build the same model, with the same settings, on every rank"


def check_same_model(
    operation: str,
    settings: Sequence[str],
    named: Iterable[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup,
    failure: Exception | None = None,
) -> str:
    """Return a new name, the same on all ranks, when all have tensors of the same names, shapes and dtypes and the same
    settings; otherwise raise on every rank. ValueError if the model is sharded already, or has a DTensor.
    """
    tensors = list(named)
    failure = failure or dtensor_problem(operation, tensors, group)
    mine = [*settings, *(_described(name, tensor) for name, tensor in tensors)]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    gathered = gather_values((digest, secrets.token_hex(8)), group, operation, failure)
    if len({digest for digest, _ in gathered}) > 1:
        check_lists(operation, gather_values(mine, group), _REMEDY, group)
    if sharded := next((name for name, tensor in tensors if _is_sharded(tensor)), None):
        raise ValueError(
            f"rank {group.rank()}: {operation}: {sharded!r} is sharded already, by ShardedParameters; use another copy"
        )
    return f"{operation}-{gathered[0][1]}"


def dtensor_problem(
    operation: str, named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup
) -> ValueError | None:
    """The error if one of the tensors is a DTensor, of which ranks hold parts: it must not be averaged or copied."""
    module = sys.modules.get("torch.distributed.tensor")  # not there: the program has no DTensor
    name = module and next((name for name, each in named if isinstance(each, module.DTensor)), None)
    if name is None:
        return None
    return ValueError(
        f"rank {group.rank()}: {operation}: {name!r} is a DTensor, of which ranks hold parts. For data parallelism "
        "beside tensor parallelism use torch.distributed.fsdp.fully_shard(model, mesh=mesh['dp']) instead, with the "
        "dimension of the mesh whose ranks hold the same part"
    )


def _described(name: str, each: torch.Tensor) -> str:
    layout = "sharded already" if _is_sharded(each) else f"strides {each.stride()}"
    return f"tensor {name!r} ({each.dtype}, shape {tuple(each.shape)}, {layout}, requires_grad={each.requires_grad})"


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether all elements of a parameter share one place in memory, as those that ShardedParameters has released."""
    return isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1 and not any(tensor.stride())
