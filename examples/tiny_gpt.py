"""Tiny GPT: training on sequences that are split over the ranks, with the losses of the unsplit model.

The text is sums, 3+8=11;, with one token for each character: the digits after = depend on earlier tokens, which may be
on another rank. For comparison every rank also trains the unsplit model.

    torchrun --nproc-per-node 2 tiny_gpt.py --steps 40
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import dist_prims
from dist_prims.models import GPT
from dist_prims.parallel import split_sequence

CHARACTERS, BATCH = "0123456789+=;", 8


def batch(step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums as characters, the same on every rank, and the character that follows each."""
    numbers = torch.randint(10, (BATCH, tokens, 2), generator=torch.Generator().manual_seed(step)).tolist()
    texts = ["".join(f"{one}+{two}={one + two};" for one, two in row)[: tokens + 1] for row in numbers]
    encoded = torch.tensor([[CHARACTERS.index(character) for character in text] for text in texts])
    return encoded[:, :-1], encoded[:, 1:]


def backward(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="tokens in a sequence, rounded to twice the ranks")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = max(arguments.tokens // (2 * size), 1) * 2 * size
    torch.manual_seed(0)
    whole, split = (
        GPT(len(CHARACTERS), tokens, 32, heads=4, layers=arguments.layers, kv_heads=2, attention=kind, order="zigzag")
        for kind in ("plain", "ring")
    )
    split.load_state_dict(whole.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (whole, split)]
    if rank == 0:
        print(f"{tokens} tokens in a sequence, {tokens // size} on each of {size} ranks\n")
        print("step   loss, unsplit   loss, split")
    for step in range(arguments.steps):
        inputs, targets = batch(step, tokens)
        expected = backward(whole, inputs, targets)
        found = backward(split, *(split_sequence(each, order="zigzag") for each in (inputs, targets)))
        dist_prims.average_gradients(split)
        dist.all_reduce(found)
        found /= size
        if step == 0:
            for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)
        if step < 5:  # later, rounding has accumulated
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"{step:4} {expected:15.6f} {found:13.6f}")


if __name__ == "__main__":
    main()
