"""Attention over a split sequence: equal to the unsplit, forward and backward, and nothing sent on bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.parallel.sequence import ring_attention, split_sequence, ulysses_attention
from dist_prims.parallel.sequence.kernels import merge, prepared
from dist_prims.parallel.sequence.layout import SequenceLayout, pieces_of

BOTH = {"ring": ring_attention, "ulysses": ulysses_attention}
ORDERS = ["contiguous", "zigzag"]
Tensor = torch.Tensor


def near(found: Tensor, wanted: Tensor, bound: float = 1e-5, what: str = "") -> None:
    assert found.shape == wanted.shape, what
    found, wanted = found.double(), wanted.double()
    assert torch.allclose(found, wanted, atol=bound, rtol=bound), f"{what}: {(found - wanted).abs().max()} apart"


def unsplit(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lengths: list[int] | None) -> Tensor:
    """The formula, in double precision, on one process."""
    q, k, v = (each.double() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    tokens = torch.arange(q.shape[2])
    hidden = tokens[None, :] > tokens[:, None] if causal else torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(hidden, -torch.inf)
    if lengths is None:
        return scores.softmax(-1) @ v
    rows = []
    for row, length in enumerate(lengths):
        seen = scores[row, :, :length, :length].softmax(-1) @ v[row, :, :length]
        rows.append(torch.nn.functional.pad(seen, (0, 0, 0, len(tokens) - length)))
    return torch.stack(rows)


def twin(
    shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype, causal: bool, lengths: list[int] | None
) -> list[Tensor]:
    """q, k, v, the gradient that comes, the output and the three gradients, all of the whole sequence."""
    batch, heads, tokens, features = shape
    torch.manual_seed(tokens)
    q = torch.randn(batch, heads, tokens, features, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, tokens, features, dtype=dtype)
    grad = torch.randn_like(q)
    asked = [each.double().requires_grad_() for each in (q, k, v)]
    output = unsplit(asked[0], asked[1], asked[2], causal, 0.4, lengths)
    return [q, k, v, grad, output.detach(), *torch.autograd.grad(output, asked, grad.double())]


def compare(
    kind: str,
    order: str,
    shape: tuple[int, int, int, int],
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    lengths: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """On this rank: outputs and gradients are those of the unsplit."""
    whole = twin(shape, kv_heads or shape[1], dtype, causal, lengths)
    q, k, v, grad, *wanted = (split_sequence(each, 2, group, order) for each in whole)
    asked = [each.requires_grad_() for each in (q, k, v)]
    options: dict[str, Any] = {"causal": causal, "scale": 0.4, "group": group, "order": order, "lengths": lengths}
    output = BOTH[kind](*asked, enable_gqa=kv_heads is not None, **options)
    found = [output, *torch.autograd.grad(output, asked, grad)]
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    for name, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert one.dtype == dtype
        near(one, other, bound, name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "backend"), [(1, "dist_prims"), (2, "dist_prims"), (3, "gloo"), (4, "dist_prims")])
def test_equal_to_the_unsplit(size: int, backend: str) -> None:
    def body() -> None:
        for kind in BOTH:
            for order in ORDERS:
                for causal in (False, True):
                    compare(kind, order, (2, size, 4 * size, 8), causal=causal)
            compare(kind, "zigzag", (2, 3 * size, 6 * size, 4), kv_heads=size)  # three of queries share one of keys
            compare(kind, "zigzag", (2, size, 0, 4))
            compare(kind, "zigzag", (0, size, 2 * size, 4))
        compare("ring", "contiguous", (1, 1, size, 4))  # one token a rank, and more ranks than heads
        compare("ring", "zigzag", (1, 3, 128 * size, 16), kv_heads=1)

    dist_prims.spawn(body, size, backend=backend, timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_each_dtype_is_as_the_unsplit(dtype: torch.dtype) -> None:
    def body() -> None:
        for kind in BOTH:
            compare(kind, "zigzag", (2, 6, 24, 8), dtype=dtype)
            compare(kind, "zigzag", (2, 6, 24, 8), kv_heads=3, dtype=dtype)
            with sdpa_kernel(SDPBackend.MATH):
                compare(kind, "zigzag", (2, 6, 24, 8), kv_heads=3, dtype=dtype)

    dist_prims.spawn(body, 3, timeout=60)


@pytest.mark.parametrize("size", [1, 3])
def test_sequences_of_given_lengths_are_as_the_unsplit(size: int) -> None:
    def body() -> None:
        whole = 8 * size
        for lengths in ([whole, 1, 5], [0, whole - 1, whole], [3, 3, 4]):
            for kind in BOTH:
                for order in ORDERS:
                    compare(kind, order, (3, 6, whole, 4), causal=order == "zigzag", kv_heads=3, lengths=lengths)
            compare("ring", "zigzag", (3, 1, whole, 4), causal=False, lengths=lengths)
            compare("ring", "contiguous", (3, 1, whole, 4), lengths=lengths)

    dist_prims.spawn(body, size, timeout=60)


def test_groups_within_the_group() -> None:
    def body() -> None:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 2, 3]), dist.new_group([1])]
        compare("ring", "zigzag", (1, 1, 12, 4), group=groups[rank == 1])
        compare("ulysses", "contiguous", (1, 3, 9, 4), group=groups[rank == 1])
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not in the group"):
                ring_attention(*torch.ones(3, 1, 1, 2, 4), group=groups[0])

    dist_prims.spawn(body, 4, timeout=60)


def test_memory_of_any_layout() -> None:
    def body() -> None:
        torch.manual_seed(0)
        x = torch.randn(1, 8, 2, 4, 3)
        for kind, attention in BOTH.items():
            for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):  # chosen, whatever the strides are
                split = split_sequence(x, 1).requires_grad_()
                q, k, v = split.permute(4, 0, 2, 1, 3)  # features are 3 apart
                with sdpa_kernel(kernel):
                    attention(q, k, v, causal=True).sum().backward()
                whole = x.clone().requires_grad_()
                q, k, v = whole.permute(4, 0, 2, 1, 3)
                unsplit(q, k, v, True, None, None).sum().backward()
                near(split.grad, split_sequence(whole.grad, 1), what=kind)
            v = torch.ones(1, 2, 8, 1).cumsum(2).expand(-1, -1, -1, 6)  # other features than q's
            output = attention(*(split_sequence(each.detach(), 2) for each in (q, k, v)), causal=True)
            near(output, split_sequence(unsplit(q, k, v, True, None, None), 2).detach())

    dist_prims.spawn(body, 2, timeout=60)


def test_where_torch_takes_its_math_kernel_half_types_are_computed_in_float64() -> None:
    q, v = torch.randn(1, 2, 4, 8).bfloat16(), torch.randn(1, 2, 4, 4).bfloat16()
    assert prepared(q, q, q, True)[0].dtype == torch.bfloat16
    assert [x.shape[3] for x in prepared(q, q, v, True)] == [8, 8, 8]
    assert [x.dtype for x in prepared(q, q, v, True)] == [torch.float64, torch.bfloat16, torch.bfloat16]
    with sdpa_kernel(SDPBackend.MATH):
        assert prepared(q, q, q, True)[0].dtype == torch.float64
        assert prepared(q.float(), q.float(), q.float(), True)[0].dtype == torch.float32
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No viable backend"):
        prepared(q, q, q, True)


def test_autocast_lowers_as_the_original_does() -> None:
    def body() -> None:
        q, k, v = torch.randn(3, 1, 2, 4, 8, requires_grad=True)
        for attention in BOTH.values():
            for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
                with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(kernel):
                    output = attention(q, k.bfloat16(), v)
                assert output.dtype == torch.bfloat16
                assert [each.dtype for each in torch.autograd.grad(output.sum(), (q, k))] == [torch.float32] * 2
            with torch.autocast("cpu", torch.bfloat16):  # neither of these is lowered
                assert attention(q.double(), k.double(), v.double()).dtype == torch.float64
                with pytest.raises(ValueError, match="must be of one floating type"):
                    attention(*torch.ones(3, 1, 2, 4, 8, dtype=torch.int32))

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
    causal=st.booleans(),
    lengths=st.lists(st.integers(0, 40), max_size=4),
)
def test_every_visible_pair_is_computed_once(size: int, order: str, causal: bool, lengths: list[int]) -> None:
    """A plan needs no ranks to be proved: every key that a query sees is in one piece, and no other is."""
    layout = SequenceLayout(size, order, 40 * size, tuple(lengths))
    for row, length in enumerate(lengths):
        where = [[at for chunk in layout.chunks_of(rank, length) for at in chunk] for rank in range(size)]
        assert sorted(at for tokens in where for at in tokens) == list(range(length))
        seen = torch.zeros(length, length, dtype=torch.int64)
        for queries in range(size):
            for keys in range(size):
                for piece in pieces_of(layout, queries, keys, causal):
                    if piece.rows.start <= row < piece.rows.stop:
                        asks, answers = where[queries][piece.queries], where[keys][piece.keys]
                        assert asks
                        assert answers
                        block = torch.ones(len(asks), len(answers), dtype=torch.int64)
                        seen[torch.tensor(asks)[:, None], torch.tensor(answers)] += (
                            block.tril() if piece.causal else block
                        )
        wanted = torch.ones_like(seen)
        assert torch.equal(seen, wanted.tril() if causal else wanted)


def test_zigzag_shares_the_work_evenly() -> None:
    def pairs(order: str, rank: int) -> int:
        layout = SequenceLayout(4, order, 64, (64,))
        pieces = [piece for keys in range(4) for piece in pieces_of(layout, rank, keys, True)]
        areas = [(len(range(64)[piece.queries]), len(range(64)[piece.keys]), piece.causal) for piece in pieces]
        return sum(asks * (asks + 1) // 2 if causal else asks * answers for asks, answers, causal in areas)

    assert [pairs("zigzag", rank) for rank in range(4)] == [520] * 4
    assert [pairs("contiguous", rank) for rank in range(4)] == [136, 392, 648, 904]


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
def test_merging_is_exact_for_far_apart_logarithms(logs: list[float]) -> None:
    blocks = torch.randn(len(logs), 1, 3, dtype=torch.float64)
    output, total = torch.zeros(1, 3, dtype=torch.float64), torch.full((1,), -torch.inf, dtype=torch.float64)
    each = torch.tensor(logs, dtype=torch.float64)
    for block, log in zip(blocks, each, strict=True):
        merge(output, total, block, log[None])
    near(total[0], each.logsumexp(0), 1e-12)
    near(output, (each.softmax(0)[:, None, None] * blocks).sum(0), 1e-12)


def good(tokens: int = 4) -> list[Tensor]:
    return list(torch.ones(3, 1, 2, tokens, 8))


def jagged() -> list[Tensor]:
    x = torch.nested.nested_tensor([torch.ones(2, 2, 8), torch.ones(4, 2, 8)], layout=torch.jagged).transpose(1, 2)
    return [x, x, x]


MISTAKES: list[tuple[str, Callable[[], Any]]] = [
    ("3 tokens on this rank cannot be the two chunks", lambda: ring_attention(*good(3), order="zigzag")),
    ("order='spiral'; choose 'contiguous' or 'zigzag'", lambda: ring_attention(*good(), order="spiral")),
    ("must be of one floating type", lambda: ring_attention(good()[0].double(), *good()[1:])),
    ("must be of one floating type", lambda: ring_attention(*torch.ones(3, 1, 2, 4, 8, dtype=torch.int32))),
    (r"\(2, 4, 8\), k .* are not \(batch, heads", lambda: ring_attention(good()[0][0], *good()[1:])),
    ("with equally many tokens", lambda: ring_attention(good(2)[0], *good()[1:])),
    ("do not fit", lambda: ring_attention(good()[0][..., :4], *good()[1:])),
    ("2 heads of queries cannot share 1 of keys", lambda: ring_attention(good()[0], *torch.ones(2, 1, 1, 4, 8))),
    ("1 heads of queries cannot share 2", lambda: ring_attention(good()[0][:, :1], *good()[1:], enable_gqa=True)),
    ("do not fit: .* one at least", lambda: ring_attention(*torch.ones(3, 1, 2, 4, 0))),
    ("dense tensors on the CPU", lambda: ring_attention(*jagged())),
    ("dense tensors on the CPU; .* context_parallel", lambda: ring_attention(*(x.to("meta") for x in good()))),
    ("'NoneType' object", lambda: ring_attention(good()[0], good()[1], None)),
    (r"lengths=\[9\] must be one for each of 1 sequences, from 0 to 8", lambda: ring_attention(*good(), lengths=[9])),
    (r"lengths=\[1, 2\] must be one", lambda: ring_attention(*good(), lengths=torch.tensor([1, 2]))),
    ("'NoneType' object", lambda: ring_attention(*good(), lengths=[None])),
    ("'float' object", lambda: ring_attention(*good(), lengths=[3.9])),  # type: ignore[list-item]
    ("could not convert string to float: 'x'", lambda: ring_attention(*good(), scale="x")),  # type: ignore[arg-type]
    (
        "scale=tensor.* would have no gradient",
        lambda: ring_attention(*good(), scale=torch.ones(1, requires_grad=True)),  # type: ignore[arg-type]
    ),
    ("1 heads of queries and 1 of keys cannot be split evenly", lambda: ulysses_attention(*(x[:, :1] for x in good()))),
]


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    def body() -> None:
        for words, mistake in MISTAKES:
            with pytest.raises(ValueError, match=words + ".*nothing was sent"):
                mistake()  # all ranks make it
            if dist.get_rank() == 0:
                with pytest.raises(ValueError, match=words):
                    mistake()
            else:  # one rank makes it, the others get its error
                with pytest.raises(MismatchError, match=f"rank 0 failed: ValueError: .*{words}"):
                    ring_attention(*good())
        for x in ring_attention(*good()):  # and the group goes on
            near(x, torch.ones_like(x))

    dist_prims.spawn(body, 2, timeout=60)


def test_ranks_that_disagree_get_an_error() -> None:
    def body() -> None:
        rank = dist.get_rank()
        odd = rank == 1
        for make in (
            lambda: ring_attention(*good(4 + 2 * odd)),
            lambda: ring_attention(*good(), causal=odd),
            lambda: ring_attention(*good(), order=ORDERS[odd]),
            lambda: ring_attention(*good(), scale=0.5 if odd else None),
            lambda: ring_attention(*good(), lengths=[3 + odd]),
            lambda: ring_attention(*(x.double() if odd else x for x in good())),
            lambda: ring_attention(*(x.requires_grad_(odd) for x in good())),
            lambda: BOTH["ring" if odd else "ulysses"](*good()),
        ):
            with pytest.raises(MismatchError, match=f"rank {rank}: .*no data was touched.*split_sequence"):
                make()
        ring_attention(*good())

    dist_prims.spawn(body, 2, timeout=60)
