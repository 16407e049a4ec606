"""The public collectives with a root; :mod:`.api` has the others.

Roots (``src``, ``dst``) are ranks of the default group, as in ``torch.distributed``. The examples run in a group of one
rank and show the form of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from .arguments import CallBuilder, Op
from .call import AnyWork, CallOptions
from .native import direct_group

__all__: list[str] = []

SUM = dist.ReduceOp.SUM


@overload
def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Copy the tensor of rank ``src`` to every rank.

    >>> broadcast(torch.ones(3), src=0)
    """
    if (
        group is None
        and not (async_op or algorithm or segment_bytes or parameters)
        and (found := direct_group("broadcast", [tensor], None, None))
        and 0 <= src < found.size()
    ):
        dist.broadcast(tensor, src, found)
        return None
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("broadcast", group, tensor, root=src)
    target = call.read(tensor) if call.is_root and call.is_flat(tensor) else call.write(tensor, keep=call.is_root)
    return call.make([len(target)], [target if call.is_root else None], [target], [len(target)], options)


@overload
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Reduce the tensors of all ranks; rank ``dst`` gets the result, in place or in ``output``.

    The tensors of the other ranks do not change.

    >>> reduce(torch.ones(3), dst=0)
    """
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("reduce", group, tensor, op, root=dst)
    source = call.read(tensor)
    target = None
    if call.is_root:
        in_place = output is None and call.reads_in_place(tensor)
        target = source if in_place else call.write(tensor if output is None else output)
        call.check_length("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


@overload
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Gather the tensors of all ranks, of one length, in the ``gather_list`` of rank ``dst``.

    The other ranks pass no ``gather_list``.

    >>> parts = [torch.empty(2)]
    >>> gather(torch.tensor([3.0, 4.0]), parts)
    >>> parts
    [tensor([3., 4.])]
    """
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("gather", group, tensor, root=dst)
    source = call.read(tensor)
    blocks = call.root_list("gather_list", gather_list, len(source), writing=True)
    counts = [len(source)] * call.size
    return call.make(counts, call.one_block(call.rank, source), blocks, counts[:1], options)


@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Scatter the tensors in the ``scatter_list`` of rank ``src``: rank r gets tensor r. All have one length.

    The other ranks pass no ``scatter_list``.

    >>> tensor = torch.empty(2)
    >>> scatter(tensor, [torch.tensor([3.0, 4.0])])
    >>> tensor
    tensor([3., 4.])
    """
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("scatter", group, tensor, root=src)
    target = call.write(tensor)
    blocks = call.root_list("scatter_list", scatter_list, len(target), writing=False)
    counts = [len(target)] * call.size
    return call.make(counts, blocks, call.one_block(call.rank, target), counts[:1], options)
