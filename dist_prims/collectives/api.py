"""The public collectives: each one makes a Call (``call.py``), states where the data of this rank is, and performs it.

The arguments ``group``, ``async_op``, ``algorithm`` and ``segment_bytes`` of all functions are described in
:mod:`dist_prims.collectives`. Roots (``src``, ``dst``) are ranks of the default group, as in ``torch.distributed``. The
examples run in a group of one rank and show the form of a call.

A synchronous call without an algorithm, on contiguous CPU tensors in a group of the backend dist_prims, takes a shorter
path: most functions pass it to the backend directly (``direct_calls.py``). A Call would add 16 µs to a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..torch_compat import message_device, world
from . import direct_calls
from .call import Call, CallOptions, OpArgument, Tensors, group_of
from .perform_call import perform

__all__: list[str] = []

SUM = dist.ReduceOp.SUM


def all_reduce(
    tensor: torch.Tensor,
    op: OpArgument = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Reduce the tensors of all ranks; every rank gets the result, in place or in ``output``.

    With [1, 2] on rank 0 and [10, 20] on rank 1, both ranks get [11, 22].

    >>> tensor = torch.tensor([1, 2])
    >>> all_reduce(tensor, algorithm="ring")
    >>> tensor
    tensor([1, 2])
    """
    is_plain = output is None and not (async_op or algorithm or segment_bytes)
    if is_plain and direct_calls.all_reduce(tensor, op, group or world["_default_pg"]):
        return None
    call = Call("all_reduce", group, tensor, CallOptions(algorithm, async_op, segment_bytes), op)
    source = call.read(tensor)
    in_place = output is None and call.reads_in_place(tensor)
    target = source if in_place else call.write(tensor if output is None else output)
    call.check_length("output", target, source)
    return perform(call.with_data([len(source)], [source], [target], common=[len(source)]))


