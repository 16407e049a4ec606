"""The collectives themselves: each says where the data of a rank lies, checks it, and makes the call.

Roots (``src``, ``dst``) are ranks of the default group, as in ``torch.distributed``. The examples are those of a group
of one rank; they show the form, the pictures of the algorithms show the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ..torch_compat import device_types
from .algorithm_choice import CHEAPEST, STRAIGHT
from .arguments import Maker, Op, Tensors
from .call import AnyWork, group_of
from .native import all_gather_, all_reduce_, direct, reduce_scatter_

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

SUM = dist.ReduceOp.SUM


def all_reduce(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    output: torch.Tensor | None = None,
    **options: Any,
) -> AnyWork | None:
    """Every rank gets the reduction of all ranks' tensors, in place or in ``output``.

    With 2 ranks, rank 0 holding [1, 2] and rank 1 holding [10, 20], both hold [11, 22] after it.

    >>> tensor = torch.tensor([1, 2])
    >>> all_reduce(tensor, algorithm="ring")
    >>> tensor
    tensor([1, 2])
    """
    if output is None and not options and (own := direct("all_reduce", [tensor], op, group)):
        all_reduce_(tensor, op, own)
        return None
    call = Maker("all_reduce", group, tensor, op)
    source = call.read(tensor)
    in_place = output is None and call.reads_in_place(tensor)
    target = source if in_place else call.write(tensor if output is None else output)
    call.same("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AnyWork | None:
    """Rank r gets the reduction of all ranks' block r. ``input``: one tensor, split evenly, or one for each rank.

    With 2 ranks, rank 0 holding [1, 2] and rank 1 holding [10, 20], rank 0 gets [11] and rank 1 gets [22].

    >>> output = torch.empty(2)
    >>> reduce_scatter(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    if (
        not options
        and _is_n_times(input, output, group)
        and (own := direct("reduce_scatter", [output, input], op, group))
    ):
        reduce_scatter_(output, cast(torch.Tensor, input), op, own)
        return None
    call = Maker("reduce_scatter", group, output, op)
    blocks = call.read_blocks(input, "input")
    counts = [len(block) for block in blocks]
    target = call.write(output)
    call.same("output", target, blocks[call.rank])
    return call.make(counts, blocks, call.only(call.rank, target), counts, options)


def all_gather(
    output: Tensors,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AnyWork | None:
    """Every rank gets all ranks' tensors: in one tensor, split evenly, or in one for each rank (uneven ones too).

    >>> output = torch.empty(2)
    >>> all_gather(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    if (
        not options
        and _is_n_times(output, input, group)
        and (own := direct("all_gather", [output, input], None, group))
    ):
        all_gather_(cast(torch.Tensor, output), input, own)
        return None
    call = Maker("all_gather", group, input)
    blocks = call.write_blocks(output, "output")
    counts = [len(block) for block in blocks]
    source = call.read(input)
    call.same("input", source, blocks[call.rank])
    return call.make(counts, call.only(call.rank, source), blocks, counts, options)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None, **options: Any
) -> AnyWork | None:
    """Every rank gets the tensor of rank ``src``.

    >>> broadcast(torch.ones(3), src=0)
    """
    if group is None and not options and (own := direct("broadcast", [tensor], None, None)) and 0 <= src < own.size():
        dist.broadcast(tensor, src, own)
        return None
    call = Maker("broadcast", group, tensor, root=src)
    target = call.read(tensor) if call.is_root and call.is_flat(tensor) else call.write(tensor, keep=call.is_root)
    return call.make([len(target)], [target if call.is_root else None], [target], [len(target)], options)


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    output: torch.Tensor | None = None,
    **options: Any,
) -> AnyWork | None:
    """Rank ``dst`` gets the reduction of all ranks' tensors, in place or in ``output``; the others keep theirs.

    >>> reduce(torch.ones(3), dst=0)
    """
    call = Maker("reduce", group, tensor, op, root=dst)
    source = call.read(tensor)
    target = None
    if call.is_root:
        in_place = output is None and call.reads_in_place(tensor)
        target = source if in_place else call.write(tensor if output is None else output)
        call.same("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AnyWork | None:
    """Rank ``dst`` gets all ranks' tensors, equally long, in ``gather_list``, which it alone passes.

    >>> parts = [torch.empty(2)]
    >>> gather(torch.tensor([3.0, 4.0]), parts)
    >>> parts
    [tensor([3., 4.])]
    """
    call = Maker("gather", group, tensor, root=dst)
    source = call.read(tensor)
    blocks = call.root_list("gather_list", gather_list, len(source), writing=True)
    counts = [len(source)] * call.size
    return call.make(counts, call.only(call.rank, source), blocks, counts[:1], options)


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AnyWork | None:
    """Rank r gets tensor r of the ``scatter_list`` that rank ``src`` alone passes; all equally long.

    >>> tensor = torch.empty(2)
    >>> scatter(tensor, [torch.tensor([3.0, 4.0])])
    >>> tensor
    tensor([3., 4.])
    """
    call = Maker("scatter", group, tensor, root=src)
    target = call.write(tensor)
    blocks = call.root_list("scatter_list", scatter_list, len(target), writing=False)
    counts = [len(target)] * call.size
    return call.make(counts, blocks, call.only(call.rank, target), counts[:1], options)


def all_to_all(
    output: Tensors,
    input: Tensors,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AnyWork | None:
    """Block d of rank s's input becomes block s of rank d's output.

    Two tensors, split evenly or along their first dimension by the splits; or two lists with a tensor for each rank.

    >>> output = torch.empty(2)
    >>> all_to_all(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    call = Maker("all_to_all", group, input if isinstance(input, torch.Tensor) else input[0])
    sent, received = (
        call.read_blocks(input, "input", input_splits),
        call.write_blocks(output, "output", output_splits),
    )
    call.same("output block", received[call.rank], sent[call.rank])
    nothing = [None] * call.size
    is_even = isinstance(input, torch.Tensor) and input_splits is None and output_splits is None
    algorithm = options.get("algorithm")
    call.check(
        is_even or algorithm in (None, CHEAPEST, *STRAIGHT),
        f"algorithm {algorithm!r} passes on blocks of other ranks, whose lengths this rank does not know; with splits "
        f"or lists use {' or '.join(STRAIGHT)}",
    )
    lengths = [len(block) for block in (*sent, *received)]
    common = [sum(lengths[: call.size])] if is_even else []
    return call.make(lengths, [*sent, *nothing], [*nothing, *received], common, options, even=is_even)


def scan(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    exclusive: bool = False,
    **options: Any,
) -> AnyWork | None:
    """Rank r gets the reduction of ranks 0..r, in place; if ``exclusive`` of 0..r-1, and rank 0 keeps its tensor.

    >>> scan(torch.ones(3))
    """
    call = Maker("exclusive_scan" if exclusive else "scan", group, tensor, op)
    call.check(
        call.op not in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM),
        "no AVG or PREMUL_SUM over some of the ranks; use SUM, and divide or multiply the tensor yourself",
    )
    target = call.read(tensor) if call.is_flat(tensor) else call.write(tensor, keep=True)
    return call.make([len(target)], [target], [target], [len(target)], options)


def barrier(group: dist.ProcessGroup | None = None, **options: Any) -> AnyWork | None:
    """Return when every rank has called it.

    >>> barrier()
    """
    token = torch.ones(1, dtype=torch.uint8, device=_device_of(group_of(group, "barrier")))
    call = Maker("barrier", group, token, dist.ReduceOp.MAX)
    return call.make([1], [token], [token], [1], options)


def _is_n_times(large: Tensors, small: Tensors, group: dist.ProcessGroup | None) -> bool:
    """Whether one tensor holds a block for each rank, as long as the other tensor."""
    if not (isinstance(large, torch.Tensor) and isinstance(small, torch.Tensor) and dist.is_initialized()):
        return False
    return large.numel() == small.numel() * dist.get_world_size(group) and large.device == small.device


def _device_of(group: dist.ProcessGroup) -> torch.device:
    types = device_types(group)
    return torch.device("cpu" if "cpu" in types or not types else types[-1])
