"""Gradients of a batch's inputs and targets, collected over its micro-batches.

Each micro-batch has a backward of its own. A tensor of the batch that requires a gradient may be the output of a graph
that the program has built, and autograd runs backward through a graph only once. So each micro-batch starts from leaves
of its own, and after the last micro-batch one backward passes the collected gradients to the tensors of the batch.

>>> x = torch.ones(3, requires_grad=True)
>>> batch = Leaves((2 * x,), [(part,) for part in torch.ones(3).split([1, 2])])
>>> for micro, (leaf,) in enumerate(batch.micro_batches):
...     batch.set_gradients(micro, (torch.full_like(leaf, micro),))
>>> give_back(batch)
>>> x.grad
tensor([0., 2., 2.])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .split_backward import same_memory
from .stage import Tensors

__all__: list[str] = []


class Leaves:
    """The tensors of a batch, and of each of its micro-batches. ``learn``: whether gradients are computed at all.
    ``apart``: tensors that require one are copied, for a stage may begin in place."""

    def __init__(self, batch: Tensors, cut: Sequence[Tensors], learn: bool = True, apart: bool = False) -> None:
        self.batch = batch
        wanting = [learn and each.requires_grad for each in batch]
        self.micro_batches: list[Tensors] = [
            tuple(_leaf(part, wants, apart) for part, wants in zip(micro, wanting, strict=True)) for micro in cut
        ]

    def set_gradients(self, micro: int, grads: Sequence[torch.Tensor]) -> None:
        """Set the gradients of the tensors of a micro-batch that require one."""
        wanting = (each for each in self.micro_batches[micro] if each.requires_grad)
        for leaf, grad in zip(wanting, grads, strict=True):
            leaf.grad = grad.to(leaf.device)

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of the batch with their gradients."""
        found = []
        for whole, parts in zip(self.batch, zip(*self.micro_batches, strict=True), strict=True):
            if any(part.grad is not None for part in parts):
                grads = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
                found.append((whole, torch.cat(grads).to(whole.device)))
        return found


def give_back(*batches: Leaves) -> None:
    """Pass the gradients of the micro-batches to the batch, in one backward."""
    pairs = [pair for batch in batches for pair in batch.gradients()]
    if pairs:
        torch.autograd.backward([whole for whole, _ in pairs], [grad for _, grad in pairs])


def _leaf(part: torch.Tensor, wants: bool, apart: bool) -> torch.Tensor:
    leaf = part.detach().clone() if wants and apart else part.detach()
    if apart and leaf.layout is torch.strided and type(leaf) is torch.Tensor and not (leaf.is_conj() or leaf.is_neg()):
        # Parts of one tensor share its version: to change one in place would forbid the backward of the others.
        leaf = same_memory(leaf)
    return leaf.requires_grad_() if wants else leaf
