"""Checks of the arguments of a collective, and their conversion into a Call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..torch_compat import device_types
from .call import Call, CallOptions, group_of, perform
from .flat import cut, split_evenly
from .queue import Work
from .reduction import check_reducible, factor_of, op_named, plain, premultiplied

__all__: list[str] = []

Op = dist.ReduceOp.RedOpType | dist.ReduceOp | str  # ReduceOp: PREMUL_SUM with its factor; str: the name, as "sum"
Tensors = torch.Tensor | Sequence[torch.Tensor]


class CallBuilder:
    """Builder of a Call from the arguments of the user. Every error names the collective and the rank."""

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
        self._collective = collective
        reduction = op_named(op, self._what) if isinstance(op, str) else op
        self.op = None if reduction is None else plain(reduction)
        self._factor = None if reduction is None else factor_of(reduction, self._what)
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.check(isinstance(like, torch.Tensor), f"a tensor is needed, not {type(like).__name__}")
        self._like = like
        self.check(not like.is_sparse, "sparse tensors cannot be cut into chunks; call .to_dense() first")
        if self.op is not None:
            check_reducible(like.dtype, self.op, self._what)
        self._check_device(like)
        self._root = None if root is None else self._group_rank(root)

    def check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ValueError(f"{self._what}: {problem}")

    @property
    def is_root(self) -> bool:
        return self.rank == self._root

    def _group_rank(self, root: int) -> int:
        members = dist.get_process_group_ranks(self.group)
        self.check(root in members, f"root {root} is not in the group, whose ranks are {members}")
        return members.index(root)

    def _check_device(self, tensor: torch.Tensor) -> None:
        types = device_types(self.group)
        if not types or tensor.device.type in types:
            return
        known = ", ".join(sorted(types))
        self.check(
            False,
            f"the tensor is on {tensor.device}, but the group serves {known}; move it there, or make a group for it",
        )

    def is_flat(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is contiguous, and its memory contains its values, not their conjugates or negatives."""
        return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

    def reads_in_place(self, tensor: torch.Tensor) -> bool:
        return self._factor is None and self.is_flat(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements as a flat tensor, times the factor of a PREMUL_SUM; without a copy if possible."""
        self._check_tensor(tensor)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return flat if self._factor is None else premultiplied(flat, self._factor, self._what)

    def write(self, tensor: torch.Tensor, keep: bool = False) -> torch.Tensor:
        """Return a flat tensor for the result: the memory of ``tensor``, or a buffer that is later copied to it."""
        self._check_tensor(tensor)
        if self.is_flat(tensor):
            return tensor.detach().view(-1)
        flat = self.read(tensor) if keep else tensor.new_empty(tensor.numel())
        self._after.append((tensor, flat))
        return flat

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        like = self._like
        if tensor is not like and (tensor.dtype, tensor.device) != (like.dtype, like.device):
            self.check(False, f"tensors differ: {tensor.dtype} on {tensor.device}, {like.dtype} on {like.device}")

    def check_length(self, name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        if len(one) != len(other):
            self.check(False, f"{name} has {len(one)} elements where {len(other)} are needed")

    def one_block(self, at: int, tensor: torch.Tensor) -> list[torch.Tensor | None]:
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
        """Return the blocks of a list that only the root passes."""
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
        options: CallOptions,
        even: bool = True,
    ) -> Work | None:
        self.check(options.segment_bytes >= 0, f"segment_bytes={options.segment_bytes} is negative")
        call = Call(self._collective, self.group, self._like, blocks, source, target, self.op, self._root, common, even)
        call.after.extend(functools.partial(_copy_back, *pair) for pair in self._after)
        return perform(call, options)


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    tensor.copy_(flat.view_as(tensor))
