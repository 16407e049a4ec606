"""Losses over a split vocabulary: a last layer split by words, and logits that are never stored whole.

Loss and gradients equal those of one process, whether the logits are split, or computed and used in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from .._console import Console
from ..collectives import all_reduce
from ..parallel.vocabulary import linear_cross_entropy, split_cross_entropy

__all__: list[str] = []

_WORDS, _FEATURES, _ROWS, _CHUNK, _STEPS = 2003, 16, 256, 32, 15


def run(console: Console) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [_WORDS * each // size for each in range(size + 1)]
    mine = slice(ends[rank], ends[rank + 1])
    _extreme_logits(console)
    console.say(f"\n  {_WORDS} words over {size} ranks, {_ROWS} rows of {_FEATURES} features, chunks of {_CHUNK}")
    torch.manual_seed(0)
    hidden, targets = torch.randn(_ROWS, _FEATURES), torch.randint(_WORDS, (_ROWS,))
    last = _last_layer(slice(None))
    whole = _measure(hidden, last, lambda h: F.cross_entropy(last(h), targets))
    rows = [("one process, whole logits", f"{whole.loss:.6f}", "", f"{whole.largest:,}")]
    part = _last_layer(mine)
    methods: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "split by words": lambda h: split_cross_entropy(part(h), targets),
        "split, by chunks": lambda h: linear_cross_entropy(h, part.weight, targets, part.bias, chunk=_CHUNK),
    }
    for name, loss in methods.items():
        found = _measure(hidden, part, loss)
        if name == "split by words":  # a partial gradient; the loss by chunks reduces it itself
            all_reduce(found.gradients[0])
        expected = (whole.gradients[0], *(each[mine] for each in whole.gradients[1:]))
        error = max(float((a - b).abs().max()) for a, b in zip(found.gradients, expected, strict=True))
        console.check(abs(found.loss - whole.loss) <= 1e-5, f"{name}: the loss equals one process's within 1e-5")
        console.check(error <= 1e-6, f"{name}: the gradients equal one process's within 1e-6")
        rows.append((name, f"{found.loss:.6f}", f"{error:.0e}", f"{found.largest:,}"))
    limit = max(max(_CHUNK, _FEATURES) * len(part.bias), _ROWS * _FEATURES)
    console.check(found.largest == limit, f"by chunks the largest tensor has {limit:,} elements, not {whole.largest:,}")
    console.table(("logits", "loss", "error of gradients", "largest tensor"), rows)
    _train(console, mine)


def _last_layer(part: slice) -> nn.Linear:
    """The words ``part`` of the layer that one process would have."""
    torch.manual_seed(2)
    whole, layer = nn.Linear(_FEATURES, _WORDS), nn.Linear(_FEATURES, len(range(_WORDS)[part]))
    layer.weight.data, layer.bias.data = whole.weight.data[part].clone(), whole.bias.data[part].clone()
    return layer


def _measure(hidden: torch.Tensor, layer: nn.Linear, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> _Found:
    rows = hidden.clone().requires_grad_()
    layer.zero_grad()
    with _Sizes() as sizes:  # type: ignore[no-untyped-call]
        loss = loss_of(rows)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad.clone() for each in (rows, layer.weight, layer.bias) if each.grad is not None]
    return _Found(loss.item(), tuple(gradients), sizes.largest)


def _extreme_logits(console: Console) -> None:
    """Check extreme logits of two words, both on rank 0."""
    logits = torch.tensor([[1000.0, 0.0]])[:, : 2 * (console.rank == 0)]
    loss, far = (split_cross_entropy(logits, torch.tensor([each])).item() for each in (0, 1))
    console.check((loss, far) == (0.0, 1000.0), f"logits [1000, 0]: losses are {loss:g} and {far:g}, not nan")


def _train(console: Console, mine: slice) -> None:
    """Train a model on the successor of each word, with the whole layer and with this rank's part."""
    curves: list[list[float]] = []
    for part in (slice(None), mine):
        torch.manual_seed(1)
        embedding, last = nn.Embedding(_WORDS, _FEATURES), _last_layer(part)
        optimizer = torch.optim.Adam([*embedding.parameters(), *last.parameters()], lr=0.05)
        curves.append([])
        for step in range(_STEPS):
            words = torch.randint(_WORDS, (_ROWS,), generator=torch.Generator().manual_seed(step % 3))
            hidden, follows = torch.tanh(embedding(words)), (7 * words + 1) % _WORDS
            if part is mine:
                loss = linear_cross_entropy(hidden, last.weight, follows, last.bias, chunk=_CHUNK)
            else:
                loss = F.cross_entropy(last(hidden), follows)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            curves[-1].append(loss.item())
    error = max(abs(a - b) for a, b in zip(*curves, strict=True))
    curve = f"{_STEPS} steps of training, loss {curves[1][0]:.2f} to {curves[1][-1]:.2f}"
    console.check(error <= 1e-4, f"{curve}: the losses equal one process's within 1e-4")


class _Found(NamedTuple):
    loss: float
    gradients: tuple[torch.Tensor, ...]
    largest: int


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            self.largest = max(self.largest, each.numel() if isinstance(each, torch.Tensor) else 0)
        return made
