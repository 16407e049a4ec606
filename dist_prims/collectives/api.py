"""The collectives themselves: each says where the data of a rank lies, checks it, and makes the call.

Roots (``src``, ``dst``) are ranks of the default group, as in ``torch.distributed``. The examples are those of a group
of one rank; they show the form, the pictures of the algorithms show the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .call import Call, Options, group_of, perform
from .choose import STRAIGHT
from .flat import cut, split_evenly
from .lane import Work
from .reduction import check_reducible

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
Op = dist.ReduceOp.RedOpType
Tensors = torch.Tensor | Sequence[torch.Tensor]


def all_reduce(
    tensor: torch.Tensor,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    output: torch.Tensor | None = None,
    **options: Any,
) -> Work | None:
    """Every rank gets the reduction of all ranks' tensors, in place or in ``output``.

    With 2 ranks, rank 0 holding [1, 2] and rank 1 holding [10, 20], both hold [11, 22] after it.

    >>> tensor = torch.tensor([1, 2])
    >>> all_reduce(tensor, algorithm="ring")
    >>> tensor
    tensor([1, 2])
    """
    call = _Maker("all_reduce", group, tensor, op)
    source = call.read(tensor)
    target = source if output is None and call.is_flat(tensor) else call.write(tensor if output is None else output)
    call.same("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


def reduce_scatter(
    output: torch.Tensor,
    input: Tensors,
    op: Op = SUM,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Work | None:
    """Rank r gets the reduction of all ranks' block r. ``input``: one tensor, split evenly, or one for each rank.

    With 2 ranks, rank 0 holding [1, 2] and rank 1 holding [10, 20], rank 0 gets [11] and rank 1 gets [22].

    >>> output = torch.empty(2)
    >>> reduce_scatter(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    call = _Maker("reduce_scatter", group, output, op)
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
) -> Work | None:
    """Every rank gets all ranks' tensors: in one tensor, split evenly, or in one for each rank (uneven ones too).

    >>> output = torch.empty(2)
    >>> all_gather(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    call = _Maker("all_gather", group, input)
    blocks = call.write_blocks(output, "output")
    counts = [len(block) for block in blocks]
    source = call.read(input)
    call.same("input", source, blocks[call.rank])
    return call.make(counts, call.only(call.rank, source), blocks, counts, options)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None, **options: Any
) -> Work | None:
    """Every rank gets the tensor of rank ``src``.

    >>> broadcast(torch.ones(3), src=0)
    """
    call = _Maker("broadcast", group, tensor, root=src)
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
) -> Work | None:
    """Rank ``dst`` gets the reduction of all ranks' tensors, in place or in ``output``; the others keep theirs.

    >>> reduce(torch.ones(3), dst=0)
    """
    call = _Maker("reduce", group, tensor, op, root=dst)
    source = call.read(tensor)
    target = None
    if call.is_root:
        target = source if output is None and call.is_flat(tensor) else call.write(tensor if output is None else output)
        call.same("output", target, source)
    return call.make([len(source)], [source], [target], [len(source)], options)


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Work | None:
    """Rank ``dst`` gets all ranks' tensors, equally long, in ``gather_list``, which it alone passes.

    >>> parts = [torch.empty(2)]
    >>> gather(torch.tensor([3.0, 4.0]), parts)
    >>> parts
    [tensor([3., 4.])]
    """
    call = _Maker("gather", group, tensor, root=dst)
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
) -> Work | None:
    """Rank r gets tensor r of the ``scatter_list`` that rank ``src`` alone passes; all equally long.

    >>> tensor = torch.empty(2)
    >>> scatter(tensor, [torch.tensor([3.0, 4.0])])
    >>> tensor
    tensor([3., 4.])
    """
    call = _Maker("scatter", group, tensor, root=src)
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
) -> Work | None:
    """Block d of rank s's input becomes block s of rank d's output.

    Two tensors, split evenly or along their first dimension by the splits; or two lists with a tensor for each rank.

    >>> output = torch.empty(2)
    >>> all_to_all(output, torch.tensor([3.0, 4.0]))
    >>> output
    tensor([3., 4.])
    """
    call = _Maker("all_to_all", group, input if isinstance(input, torch.Tensor) else input[0])
    sent, received = (
        call.read_blocks(input, "input", input_splits),
        call.write_blocks(output, "output", output_splits),
    )
    call.same("output block", received[call.rank], sent[call.rank])
    nothing = [None] * call.size
    is_even = isinstance(input, torch.Tensor) and input_splits is None and output_splits is None
    algorithm = options.get("algorithm")
    call.check(
        is_even or algorithm is None or algorithm in STRAIGHT,
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
) -> Work | None:
    """Rank r gets the reduction of ranks 0..r, in place; if ``exclusive`` of 0..r-1, and rank 0 keeps its tensor.

    >>> scan(torch.ones(3))
    """
    call = _Maker("exclusive_scan" if exclusive else "scan", group, tensor, op)
    target = call.read(tensor) if call.is_flat(tensor) else call.write(tensor, keep=True)
    return call.make([len(target)], [target], [target], [len(target)], options)


def barrier(group: dist.ProcessGroup | None = None, **options: Any) -> Work | None:
    """Return when every rank has called it.

    >>> barrier()
    """
    token = torch.ones(1, dtype=torch.uint8, device=_device_of(group_of(group, "barrier")))
    call = _Maker("barrier", group, token, dist.ReduceOp.MAX)
    return call.make([1], [token], [token], [1], options)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else types.pop())


class _Maker:
    """Turns what a user passed into a Call; every complaint names the operation and the rank."""

    def __init__(
        self,
        collective: str,
        group: dist.ProcessGroup | None,
        like: torch.Tensor,
        op: Op | None = None,
        root: int | None = None,
    ) -> None:
        self.group = group_of(group, collective)
        self.rank, self.size = self.group.rank(), self.group.size()
        self._what = f"{collective} on rank {self.rank}"
        self._collective, self._op = collective, op
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.check(isinstance(like, torch.Tensor), f"a tensor is needed, not {type(like).__name__}")
        self._like = like
        self.check(not like.is_sparse, "sparse tensors cannot be cut into chunks; call .to_dense() first")
        if op is not None:
            check_reducible(like.dtype, op, self._what)
        self._check_device(like)
        self._root = None if root is None else self._group_rank(root)

    def check(self, holds: bool, complaint: str) -> None:
        if not holds:
            raise ValueError(f"{self._what}: {complaint}")

    @property
    def is_root(self) -> bool:
        return self.rank == self._root

    def _group_rank(self, root: int) -> int:
        members = dist.get_process_group_ranks(self.group)
        self.check(root in members, f"root {root} is not in the group, whose ranks are {members}")
        return members.index(root)

    def _check_device(self, tensor: torch.Tensor) -> None:
        types = {device.type for device in self.group._device_types}
        known = ", ".join(sorted(types))
        self.check(
            not types or tensor.device.type in types,
            f"the tensor is on {tensor.device}, but the group serves {known}; move it there, or make a group for it",
        )

    def is_flat(self, tensor: torch.Tensor) -> bool:
        """Whether its memory holds its elements one after the other, and not their conjugates or negatives."""
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's elements as a flat tensor: the same memory if it is flat."""
        self._check_tensor(tensor)
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

    def write(self, tensor: torch.Tensor, keep: bool = False) -> torch.Tensor:
        """A flat tensor whose elements end in the tensor: the same memory, or a copy that is copied back."""
        self._check_tensor(tensor)
        if self.is_flat(tensor):
            return tensor.detach().view(-1)
        flat = self.read(tensor) if keep else tensor.new_empty(tensor.numel())
        self._after.append((tensor, flat))
        return flat

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        self.check(
            (tensor.dtype, tensor.device) == (self._like.dtype, self._like.device),
            f"tensors differ: {tensor.dtype} on {tensor.device}, {self._like.dtype} on {self._like.device}",
        )

    def same(self, name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        self.check(len(one) == len(other), f"{name} has {len(one)} elements where {len(other)} are needed")

    def only(self, at: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        return [tensor if block == at else None for block in range(self.size)]

    def read_blocks(self, data: Tensors, name: str, splits: Sequence[int] | None = None) -> list[torch.Tensor]:
        return self._blocks(data, name, splits, writing=False)

    def write_blocks(self, data: Tensors, name: str, splits: Sequence[int] | None = None) -> list[torch.Tensor]:
        return self._blocks(data, name, splits, writing=True)

    def _blocks(self, data: Tensors, name: str, splits: Sequence[int] | None, writing: bool) -> list[torch.Tensor]:
        flat = self.write if writing else self.read
        if not isinstance(data, torch.Tensor):
            self.check(len(data) == self.size, f"{name} lists {len(data)} tensors for a group of {self.size} ranks")
            self.check(splits is None, f"{name} is a list, so it takes no splits")
            return [flat(each) for each in data]
        whole = flat(data)
        if splits is None:
            self.check(
                len(whole) % self.size == 0,
                f"{name} has {len(whole)} elements, which {self.size} ranks cannot share evenly; pass a list",
            )
            return cut(whole, split_evenly(len(whole), self.size))
        rows = len(data) if data.dim() else 1
        self.check(
            len(splits) == self.size and sum(splits) == rows and min(splits) >= 0,
            f"{name}_splits {list(splits)} must be {self.size} numbers that add up to {rows}",
        )
        width = len(whole) // max(rows, 1)
        return cut(whole, [count * width for count in splits])

    def root_list(
        self, name: str, data: Sequence[torch.Tensor] | None, count: int, writing: bool
    ) -> list[torch.Tensor | None]:
        """The list that only the root passes."""
        self.check(self.is_root == (data is not None), f"{name} must be given on rank {self._root} and only there")
        if data is None:
            return [None] * self.size
        blocks = self._blocks(data, name, None, writing)
        lengths = [len(block) for block in blocks]
        self.check(set(lengths) <= {count}, f"{name} holds tensors of {lengths} elements; {count} each are needed")
        return [*blocks]

    def make(
        self,
        blocks: Sequence[int],
        source: Sequence[torch.Tensor | None],
        target: Sequence[torch.Tensor | None],
        common: Sequence[int],
        options: dict[str, Any],
        even: bool = True,
    ) -> Work | None:
        known = {name: options.pop(name, default) for name, default in _DEFAULTS.items()}
        self.check(known["segment_bytes"] >= 0, f"segment_bytes={known['segment_bytes']} is negative")
        call = Call(
            self._collective, self.group, self._like, blocks, source, target, self._op, self._root, common, even
        )
        call.after.extend(functools.partial(_copy_back, *pair) for pair in self._after)
        return perform(call, Options(**known, parameters=options))


_DEFAULTS: dict[str, Any] = {"algorithm": None, "async_op": False, "segment_bytes": 0}


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.copy_(flat.view_as(tensor))
