"""Tiny GPT: training on sequences that are split over the ranks, with the losses of the unsplit model.

The text is sums, 3+8=11;, with one token for each character: the digits after = depend on earlier tokens, which may be
on another rank. For comparison every rank also trains the unsplit model.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from .. import average_gradients
from .._console import Console
from ..models.gpt import GPT
from ..parallel.sequence import split_sequence

__all__: list[str] = []

_CHARACTERS = "0123456789+=;"
_STEPS, _SUMS, _BATCH = 40, 8, 8
_TOKENS = 6 * _SUMS  # a sum with a two-digit result has six; divisible by 2, 4, 6 and 8


def run(console: Console) -> None:
    """Train the unsplit and the split model, and compare gradients and losses."""
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
    return GPT(len(_CHARACTERS), tokens, width=32, heads=4, layers=2, kv_heads=2, attention=attention, order="zigzag")


def _learn(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    return loss.detach()


def _batch(step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums as characters, the same on every rank, and the character that follows each."""
    numbers = torch.randint(10, (_BATCH, tokens, 2), generator=torch.Generator().manual_seed(step)).tolist()
    texts = ["".join(f"{one}+{two}={one + two};" for one, two in row)[: tokens + 1] for row in numbers]
    tokens_of = torch.tensor([[_CHARACTERS.index(character) for character in text] for text in texts])
    return tokens_of[:, :-1], tokens_of[:, 1:]


def _worst(split: GPT, whole: GPT) -> float:
    pairs = zip(split.parameters(), whole.parameters(), strict=True)
    return max(float((one.grad - two.grad).abs().max()) for one, two in pairs if one.grad is not None is not two.grad)
