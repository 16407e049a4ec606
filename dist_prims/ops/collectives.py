"""Functions for models: they check their arguments and call the operators of :mod:`.registered`.

The compiler traces these functions, so that only the operator remains in the graph. The ranks compare their calls when
the operator runs, except over NCCL: see :mod:`.runtime`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import registered

__all__: list[str] = []

Op = str | dist.ReduceOp.RedOpType
_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "max", "min", "product")}


def all_reduce(x: torch.Tensor, op: Op = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Reduce the tensors of all ranks; every rank gets the result.

    ``op`` is "sum", "avg", "max", "min" or "product", or that member of ``torch.distributed.ReduceOp``.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> all_reduce(x, "avg").sum().backward()
    >>> x.grad
    tensor([1., 1.])

    "avg" divides before it adds, as gradient averaging does. The gradient of "max" and "min" is divided equally among
    the ranks with the extreme value. The gradient of "product" needs an all_gather of ``x``. The "product" of complex
    numbers is supported over gloo, but not over the backend dist_prims and NCCL.
    """
    return _tensor(registered.all_reduce(x, _op_name(op), _name(group)))


def all_gather(
    x: torch.Tensor, dim: int = 0, splits: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along ``dim`` on every rank.

    Where the lengths along ``dim`` differ, ``splits`` contains the length of each rank's tensor.

    >>> all_gather(torch.ones(2, 3), dim=1).shape
    torch.Size([2, 3])
    """
    name, size = _name(group), _size(group)
    rows = _dim_first(x, dim)
    lengths = [rows.shape[0]] * size if splits is None else list(splits)
    return _tensor(registered.all_gather(rows, lengths, name)).movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor,
    op: Op = "sum",
    dim: int = 0,
    splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduce the tensors of all ranks; rank r gets part r of the result.

    The result is split along ``dim``, evenly or into the lengths in ``splits``.

    >>> reduce_scatter(torch.ones(4, 3)).shape
    torch.Size([4, 3])

    The function has a gradient for "sum" and "avg".
    """
    name, rows = _name(group), _dim_first(x, dim)
    lengths = _even_splits("reduce_scatter", rows, group) if splits is None else list(splits)
    return _tensor(registered.reduce_scatter(rows, _op_name(op), lengths, name)).movedim(0, dim)


def all_to_all(
    x: torch.Tensor,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Exchange rows of ``x`` between all ranks.

    The rows are split evenly, or ``send[r]`` rows go to rank r and ``receive[r]`` rows come from it.

    >>> all_to_all(torch.arange(3.0), send=[3], receive=[3])
    tensor([0., 1., 2.])
    """
    found, rows = _group(group), _dim_first(x, 0)
    if (send is None) != (receive is None):
        raise ValueError(
            f"dist_prims.ops.all_to_all on rank {found.rank()}: send={send} and receive={receive}: give both, "
            "because no rank knows the splits of the others; or neither, for even splits"
        )
    if send is None or receive is None:
        send = receive = _even_splits("all_to_all", rows, group)
    return _tensor(registered.all_to_all(rows, list(send), list(receive), _name(group)))


def broadcast(x: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Copy the tensor of ``root``, a rank of the group, to every rank.

    The tensors of the other ranks must have the same shape; their gradient is zero. If the tensor of the root requires
    a gradient, those of the other ranks must require one, too: the derivative is a reduce, which all ranks must call.

    >>> broadcast(torch.ones(2))
    tensor([1., 1.])
    """
    return _tensor(registered.broadcast(x, root, _name(group)))


def reduce(x: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Add the tensors of all ranks; ``root``, a rank of the group, gets the sum, and the other ranks get zeros.

    If the root does a backward pass through the result, the other ranks must do so, too, if necessary by
    ``+ 0 * y.sum()`` in their losses: the derivative is a broadcast, which all ranks must call.

    >>> reduce(torch.ones(2))
    tensor([1., 1.])
    """
    return _tensor(registered.reduce(x, root, _name(group)))


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("dist_prims.ops: this process is in no group; call dist_prims.init() first")
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(f"dist_prims.ops: rank {dist.get_rank()} is not a member of the given group")
    return found


def _name(group: dist.ProcessGroup | None) -> str:
    return str(_group(group).group_name)


def _size(group: dist.ProcessGroup | None) -> int:
    return _group(group).size()


def _op_name(op: Op) -> str:
    if isinstance(op, str):
        return op
    for name, each in _OPS.items():
        if op is each:  # the compiler of torch 2.11 can neither hash nor compare one
            return name
    return next((name for name, each in _OPS.items() if op == each), str(op))  # an unknown one is refused later


def _dim_first(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` with dimension ``dim`` moved to the front."""
    if x.dim() == 0:
        raise ValueError(
            "dist_prims.ops: a tensor of no dimensions cannot be split or concatenated; call .unsqueeze(0) first"
        )
    return x.movedim(dim, 0)


def _even_splits(what: str, rows: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    size = _size(group)
    if rows.shape[0] % size:
        raise ValueError(
            f"dist_prims.ops.{what} on rank {_group(group).rank()}: {rows.shape[0]} rows cannot be split evenly for "
            f"{size} ranks; give the splits"
        )
    return [rows.shape[0] // size] * size


def _tensor(result: object) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)  # torch's dispatcher is untyped
    return result
