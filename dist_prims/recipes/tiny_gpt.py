"""Tiny GPT: trained on sequences that are split over the ranks, step by step as the whole one.

The text is a sum written out, 3+8=11;, token by token: what follows the = depends on what stands before it, on another
rank as well. Every rank trains the unsplit model beside its part, to compare with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from .. import average_gradients
from .._console import Console
from ..models.gpt import GPT
from ..parallel.sequence import split_sequence

__all__ = ["run"]

_LETTERS = "0123456789+=;"
_STEPS, _SUMS, _BATCH = 40, 8, 8
_TOKENS = 6 * _SUMS  # a sum with two digits for its result has six; divided by 2, 4, 6 and 8


def run(console: Console) -> None:
    """Train whole and split, and compare what comes out."""
    ranks = dist.get_world_size()
    tokens = _TOKENS // (2 * ranks) * 2 * ranks
    torch.manual_seed(0)
    whole, split = _model(tokens, "plain"), _model(tokens, "ring")
    split.load_state_dict(whole.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, split)]
    rows = []
    for step in range(_STEPS):
        inputs, targets = _batch(step, tokens)
        mine = [split_sequence(each, order="zigzag") for each in (inputs, targets)]
        losses = [_learn(whole, inputs, targets), _learn(split, *mine)]
        average_gradients(split)
        if step == 0:
            worst = _worst(split, whole)
            console.check(worst < 1e-5, "first step: the averaged gradients equal the whole model's")
        for optimizer in optimizers:
            optimizer.step()
        dist.all_reduce(losses[1])
        losses[1] /= ranks
        if step in (0, 1, 2, 5, 10, 20, _STEPS - 1):
            rows.append((f"step {step + 1}", f"{losses[0]:.6f}", f"{losses[1]:.6f}"))
        if step < 5:
            console.check(bool((losses[0] - losses[1]).abs() < 1e-4), f"step {step + 1}: the losses are equal")
    console.table(("", "loss, whole", f"loss, split over {ranks}"), rows)
    console.check(float(losses[1]) < 0.7 * float(rows[0][2]), "it learns")


def _model(tokens: int, attention: str) -> GPT:
    return GPT(len(_LETTERS), tokens, width=32, heads=4, layers=2, kv_heads=2, attention=attention, order="zigzag")


def _learn(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    return loss.detach()


def _batch(step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums, the same on every rank, and what follows each letter."""
    numbers = torch.randint(10, (_BATCH, tokens, 2), generator=torch.Generator().manual_seed(step)).tolist()
    texts = ["".join(f"{one}+{two}={one + two};" for one, two in row)[: tokens + 1] for row in numbers]
    letters = torch.tensor([[_LETTERS.index(letter) for letter in text] for text in texts])
    return letters[:, :-1], letters[:, 1:]


def _worst(split: GPT, whole: GPT) -> float:
    pairs = zip(split.parameters(), whole.parameters(), strict=True)
    return max(float((one.grad - two.grad).abs().max()) for one, two in pairs if one.grad is not None is not two.grad)
