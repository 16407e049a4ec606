"""Losses over a split vocabulary: a last layer split by words, and logits that are never stored whole.

Loss and gradients equal those of one process, whether the logits are split, or computed and used in chunks of rows.

    torchrun --nproc-per-node 2 vocabulary.py --words 2003
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import dist_prims
from dist_prims.parallel import linear_cross_entropy, split_cross_entropy

FEATURES, ROWS, CHUNK, STEPS = 16, 256, 32, 15


class LargestTensor(TorchFunctionMode):
    """Records the number of elements of the largest tensor that torch returns."""

    elements = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            self.elements = max(self.elements, each.numel() if isinstance(each, torch.Tensor) else 0)
        return made


def last_layer(words: int, part: slice) -> nn.Linear:
    """The words ``part`` of the layer that one process would have."""
    torch.manual_seed(2)
    whole, layer = nn.Linear(FEATURES, words), nn.Linear(FEATURES, len(range(words)[part]))
    layer.weight.data, layer.bias.data = whole.weight.data[part].clone(), whole.bias.data[part].clone()
    return layer


def measure(
    hidden: torch.Tensor, layer: nn.Linear, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The loss, the gradients of the rows, the weight and the bias, and the size of the largest tensor."""
    rows = hidden.clone().requires_grad_()
    with LargestTensor() as largest:
        loss = loss_of(rows)
        gradients = torch.autograd.grad(loss, [rows, layer.weight, layer.bias])
    return loss.detach(), [*gradients], largest.elements


def train(words: int, part: slice) -> list[float]:
    """The losses of a model that learns the successor of each word, with ``part`` of the last layer on this rank."""
    torch.manual_seed(1)
    embedding, last = nn.Embedding(words, FEATURES), last_layer(words, part)
    optimizer = torch.optim.Adam([*embedding.parameters(), *last.parameters()], lr=0.05)
    losses = []
    for step in range(STEPS):
        inputs = torch.randint(words, (ROWS,), generator=torch.Generator().manual_seed(step % 3))
        hidden, targets = torch.tanh(embedding(inputs)), (7 * inputs + 1) % words
        if part == slice(None):
            loss = F.cross_entropy(last(hidden), targets)
        else:
            loss = linear_cross_entropy(hidden, last.weight, targets, last.bias, chunk=CHUNK)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--words", type=int, default=2003, help="size of the vocabulary")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size, words = dist.get_rank(), dist.get_world_size(), arguments.words
    log = print if rank == 0 else lambda text: None
    own = slice(words * rank // size, words * (rank + 1) // size)
    torch.manual_seed(0)
    hidden, targets = torch.randn(ROWS, FEATURES), torch.randint(words, (ROWS,))
    whole, part = last_layer(words, slice(None)), last_layer(words, own)
    loss, gradients, elements = measure(hidden, whole, lambda h: F.cross_entropy(whole(h), targets))
    log(f"{words} words over {size} ranks, {ROWS} rows of {FEATURES} features, chunks of {CHUNK} rows\n")
    log("logits                             loss   error of gradients   elements of the largest tensor")
    log(f"one process, whole logits    {loss:10.6f} {elements:45,}")
    methods: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "split by words": lambda h: split_cross_entropy(part(h), targets),
        "split, by chunks": lambda h: linear_cross_entropy(h, part.weight, targets, part.bias, chunk=CHUNK),
    }
    expected = [gradients[0], *(each[own] for each in gradients[1:])]
    for name, loss_of in methods.items():
        found, gradients, elements = measure(hidden, part, loss_of)
        if name == "split by words":  # a partial gradient; the loss by chunks reduces it itself
            dist_prims.all_reduce(gradients[0])
        error = max(float((a - b).abs().max()) for a, b in zip(gradients, expected, strict=True))
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-6)
        log(f"{name:28} {found:10.6f} {error:20.0e} {elements:32,}")
    limit = max(max(CHUNK, FEATURES) * len(part.bias), ROWS * FEATURES)
    assert elements <= limit, f"by chunks a tensor has {elements} elements, more than {limit}"
    losses = train(words, own)
    torch.testing.assert_close(losses, train(words, slice(None)), rtol=0, atol=1e-4)
    log(f"\n{STEPS} steps of training, loss {losses[0]:.2f} to {losses[-1]:.2f}: the losses of one process")


if __name__ == "__main__":
    main()
