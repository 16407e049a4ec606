"""The public collectives: each one checks its arguments, describes where the data of a rank is, and makes the call.

The examples run in a group of one rank and show the form of a call. The collectives with a root are in :mod:`.rooted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist

from ..torch_compat import device_types
from .algorithm_choice import CHEAPEST, UNFORWARDED
from .arguments import CallBuilder, Op, Tensors
from .call import AnyWork, CallOptions, group_of
from .native import all_gather_, all_reduce_, direct_group, reduce_scatter_

__all__: list[str] = []

SUM = dist.ReduceOp.SUM


@overload
def all_reduce(
    tensor: torch.Tensor,
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
def all_reduce(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def all_reduce(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    output: torch.Tensor | None = None,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Reduce the tensors of all ranks; every rank gets the result, in place or in ``output``.

    With [1, 2] on rank 0 and [10, 20] on rank 1, both ranks get [11, 22].

    >>> tensor = torch.tensor([1, 2])
    >>> all_reduce(tensor, algorithm="ring")
    >>> tensor
    tensor([1, 2])
    """
    if (
        output is None
        and not (async_op or algorithm or segment_bytes or parameters)
        and (found := direct_group("all_reduce", [tensor], op, group))
    ):
        all_reduce_(tensor, op, found)
        return None
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("all_reduce", group, tensor, op)
    source = call.read(tensor)
    in_place = output is None and call.reads_in_place(tensor)
    target = source if in_place else call.write(tensor if output is None else output)
    call.check_length("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


@overload
def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Reduce the tensors of all ranks; rank r gets block r of the result.

    ``input`` is one tensor, which is split evenly, or a list of one tensor for each rank. With [1, 2] on rank 0 and
    [10, 20] on rank 1, rank 0 gets [11] and rank 1 gets [22].

    >>> output = torch.empty(2)
    >>> reduce_scatter(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    if (
        not (async_op or algorithm or segment_bytes or parameters)
        and _is_n_times(input, output, group)
        and (found := direct_group("reduce_scatter", [output, input], op, group))
    ):
        reduce_scatter_(output, cast(torch.Tensor, input), op, found)
        return None
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("reduce_scatter", group, output, op)
    blocks = call.read_blocks(input, "input")
    counts = [len(block) for block in blocks]
    target = call.write(output)
    call.check_length("output", target, blocks[call.rank])
    return call.make(counts, blocks, call.one_block(call.rank, target), counts, options)


@overload
def all_gather(
    output: Tensors,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def all_gather(
    output: Tensors,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def all_gather(
    output: Tensors,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Gather the tensors of all ranks on every rank.

    ``output`` is one tensor, which is split evenly, or a list of one tensor for each rank, also of different lengths.

    >>> output = torch.empty(2)
    >>> all_gather(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    if (
        not (async_op or algorithm or segment_bytes or parameters)
        and _is_n_times(output, input, group)
        and (found := direct_group("all_gather", [output, input], None, group))
    ):
        all_gather_(cast(torch.Tensor, output), input, found)
        return None
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("all_gather", group, input)
    blocks = call.write_blocks(output, "output")
    counts = [len(block) for block in blocks]
    source = call.read(input)
    call.check_length("input", source, blocks[call.rank])
    return call.make(counts, call.one_block(call.rank, source), blocks, counts, options)


@overload
def all_to_all(
    output: Tensors,
    input: Tensors,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
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
    **parameters: Any,
) -> AnyWork | None: ...
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
    **parameters: Any,
) -> AnyWork | None:
    """Exchange blocks: block d of the input of rank s becomes block s of the output of rank d.

    Input and output are two tensors, split evenly or along their first dimension by the splits, or two lists with a
    tensor for each rank.

    >>> output = torch.empty(2)
    >>> all_to_all(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("all_to_all", group, input if isinstance(input, torch.Tensor) else input[0])
    sent, received = (
        call.read_blocks(input, "input", input_splits),
        call.write_blocks(output, "output", output_splits),
    )
    call.check_length("output block", received[call.rank], sent[call.rank])
    nothing = [None] * call.size
    is_even = isinstance(input, torch.Tensor) and input_splits is None and output_splits is None
    call.check(
        is_even or algorithm in (None, CHEAPEST, *UNFORWARDED),
        f"algorithm {algorithm!r} forwards blocks of other ranks, whose lengths this rank does not know; with splits "
        f"or lists use {' or '.join(UNFORWARDED)}",
    )
    lengths = [len(block) for block in (*sent, *received)]
    common = [sum(lengths[: call.size])] if is_even else []
    return call.make(lengths, [*sent, *nothing], [*nothing, *received], common, options, even=is_even)


@overload
def scan(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    exclusive: bool = False,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def scan(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    exclusive: bool = False,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def scan(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    exclusive: bool = False,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Reduce the tensors of ranks 0..r on each rank r, in place.

    With ``exclusive`` rank r gets the reduction of ranks 0..r-1, and the tensor of rank 0 does not change.

    >>> scan(torch.ones(3))
    """
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("exclusive_scan" if exclusive else "scan", group, tensor, op)
    call.check(
        call.op not in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM),
        "AVG and PREMUL_SUM are not supported by scan; use SUM, and divide or multiply the tensor",
    )
    target = call.read(tensor) if call.is_flat(tensor) else call.write(tensor, keep=True)
    return call.make([len(target)], [target], [target], [len(target)], options)


@overload
def barrier(
    group: dist.ProcessGroup | None = None,
    *,
    async_op: Literal[True],
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork: ...
@overload
def barrier(
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None: ...
def barrier(
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str | None = None,
    segment_bytes: int = 0,
    **parameters: Any,
) -> AnyWork | None:
    """Wait until every rank has called barrier().

    To learn which ranks are late, call ``monitored_barrier()`` of the group. torch's function of that name accepts
    groups of gloo only.

    >>> barrier()
    """
    token = torch.ones(1, dtype=torch.uint8, device=_device_of(group_of(group, "barrier")))
    options = CallOptions(algorithm, async_op, segment_bytes, parameters)
    call = CallBuilder("barrier", group, token, dist.ReduceOp.MAX)
    return call.make([1], [token], [token], [1], options)


def _is_n_times(large: Tensors, small: Tensors, group: dist.ProcessGroup | None) -> bool:
    """Whether ``large`` has as many elements as one ``small`` for each rank."""
    if not (isinstance(large, torch.Tensor) and isinstance(small, torch.Tensor) and dist.is_initialized()):
        return False
    return large.numel() == small.numel() * dist.get_world_size(group) and large.device == small.device


def _device_of(group: dist.ProcessGroup) -> torch.device:
    types = device_types(group)
    return torch.device("cpu" if "cpu" in types or not types else types[-1])