def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: OpArgument = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Reduce the tensors of all ranks; rank r gets block r of the result.

    ``input`` is one tensor, which is split evenly, or a list of one tensor for each rank. With [1, 2] on rank 0 and
    [10, 20] on rank 1, rank 0 gets [11] and rank 1 gets [22].

    >>> output = torch.empty(2)
    >>> reduce_scatter(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    is_plain = not (async_op or algorithm or segment_bytes)
    if is_plain and direct_calls.reduce_scatter(output, input, op, group or world["_default_pg"]):
        return None
    call = Call("reduce_scatter", group, output, CallOptions(algorithm, async_op, segment_bytes), op)
    blocks = call.split(input, "input", call.read)
    counts = [len(block) for block in blocks]
    target = call.write(output)
    call.check_length("output", target, blocks[call.rank])
    return perform(call.with_data(counts, blocks, call.one_block(call.rank, target), common=counts))


def all_gather(
    output: Tensors,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Gather the tensors of all ranks on every rank.

    ``output`` is one tensor, which is split evenly, or a list of one tensor for each rank, also of different lengths.

    >>> output = torch.empty(2)
    >>> all_gather(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    is_plain = not (async_op or algorithm or segment_bytes)
    if is_plain and direct_calls.all_gather(output, input, group or world["_default_pg"]):
        return None
    call = Call("all_gather", group, input, CallOptions(algorithm, async_op, segment_bytes))
    blocks = call.split(output, "output", call.write)
    counts = [len(block) for block in blocks]
    source = call.read(input)
    call.check_length("input", source, blocks[call.rank])
    return perform(call.with_data(counts, call.one_block(call.rank, source), blocks, common=counts))


def all_to_all(
    output: Tensors,
    input: Tensors,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Exchange blocks: block d of the input of rank s becomes block s of the output of rank d.

    Input and output are two tensors, split evenly or along their first dimension by the splits, or two lists with a
    tensor for each rank.

    >>> output = torch.empty(2)
    >>> all_to_all(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    is_plain = output_splits is input_splits is None and not (async_op or algorithm or segment_bytes)
    if is_plain and direct_calls.all_to_all(output, input, group or world["_default_pg"]):
        return None
    like = input if isinstance(input, torch.Tensor) else input[0]
    call = Call("all_to_all", group, like, CallOptions(algorithm, async_op, segment_bytes))
    sent = call.split(input, "input", call.read, input_splits)
    received = call.split(output, "output", call.write, output_splits)
    call.check_length("output block", received[call.rank], sent[call.rank])
    nothing = [None] * call.size
    is_even = isinstance(input, torch.Tensor) and input_splits is None and output_splits is None
    lengths = [len(block) for block in (*sent, *received)]
    common = [sum(lengths[: call.size])] if is_even else []
    # The schedule's blocks are the blocks that this rank sends, then the blocks that it receives.
    return perform(call.with_data(lengths, [*sent, *nothing], [*nothing, *received], common=common, even=is_even))


def scan(
    tensor: torch.Tensor,
    op: OpArgument = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    exclusive: bool = False,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Reduce the tensors of ranks 0..r on each rank r, in place.

    With ``exclusive`` rank r gets the reduction of ranks 0..r-1, and the tensor of rank 0 does not change.

    >>> scan(torch.ones(3))
    """
    collective = "exclusive_scan" if exclusive else "scan"
    call = Call(collective, group, tensor, CallOptions(algorithm, async_op, segment_bytes), op)
    call.check(
        call.op not in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM),
        "AVG and PREMUL_SUM are not supported by scan; use SUM, and divide or multiply the tensor",
    )
    target = call.read(tensor) if call.is_flat(tensor) else call.write(tensor, keep=True)
    return perform(call.with_data([len(target)], [target], [target], common=[len(target)]))


def barrier(
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Wait until every rank has called barrier().

    To learn which ranks are late, call ``monitored_barrier()`` of the group. torch's function of that name accepts
    groups of gloo only.

    >>> barrier()
    """
    if not (async_op or algorithm or segment_bytes) and direct_calls.barrier(group or world["_default_pg"]):
        return None
    token = torch.ones(1, dtype=torch.uint8, device=message_device(group_of(group, "barrier")))
    call = Call("barrier", group, token, CallOptions(algorithm, async_op, segment_bytes), dist.ReduceOp.MAX)
    return perform(call.with_data([1], [token], [token], common=[1]))


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Copy the tensor of rank ``src`` to every rank.

    >>> broadcast(torch.ones(3), src=0)
    """
    # In the default group only: there src is the rank in the group.
    is_plain = group is None and not (async_op or algorithm or segment_bytes)
    if is_plain and direct_calls.broadcast(tensor, src, world["_default_pg"]):
        return None
    call = Call("broadcast", group, tensor, CallOptions(algorithm, async_op, segment_bytes), root=src)
    target = call.read(tensor) if call.is_root and call.is_flat(tensor) else call.write(tensor, keep=call.is_root)
    return perform(call.with_data([len(target)], [target if call.is_root else None], [target], common=[len(target)]))


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: OpArgument = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Reduce the tensors of all ranks; rank ``dst`` gets the result, in place or in ``output``.

    The tensors of the other ranks do not change.

    >>> reduce(torch.ones(3), dst=0)
    """
    call = Call("reduce", group, tensor, CallOptions(algorithm, async_op, segment_bytes), op, root=dst)
    source = call.read(tensor)
    target = None
    if call.is_root:
        in_place = output is None and call.reads_in_place(tensor)
        target = source if in_place else call.write(tensor if output is None else output)
        call.check_length("output", target, source)
    return perform(call.with_data([len(source)], [source], [target], common=[len(source)]))


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Gather the tensors of all ranks, of one length, in the ``gather_list`` of rank ``dst``.

    The other ranks pass no ``gather_list``.

    >>> parts = [torch.empty(2)]
    >>> gather(torch.tensor([3.0, 4.0]), parts)
    >>> parts
    [tensor([3., 4.])]
    """
    call = Call("gather", group, tensor, CallOptions(algorithm, async_op, segment_bytes), root=dst)
    source = call.read(tensor)
    blocks = call.split_on_root(gather_list, "gather_list", call.write, len(source))
    counts = [len(source)] * call.size
    return perform(call.with_data(counts, call.one_block(call.rank, source), blocks, common=counts[:1]))


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
) -> dist.Work | None:
    """Scatter the tensors in the ``scatter_list`` of rank ``src``: rank r gets tensor r. All have one length.

    The other ranks pass no ``scatter_list``.

    >>> tensor = torch.empty(2)
    >>> scatter(tensor, [torch.tensor([3.0, 4.0])])
    >>> tensor
    tensor([3., 4.])
    """
    call = Call("scatter", group, tensor, CallOptions(algorithm, async_op, segment_bytes), root=src)
    target = call.write(tensor)
    blocks = call.split_on_root(scatter_list, "scatter_list", call.read, len(target))
    counts = [len(target)] * call.size
    return perform(call.with_data(counts, blocks, call.one_block(call.rank, target), common=counts[:1]))
