"""One call of a collective: its checked arguments, and where the data of this rank is.

Each function of ``api.py`` makes a Call, which checks the arguments. The function then gets flat tensors by
:meth:`Call.read` and :meth:`Call.write`, places them in the blocks of the collective by :meth:`Call.with_data`, and
hands the call to ``perform_call.py``. An invalid argument raises ValueError on its rank before anything is sent.

A *flat* tensor has one dimension and is contiguous. A *block* is the part of the data that belongs to one rank; a
collective that does not split its data has one block.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..torch_compat import device_types
from .flat import cut, split_evenly
from .reduction import check_reducible, factor_of, op_named, plain, premultiplied

__all__: list[str] = []

OpArgument = dist.ReduceOp.RedOpType | dist.ReduceOp | str  # ReduceOp: PREMUL_SUM with its factor; str: as "sum"
Tensors = torch.Tensor | Sequence[torch.Tensor]
Blocks = Sequence[torch.Tensor | None]
Flatten = Callable[[torch.Tensor], torch.Tensor]  # Call.read or Call.write


@dataclass(frozen=True)
class CallOptions:
    """The arguments that every collective takes: see :mod:`dist_prims.collectives`."""

    algorithm: str | None
    async_op: bool
    segment_bytes: int


def group_of(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """Return the group to use; ValueError if there is none, or this process is not in it. ``what`` begins the error."""
    if not dist.is_initialized():
        raise ValueError(f"{what}: this process is in no group; call dist_prims.init() first")
    members = dist.group.WORLD if group is None else group
    if not isinstance(members, dist.ProcessGroup):
        raise ValueError(f"{what}: rank {dist.get_rank()} is not a member of the given group")
    return members


class Call:
    """One call of a collective. Every error names the collective and the rank.

    Args:
        collective: the name of the collective.
        group: the group, or None for the default group.
        like: a tensor of the call; all its tensors must have the same type and device.
        options: the arguments that every collective takes.
        op: the reduction, if the collective reduces.
        root: the root as a rank of the default group, if the collective has a root.
    """

    # Set by with_data():
    blocks: Sequence[int]  # the number of elements of each block; a schedule splits a block evenly into chunks
    source: Blocks  # the input: a flat tensor for each block, or None where this rank has no input
    target: Blocks  # the output, in the same way
    common: Sequence[int]  # the block lengths on which all ranks must agree: how many, and each length
    even: bool  # whether all blocks have the same length

    def __init__(
        self,
        collective: str,
        group: dist.ProcessGroup | None,
        like: torch.Tensor,
        options: CallOptions,
        op: OpArgument | None = None,
        root: int | None = None,
    ) -> None:
        self.collective = collective
        self.group = group_of(group, collective)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.title = f"{collective} on rank {self.rank}"  # begins every error
        self.options = options
        reduction = op_named(op, self.title) if isinstance(op, str) else op
        self.op = None if reduction is None else plain(reduction)
        self._factor = None if reduction is None else factor_of(reduction, self.title)
        self.after: list[Callable[[], object]] = []  # to be called, in this order, when the collective has completed
        self.check(isinstance(like, torch.Tensor), f"a tensor is needed, not {type(like).__name__}")
        self.like = like
        self.check(not like.is_sparse, "sparse tensors cannot be cut into chunks; call .to_dense() first")
        if self.op is not None:
            check_reducible(like.dtype, self.op, self.title)
        self._check_device(like)
        self.root = None if root is None else self._group_rank(root)  # as a rank of the group

    def check(self, holds: bool, problem: str) -> None:
        """Raise ValueError with the ``problem`` unless the condition ``holds``."""
        if not holds:
            raise ValueError(f"{self.title}: {problem}")

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def nbytes(self) -> int:
        """The size for the choice of an algorithm, which is the same on every rank."""
        return sum(self.common) * self.like.element_size()

    def _group_rank(self, root: int) -> int:
        members = dist.get_process_group_ranks(self.group)  # torch knows them for a group that it lists
        self.check(root in members, f"root {root} is not in the group, whose ranks are {members}")
        return members.index(root)

    def _check_device(self, tensor: torch.Tensor) -> None:
        types = device_types(self.group)
        if types and tensor.device.type not in types:
            suitable = ",".join(f"{device}:dist_prims" for device in sorted({"cpu", *types, tensor.device.type}))
            self.check(
                False,
                f"the tensor is on {tensor.device}, but the group serves {', '.join(sorted(types))}; move it there, "
                f'or make a group for it, by backend="{suitable}"',
            )

    def is_flat(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is contiguous, and its memory contains its values, not their conjugates or negatives."""
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def reads_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether :meth:`read` returns a view of the tensor's own memory."""
        return self._factor is None and self.is_flat(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements as a flat tensor, times the factor of a PREMUL_SUM; without a copy if possible."""
        self._check_type(tensor)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return flat if self._factor is None else premultiplied(flat, self._factor, self.title)

    def write(self, tensor: torch.Tensor, keep: bool = False) -> torch.Tensor:
        """Return a flat tensor for the result: the memory of ``tensor``, or a buffer that is later copied to it.

        ``keep``: the buffer begins with what ``read`` returns for ``tensor``. If the result is the memory of ``tensor``
        itself, the caller gets the input by ``read``.
        """
        self._check_type(tensor)
        if self.is_flat(tensor):
            return tensor.detach().view(-1)
        self.check(
            all(stride or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)),
            "several elements of the tensor lie in one place, as in an expanded tensor, so nothing can be received "
            "into it; receive into a clone() of it",
        )
        flat = self.read(tensor) if keep else tensor.new_empty(tensor.numel())

        def deliver() -> None:  # a tensor made in inference mode can be written in that mode only
            with torch.inference_mode(tensor.is_inference() or torch.is_inference_mode_enabled()):
                tensor.copy_(flat.view_as(tensor))

        self.after.append(deliver)
        return flat

    def _check_type(self, tensor: torch.Tensor) -> None:
        like = self.like
        if tensor is not like and (tensor.dtype, tensor.device) != (like.dtype, like.device):
            self.check(False, f"tensors differ: {tensor.dtype} on {tensor.device}, {like.dtype} on {like.device}")

    def check_length(self, name: str, tensor: torch.Tensor, needed: torch.Tensor) -> None:
        if len(tensor) != len(needed):
            self.check(False, f"{name} has {len(tensor)} elements where {len(needed)} are needed")

    def one_block(self, position: int, tensor: torch.Tensor) -> Blocks:
        """The blocks of a rank that has the block at this position only."""
        return [tensor if block == position else None for block in range(self.size)]

    def split(
        self, data: Tensors, name: str, flatten: Flatten, splits: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """Return one flat block for each rank.

        Args:
            data: a list with a tensor for each rank, or one tensor, which is cut.
            name: the argument, for errors.
            flatten: :meth:`read` for an input, :meth:`write` for an output.
            splits: how many rows of the tensor belong to each rank; by default it is cut evenly.
        """
        if not isinstance(data, torch.Tensor):
            self.check(len(data) == self.size, f"{name} lists {len(data)} tensors for a group of {self.size} ranks")
            self.check(splits is None, f"{name} is a list, so it takes no splits")
            return [flatten(tensor) for tensor in data]
        flat = flatten(data)
        if splits is None:
            self.check(
                len(flat) % self.size == 0,
                f"{name} has {len(flat)} elements, which {self.size} ranks cannot share evenly; pass a list",
            )
            return cut(flat, split_evenly(len(flat), self.size))
        rows = len(data) if data.dim() else 1
        self.check(
            len(splits) == self.size and sum(splits) == rows and min(splits) >= 0,
            f"{name}_splits {list(splits)} must be {self.size} numbers that add up to {rows}",
        )
        width = len(flat) // max(rows, 1)
        return cut(flat, [count * width for count in splits])

    def split_on_root(self, data: Sequence[torch.Tensor] | None, name: str, flatten: Flatten, length: int) -> Blocks:
        """Return the blocks of a list that only the root passes, each of this ``length``: see :meth:`split`."""
        self.check(self.is_root == (data is not None), f"{name} must be given on rank {self.root} and only there")
        if data is None:
            return [None] * self.size
        blocks = self.split(data, name, flatten)
        lengths = [len(block) for block in blocks]
        self.check(set(lengths) <= {length}, f"{name} holds tensors of {lengths} elements; {length} each are needed")
        return blocks

    def with_data(
        self, blocks: Sequence[int], source: Blocks, target: Blocks, common: Sequence[int], even: bool = True
    ) -> Call:
        """Set the attributes of these names. Return the call, which is then complete."""
        self.check(self.options.segment_bytes >= 0, f"segment_bytes={self.options.segment_bytes} is negative")
        self.blocks, self.source, self.target, self.common, self.even = blocks, source, target, common, even
        return self

    def without_overlap(self) -> Call:
        """Return a call in which no target overlaps a source or another target: this call, or one with new targets.

        A schedule would otherwise overwrite a source before it is sent. A target may be the source of its own block.
        New targets are copied to the targets of this call at its end, in the order of the blocks.
        """
        # 1. The ranges of addresses of all tensors, and whether a target is there.
        ranges: list[tuple[int, int, bool]] = []
        for read, written in zip(self.source, self.target, strict=True):
            if read is not None and (written is None or _addresses(read) != _addresses(written)):
                ranges.append((*_addresses(read), False))
            if written is not None:
                ranges.append((*_addresses(written), True))
        # 2. In the order of addresses, a range must not begin before the end of an earlier one, if either is a target.
        end = end_of_targets = 0
        for begin, stop, is_target in sorted(each for each in ranges if each[0] < each[1]):
            if begin < (end if is_target else end_of_targets):
                return self._with_new_targets()
            end = max(end, stop)
            end_of_targets = max(end_of_targets, stop) if is_target else end_of_targets
        return self

    def _with_new_targets(self) -> Call:
        staged = copy.copy(self)
        staged.target = [None if target is None else torch.empty_like(target) for target in self.target]
        pairs = zip(self.target, staged.target, strict=True)
        copies = [functools.partial(old.copy_, new) for old, new in pairs if old is not None and new is not None]
        staged.after = [*copies, *self.after]
        return staged


def _addresses(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes
