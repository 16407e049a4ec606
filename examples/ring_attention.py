"""Ring attention: a sequence split over the ranks, with the results of the unsplit sequence.

For comparison all ranks also compute the unsplit attention, which a real program never would. The second table shows
how a causal mask distributes the work: with contiguous parts the last rank has most of it, with zigzag parts all ranks
have the same.

    torchrun --nproc-per-node 2 ring_attention.py --tokens 128
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import dist_prims
from dist_prims.parallel import ring_attention, sequence_positions, split_sequence, ulysses_attention

BATCH, FEATURES = 2, 16
ORDERS = ("contiguous", "zigzag")


def random_tensors(tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, the same on every rank."""
    torch.manual_seed(0)
    return [torch.randn(BATCH, count, tokens, FEATURES) for count in (heads, kv_heads, kv_heads, heads)]


def largest_error(attention: Callable[..., torch.Tensor], tensors: list[torch.Tensor], order: str) -> float:
    """The largest difference between split and unsplit attention, over the output and the gradients of q, k and v."""
    *inputs, grad = tensors
    whole = [each.clone().requires_grad_() for each in inputs]
    output = scaled_dot_product_attention(whole[0], whole[1], whole[2], is_causal=True, enable_gqa=True)
    expected = [output, *torch.autograd.grad(output, whole, grad)]
    parts = [split_sequence(each, 2, order=order).requires_grad_() for each in inputs]
    output = attention(*parts, causal=True, order=order, enable_gqa=True)
    found = [output, *torch.autograd.grad(output, parts, split_sequence(grad, 2, order=order))]
    errors = [
        (ours - split_sequence(theirs, 2, order=order)).abs().max()
        for ours, theirs in zip(found, expected, strict=True)
    ]
    return torch.stack(errors).max().item()


def check_padded_batch(tokens: int) -> None:
    """A batch of sequences of different lengths gives the results of each sequence alone."""
    lengths = [tokens, tokens // 3]
    q, k, v, _ = random_tensors(tokens, 2, 2)
    parts = [split_sequence(each, 2, order="zigzag") for each in (q, k, v)]
    output = ring_attention(*parts, causal=True, order="zigzag", lengths=lengths)
    alone = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        one = [each[row, :, :length] for each in (q, k, v)]
        alone[row, :, :length] = scaled_dot_product_attention(one[0], one[1], one[2], is_causal=True)
    torch.testing.assert_close(output, split_sequence(alone, 2, order="zigzag"), rtol=0, atol=1e-5)


def check_refusal(tokens: int) -> None:
    """Parts of different lengths raise MismatchError on every rank, before anything is sent."""
    q = torch.ones(1, 1, tokens + (dist.get_rank() == 1), FEATURES)
    try:
        ring_attention(q, q, q)
    except dist_prims.MismatchError:
        return
    assert dist.get_world_size() == 1, "parts of different lengths raised no MismatchError"


def shares_of_work(order: str, tokens: int) -> list[float]:
    """The fraction of all pairs of query and key that each rank computes under a causal mask."""
    shares = torch.zeros(dist.get_world_size())
    shares[dist.get_rank()] = (sequence_positions(tokens, order=order) + 1).sum() / (tokens * (tokens + 1) / 2)
    dist.all_reduce(shares)
    return [float(each) for each in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens on each rank, an even number")
    parser.add_argument("--backend", default="dist_prims", help="backend of the group")
    arguments = parser.parse_args()
    dist_prims.init(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, heads = arguments.tokens * size, 2 * size

    errors = {}
    for attention in (ring_attention, ulysses_attention):
        for order in ORDERS:
            for kv_heads in (heads, size):
                error = largest_error(attention, random_tensors(tokens, heads, kv_heads), order)
                name = f"{attention.__name__:18} {order:11} {kv_heads:8}"
                assert error < 1e-5, f"{name}: {error:.0e} from the unsplit attention"
                errors[name] = error
    check_padded_batch(tokens)
    check_refusal(tokens)
    shares = {order: shares_of_work(order, tokens) for order in ORDERS}
    assert max(shares["zigzag"]) - min(shares["zigzag"]) < 1e-6, "zigzag: the ranks have different work"

    if rank == 0:
        print(f"{tokens} tokens, {arguments.tokens} on each of {size} ranks, {heads} query heads\n")
        print("attention          order       kv heads   largest error against the unsplit attention")
        print("\n".join(f"{name}   {error:.0e}" for name, error in errors.items()))
        print("\ncausal work of each rank")
        print("\n".join(f"{order:11}" + "".join(f"{share:8.1%}" for share in shares[order]) for order in ORDERS))


if __name__ == "__main__":
    main()
