"""The mean of sparse gradients: their rows are gathered, not added to a dense tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__: list[str] = []


def announced_sparse(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> set[int]:
    """The numbers of the parameters whose layers announce sparse gradients, so that they need no place in a bucket. A
    parameter whose gradient turns out to be sparse without that loses its place later.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 2))
    >>> announced_sparse(model, [*model.parameters()])
    {0}
    """
    layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    announced = {id(each.weight) for each in model.modules() if isinstance(each, layers) and each.sparse}
    return {number for number, parameter in enumerate(parameters) if id(parameter) in announced}


def sparse_mean(parameter: torch.Tensor, share: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of ``share`` times the gradient of each rank, coalesced, with the same bits on every rank. A rank without
    a gradient takes part with an empty one. Every rank calls this.
    """
    own = parameter.grad if parameter.grad is not None else _nothing(parameter)
    own = own.coalesce()
    # 1. The number of rows of each rank.
    indices, values = own.indices(), own.values() * share
    count = torch.tensor([values.shape[0]], device=values.device)
    counts = [int(each) for each in _gathered(count, group)]
    longest = max(counts)
    if not longest:
        return own
    # 2. The rows of all ranks, padded to one length.
    all_indices = _gathered(_padded(indices.t(), longest), group)
    all_values = _gathered(_padded(values, longest), group)
    joined = torch.sparse_coo_tensor(
        torch.cat([each[:count] for each, count in zip(all_indices, counts, strict=True)]).t(),
        torch.cat([each[:count] for each, count in zip(all_values, counts, strict=True)]),
        parameter.shape,
        check_invariants=False,
    )
    return joined.coalesce()


def _nothing(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without rows, of the layout that embeddings give: one sparse dimension."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape, check_invariants=False)


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], *rows.shape[1:])])


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensors of all ranks, which must have one shape."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor, group=group)
    return found
