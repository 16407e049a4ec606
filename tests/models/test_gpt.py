"""A sequence is split and joined; a GPT of which each rank has a part trains as the whole one does, in less memory."""

from __future__ import annotations

import copy
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.models.gpt import GPT, CausalSelfAttention
from dist_prims.parallel.sequence import (
    join_sequence,
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from dist_prims.parallel.sequence.ring import Hop

CONTEXT = 24  # divides by 2, 4, 6 and 8
SMALL: dict[str, Any] = {"vocabulary": 11, "context": CONTEXT, "width": 16, "heads": 4, "layers": 2}
ORDERS = ["contiguous", "zigzag"]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and those that follow them: they count, each sequence from a beginning of its own."""
    text = (torch.arange(CONTEXT + 1) + torch.arange(3).unsqueeze(1) * 3 + number) % 11
    return text[:, :-1], text[:, 1:]


def loss(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "attention", "order", "kv_heads"),
    [
        (4, "ring", "zigzag", 2),
        (3, "ring", "contiguous", 4),
        (4, "ulysses", "zigzag", 4),
        (2, "ulysses", "contiguous", 2),
    ],
)
def test_trains_split_as_it_does_whole(size: int, attention: str, order: str, kv_heads: int) -> None:
    def body() -> None:
        torch.manual_seed(0)
        whole = GPT(**SMALL, kv_heads=kv_heads)
        split = GPT(**SMALL, kv_heads=kv_heads, attention=attention, order=order)
        split.load_state_dict(whole.state_dict())
        for number in range(3):
            data = batch(number)
            mine = [split_sequence(each, 1, None, order) for each in data]
            near(split(mine[0]), split_sequence(whole(data[0]), 1, None, order), "logits")
            for model, each in ((whole, data), (split, mine)):
                model.zero_grad()
                loss(model, *each).backward()
            dist_prims.average_gradients(split)
            compare(split, whole)
            step(whole)
            step(split)

    dist_prims.spawn(body, size, backend="dist_prims", timeout=90)


def step(model: GPT) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.5 * parameter.grad)


def near(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    assert torch.allclose(found, wanted, atol=1e-5, rtol=1e-5), f"{what}: {(found - wanted).abs().max()} apart"


def compare(split: GPT, whole: GPT) -> None:
    for (name, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        near(one.grad, other.grad, name)


def test_plain_is_causal_and_learns() -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL)
    tokens, targets = batch(0)
    later = tokens.clone()
    later[:, 12:] = 1
    assert torch.equal(model(tokens)[:, :12], model(later)[:, :12])
    before = loss(model, tokens, targets).item()
    for number in range(40):
        model.zero_grad()
        loss(model, *batch(number)).backward()
        step(model)
    assert loss(model, tokens, targets).item() < before / 4


def test_a_copy_and_a_checkpoint_of_activations() -> None:
    """What recomputes its forward makes the same calls on every rank, so the ring goes round once more."""

    def body() -> None:
        torch.manual_seed(0)
        block = CausalSelfAttention(8, 2, attention="ring", group=dist.new_group([0, 1]))
        other: Any = copy.deepcopy(torch.nn.Sequential(block))
        assert other[0].group is block.group  # a group cannot be copied
        x = split_sequence(torch.randn(1, 8, 8), 1, None, "zigzag")
        block(x).square().sum().backward()
        torch.utils.checkpoint.checkpoint(other, x, use_reentrant=False).square().sum().backward()
        for one, two in zip(block.parameters(), other.parameters(), strict=True):
            assert one is not two
            assert torch.equal(one.grad, two.grad)
        model = GPT(**SMALL, attention="ring", group=block.group)
        again: Any = copy.deepcopy(model)
        assert again.group is again.blocks[1].attention.group is block.group
        assert torch.equal(again(batch(0)[0][:, :12]), model(batch(0)[0][:, :12]))

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention": "flash"}, "attention='flash'; choose 'plain', 'ring' or 'ulysses'"),
        ({"heads": 3}, "width=16, heads=3, kv_heads=3: each must be a multiple of the next"),
        ({"kv_heads": 3}, "width=16, heads=4, kv_heads=3: each must be"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"order": "spiral"}, "order='spiral'; choose 'contiguous' or 'zigzag'"),
    ],
)
def test_blocks_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GPT(**{**SMALL, **given})


def test_a_sequence_longer_than_the_context() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="a sequence of 48 tokens is longer than context=24"):
            GPT(**SMALL, attention="ring")(torch.zeros(1, 24, dtype=torch.int64))
        rank = dist.get_rank()
        expected = (
            (ValueError, "sequence of 26") if rank else (MismatchError, "rank 1 failed: .* GPT: a sequence of 26")
        )
        with pytest.raises(expected[0], match=expected[1]):  # on one rank only, and the other does not wait for it
            GPT(**SMALL, attention="ring")(torch.zeros(1, 12 + rank, dtype=torch.int64))

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize(("size", "order"), [(1, ORDERS[-1]), *((3, order) for order in ORDERS)])
def test_split_and_join(size: int, order: str) -> None:
    def body() -> None:
        rank, whole = dist.get_rank(), torch.arange(3.0 * 4 * size * 2).view(3, 4 * size, 2)
        part = split_sequence(whole.clone().requires_grad_(), 1, None, order)
        places = sequence_positions(4 * size, None, order)
        assert torch.equal(part, whole[:, places])
        leaf = part.detach().requires_grad_()
        joined = join_sequence(leaf, 1, None, order)
        assert torch.equal(joined, whole)
        (joined * whole * (rank + 1)).sum().backward()  # every rank's loss reaches it
        assert torch.equal(leaf.grad, part * sum(range(1, size + 1)))
        assert join_sequence(leaf[:0], 1, None, order).shape == (0, 4 * size, 2)

    dist_prims.spawn(body, size, timeout=60)


def test_sequences_that_cannot_be_split() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"6 tokens do not divide into 4 chunks \(order='zigzag'\)"):
            split_sequence(torch.ones(1, 6), 1, None, "zigzag")
        with pytest.raises(ValueError, match="3 tokens do not divide into 2 chunks"):
            join_sequence(torch.ones(1, 3), 1, None, "zigzag")
        with pytest.raises(ValueError, match="order='snake'; choose"):
            sequence_positions(4, None, "snake")
        group = dist.new_group([0])
        if dist.get_rank() == 1:
            tokens = torch.ones(1, 4, dtype=torch.int64)
            for call in (
                lambda: split_sequence(tokens, 1, group),
                lambda: join_sequence(tokens, 1, group),
                lambda: sequence_positions(4, group),
                lambda: GPT(**SMALL, attention="ring", group=group)(tokens),
            ):
                with pytest.raises(ValueError, match="rank 1 is not in the group"):
                    call()

    dist_prims.spawn(body, 2, timeout=60)


def test_a_second_derivative_is_refused() -> None:
    """It was left out in silence where the loss is a plain sum, whose gradient is a constant."""

    def body() -> None:
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        for loss in (
            lambda: ring_attention(x, x, x).sum(),
            lambda: ulysses_attention(x, x, x).sum(),
            lambda: join_sequence(x).sum(),
        ):
            torch.autograd.grad(loss(), x)
            with pytest.raises(RuntimeError, match="a second derivative is not offered"):
                torch.autograd.grad(loss(), x, create_graph=True)

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.slow
def test_compiled() -> None:
    """The graph breaks at the call, and is the same computation."""

    def body() -> None:
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        for function in (
            lambda x: ring_attention(2 * x, x, x, causal=True) + 1,
            lambda x: ulysses_attention(2 * x, x, x, causal=True) + 1,
            lambda x: join_sequence(2 * x) + 1,
        ):
            compiled = torch.compile(function, backend="eager")
            assert torch.equal(compiled(x), function(x))
            grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (compiled, function)]
            assert torch.equal(*grads)

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_a_group_waits_as_long_as_its_own_timeout(backend: str) -> None:
    def body() -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=50))
        ring_attention(*torch.ones(3, 1, 2, 4, 8), group=group)
        dist.default_pg_timeout = timedelta(milliseconds=1)  # of no account here
        x = torch.ones(2)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        assert torch.equal(Hop(x, group).arrived(), x)

    dist_prims.spawn(body, 2, backend=backend, timeout=60)


def peak(size: int, kind: str) -> float:
    """The most bytes of tensors alive at once on a rank, in a forward and backward of 2048 tokens on all ranks."""
    attention = {"ring": ring_attention, "ulysses": ulysses_attention}[kind]

    def body() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
            q, k, v = (torch.randn(1, 4, 2048 // size, 64, requires_grad=True) for _ in range(3))
            attention(q, k, v, causal=True, order="zigzag").sum().backward()
        events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
        alive = highest = 0
        for event in sorted(events, key=lambda each: each.start_ns()):
            alive += event.nbytes()
            highest = max(highest, alive)
        assert highest > 3 * 4 * 2048 // size * 64 * 4  # what is measured is there: at least q, k and v
        return highest

    return max(dist_prims.spawn(body, size, backend="dist_prims", timeout=60))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_memory_falls_with_the_ranks(kind: str) -> None:
    one, two, four = (peak(size, kind) for size in (1, 2, 4))
    print(f"{kind}: {one / 1e6:.1f}, {two / 1e6:.1f}, {four / 1e6:.1f} MB on 1, 2 and 4 ranks")
    assert four < 0.6 * two
    assert four < 0.5 * one
