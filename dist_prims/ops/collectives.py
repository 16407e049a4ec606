"""The functions that a model calls; they are traced, so that all of a call but the operator itself folds away.

What the ranks must agree on is compared when the operator runs (over NCCL it is not): see :mod:`.carry`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import registered

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


def all_reduce(x: torch.Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Every rank gets the reduction of all ranks' tensors: ``op`` is "sum", "mean", "max", "min" or "product".

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> all_reduce(x, "mean").sum().backward()
    >>> x.grad
    tensor([1., 1.])

    "mean" divides before it adds, as gradient averaging does. The gradient of "max" and "min" goes to the ranks that
    hold the extreme, in equal shares; that of "product" costs an all_gather of ``x``. torch.distributed refuses the
    "product" of complex numbers over our backend and NCCL; over gloo there is one.
    """
    return _tensor(registered.all_reduce(x, op, _name(group)))


def all_gather(
    x: torch.Tensor, dim: int = 0, splits: Sequence[int] | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Every rank gets all ranks' tensors, joined along ``dim``; where they are not equally long there, ``splits`` says
    how long each rank's is.

    >>> all_gather(torch.ones(2, 3), dim=1).shape
    torch.Size([2, 3])
    """
    name, size = _name(group), _size(group)
    rows = _first(x, dim)
    lengths = [rows.shape[0]] * size if splits is None else list(splits)
    return _tensor(registered.all_gather(rows, lengths, name)).movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor,
    op: str = "sum",
    dim: int = 0,
    splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Rank r gets part r of the reduction of all ranks' tensors, cut along ``dim``: evenly, or as ``splits`` says.

    >>> reduce_scatter(torch.ones(4, 3)).shape
    torch.Size([4, 3])

    It has a gradient for "sum" and "mean".
    """
    name, rows = _name(group), _first(x, dim)
    lengths = _evenly("reduce_scatter", rows, group) if splits is None else list(splits)
    return _tensor(registered.reduce_scatter(rows, op, lengths, name)).movedim(0, dim)


def all_to_all(
    x: torch.Tensor,
    send: Sequence[int] | None = None,
    receive: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Rows of ``x`` to every rank and from every rank: evenly, or ``send[r]`` to rank r and ``receive[r]`` from it.

    >>> all_to_all(torch.arange(3.0), send=[3], receive=[3])
    tensor([0., 1., 2.])
    """
    found, rows = _of(group), _first(x, 0)
    if (send is None) != (receive is None):
        raise ValueError(
            f"dist_prims.ops.all_to_all on rank {found.rank()}: send={send} and receive={receive}: give both, for "
            "no rank knows what the others send; or neither, to cut evenly"
        )
    if send is None or receive is None:
        send = receive = _evenly("all_to_all", rows, group)
    return _tensor(registered.all_to_all(rows, list(send), list(receive), _name(group)))


def broadcast(x: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Every rank gets the tensor of ``root``, a number in the group; the others' have its shape, and gradient zero.

    Where the root's requires a gradient, the others' must, too: the way back is a reduce, which all ranks make.

    >>> broadcast(torch.ones(2))
    tensor([1., 1.])
    """
    return _tensor(registered.broadcast(x, root, _name(group)))


def reduce(x: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """``root`` gets the sum of all ranks' tensors, the others zeros.

    Where the root takes a gradient, the others do as well, if only by ``+ 0 * y.sum()`` in their losses: the way back
    is a broadcast, which all ranks make.

    >>> reduce(torch.ones(2))
    tensor([1., 1.])
    """
    return _tensor(registered.reduce(x, root, _name(group)))


def _of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("dist_prims.ops: this process is in no group; call dist_prims.init() first")
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(f"dist_prims.ops: rank {dist.get_rank()} is not a member of the given group")
    return found


def _name(group: dist.ProcessGroup | None) -> str:
    return str(_of(group).group_name)


def _size(group: dist.ProcessGroup | None) -> int:
    return _of(group).size()


def _first(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` with the dimension that is cut in front."""
    if x.dim() == 0:
        raise ValueError("dist_prims.ops: a tensor of no dimensions cannot be cut or joined; call .unsqueeze(0) first")
    return x.movedim(dim, 0)


def _evenly(what: str, rows: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    size = _size(group)
    if rows.shape[0] % size:
        raise ValueError(
            f"dist_prims.ops.{what} on rank {_of(group).rank()}: {rows.shape[0]} rows cannot be cut evenly for {size} "
            "ranks; say how many each gets"
        )
    return [rows.shape[0] // size] * size


def _tensor(result: object) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)  # operators are called through torch's untyped dispatcher
    return result
