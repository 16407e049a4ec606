"""Losses over a split vocabulary against those of PyTorch on the joined logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import REASON, device, on_two_ranks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.parallel.vocabulary import linear_cross_entropy, split_cross_entropy, split_log_softmax

SIZES = [1, 3]
GROUPS = [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims"), (4, "gloo")]


def columns_of(rank: int, size: int, words: int) -> slice:
    """Uneven on purpose: of four ranks, the second has nothing."""
    shares = [3, 0, 1, 2][:size] if size > 1 else [1]
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + share * words // sum(shares))
    ends[-1] = words
    return slice(ends[rank], ends[rank + 1])


def mine(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """This rank's part of what all have, a leaf of its own."""
    part = columns_of(dist.get_rank(), dist.get_world_size(), tensor.shape[dim])
    found = tensor.detach().movedim(dim, 0)[part].movedim(0, dim).clone()
    return found.requires_grad_() if found.is_floating_point() else found


def same_bits(tensor: torch.Tensor) -> bool:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, tensor.detach().contiguous().view(-1).view(torch.uint8))
    return all(torch.equal(each, by_rank[0]) for each in by_rank)


def case(rows: int, words: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * 100 + words)
    logits, targets = torch.randn(rows, words).to(dtype) * 5, torch.randint(words, (rows,))
    targets[1::4] = -100
    return logits, targets


RULES = [  # smoothing, weighted, reduction
    (0.0, False, "mean"),
    (0.0, True, "none"),
    (0.1, False, "sum"),
    (0.1, True, "mean"),
    (1.0, True, "none"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "backend"), GROUPS)
def test_cross_entropy_is_that_of_the_joined_logits(size: int, backend: str) -> None:
    def body() -> None:
        for (rows, words), (smoothing, weighted, reduction) in product([(0, 5), (1, 1), (7, 10), (33, 97)], RULES):
            logits, targets = case(rows, words)
            weights = torch.rand(words) + 0.1
            whole, part = logits.clone().requires_grad_(), mine(logits)
            more: Any = {"label_smoothing": smoothing, "reduction": reduction}
            right = F.cross_entropy(whole, targets, weight=weights if weighted else None, **more)
            loss = split_cross_entropy(part, targets, class_weight=mine(weights) if weighted else None, **more)
            assert loss.shape == right.shape
            assert same_bits(loss)
            torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6, equal_nan=True)
            pull = torch.arange(1.0, loss.numel() + 1).view(loss.shape)
            right.backward(pull)
            loss.backward(pull)
            torch.testing.assert_close(part.grad, mine(whole.grad).detach(), rtol=1e-5, atol=1e-6)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


@pytest.mark.parametrize("size", SIZES)
def test_log_softmax_is_that_of_the_joined_logits(size: int) -> None:
    def body() -> None:
        for shape in [(0, 3), (1, 1), (5, 9), (2, 3, 31)]:
            torch.manual_seed(3)
            logits = torch.randn(shape) * 5
            pull = torch.randn(shape)
            whole, part = logits.clone().requires_grad_(), mine(logits)
            right, found = F.log_softmax(whole, -1), split_log_softmax(part)
            torch.testing.assert_close(found, mine(right.detach()).detach(), rtol=1e-6, atol=1e-6)
            right.backward(pull)
            found.backward(mine(pull).detach())
            torch.testing.assert_close(part.grad, mine(whole.grad).detach(), rtol=1e-5, atol=1e-6)

    dist_prims.spawn(body, size, timeout=60)


@pytest.mark.parametrize("size", SIZES)
def test_logits_far_apart_and_masked(size: int) -> None:
    """exp(1000) is not a float, 1000 + log S has no room for log S, and -inf - -inf is no number."""

    def body() -> None:
        low = float("-inf")
        logits = torch.tensor(
            [
                [1000.0, 0, 0, 0, 0, 0, 0, 0],
                [1000, 1000, 0, 0, 0, 0, 0, 999.5],
                [low] * 7 + [3],
                [1, low, 2, low, low, 0, 1, low],
            ]
        )
        for targets in (torch.tensor([1, 1, 7, 0]), torch.tensor([0, 7, 7, 6])):
            whole, part = logits.clone().requires_grad_(), mine(logits)
            right = F.cross_entropy(whole, targets, reduction="none")
            loss = split_cross_entropy(part, targets, reduction="none")
            torch.testing.assert_close(loss, right, rtol=1e-7, atol=1e-6)
            right.sum().backward()
            loss.sum().backward()
            torch.testing.assert_close(part.grad, mine(whole.grad).detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(split_log_softmax(mine(logits)), mine(F.log_softmax(logits, -1)))
        assert split_cross_entropy(mine(logits[2:3]), torch.tensor([0])).item() == float("inf")

    dist_prims.spawn(body, size, timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    def body() -> None:
        logits, targets = case(9, 50, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        whole, part = logits.to(wide).requires_grad_(), mine(logits)
        right, loss = (
            F.cross_entropy(whole, targets, label_smoothing=0.1),
            split_cross_entropy(part, targets.int(), label_smoothing=0.1),
        )
        assert (loss.dtype, part.dtype) == (wide, dtype)
        torch.testing.assert_close(loss, right, rtol=1e-6, atol=1e-6)
        right.backward()
        loss.backward()
        torch.testing.assert_close(part.grad, mine(whole.grad).detach().to(dtype))
        log = split_log_softmax(part.detach())
        assert log.dtype == dtype
        torch.testing.assert_close(log, mine(F.log_softmax(logits.to(wide), -1)).detach().to(dtype))

    dist_prims.spawn(body, 3, timeout=60)


def test_ignore_index_may_be_a_word_and_all_may_be_ignored() -> None:
    def body() -> None:
        logits, _ = case(6, 8)
        targets = torch.tensor([0, 3, 3, 7, 1, 3])
        for words, ignored in ((targets, 3), (torch.full((6,), 3), 3)):
            whole, part = logits.clone().requires_grad_(), mine(logits)
            right = F.cross_entropy(whole, words, ignore_index=ignored)
            loss = split_cross_entropy(part, words, ignore_index=ignored)
            torch.testing.assert_close(loss, right, equal_nan=True)
            fused = linear_cross_entropy(torch.eye(8)[:6], mine(logits.new_ones(8, 8), 0), words, ignore_index=ignored)
            assert fused.isnan() == right.isnan()
            right.backward()
            loss.backward()
            torch.testing.assert_close(part.grad, mine(whole.grad).detach(), rtol=1e-5, atol=1e-6, equal_nan=True)

    dist_prims.spawn(body, 2, timeout=60)


def test_the_exact_gradient_by_differences() -> None:
    """gradcheck moves one logit at a time, on one rank; the other, which has the rest, has to make as many calls."""

    def body() -> None:
        torch.manual_seed(0)
        logits, targets = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, -100, 4])

        def loss(x: torch.Tensor) -> torch.Tensor:
            go_on[0] = 1
            dist.broadcast(go_on, 0)
            return split_cross_entropy(x, targets, label_smoothing=0.2, reduction="none")

        go_on = torch.tensor([1])
        part = mine(logits)
        if dist.get_rank() == 0:
            assert torch.autograd.gradcheck(loss, part)
            go_on[0] = 0
            dist.broadcast(go_on, 0)
            return
        dist.broadcast(go_on, 0)
        while go_on:
            split_cross_entropy(part, targets, label_smoothing=0.2, reduction="none")
            dist.broadcast(go_on, 0)

    dist_prims.spawn(body, 3, timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "backend"), GROUPS)
def test_linear_and_loss_by_chunks(size: int, backend: str) -> None:
    def body() -> None:
        for rows, words, features, chunk in [(0, 5, 3, 2), (1, 1, 1, 1), (12, 97, 8, 5), (5, 20, 4, 99)]:
            torch.manual_seed(rows + words)
            hidden, weight, bias = torch.randn(rows, features), torch.randn(words, features), torch.randn(words)
            _, targets = case(rows, words)
            classes = torch.rand(words) + 0.1
            for with_bias, smoothing, weighted, reduction in [
                (False, 0.0, False, "mean"),
                (True, 0.1, False, "sum"),
                (True, 0.1, True, "mean"),
            ]:
                whole = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
                part = [hidden.clone().requires_grad_(), mine(weight, 0), mine(bias, 0)]
                more: Any = {"label_smoothing": smoothing, "reduction": reduction}
                right = F.cross_entropy(
                    F.linear(*whole[: 2 + with_bias]), targets, weight=classes if weighted else None, **more
                )
                its = mine(classes).detach() if weighted else None
                loss = linear_cross_entropy(
                    part[0], part[1], targets, part[2] if with_bias else None, chunk=chunk, class_weight=its, **more
                )
                assert same_bits(loss)
                torch.testing.assert_close(loss, right, rtol=2e-6, atol=2e-6, equal_nan=True)
                (3 * right).backward()
                (3 * loss).backward()
                assert same_bits(part[0].grad)
                for found, its_whole in zip(part[: 2 + with_bias], whole, strict=False):
                    expected = its_whole.grad if found is part[0] else mine(its_whole.grad, 0).detach()
                    torch.testing.assert_close(found.grad, expected, rtol=1e-4, atol=2e-5, equal_nan=True)

    dist_prims.spawn(body, size, timeout=60, backend=backend)


def test_linear_takes_batches_of_sequences_and_autocast_and_frozen_parts() -> None:
    def body() -> None:
        torch.manual_seed(1)
        hidden, weight, targets = torch.randn(2, 5, 8), torch.randn(30, 8), torch.randint(30, (2, 5))
        whole, part = weight.clone().requires_grad_(), mine(weight, 0)
        right = F.cross_entropy((hidden @ whole.t()).flatten(0, 1), targets.flatten())
        loss = linear_cross_entropy(hidden, part, targets, chunk=3)  # the gradient of hidden is not asked for
        torch.testing.assert_close(loss, right)
        right.backward()
        loss.backward()
        torch.testing.assert_close(part.grad, mine(whole.grad, 0).detach(), rtol=1e-4, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            learnt = hidden.clone().requires_grad_()
            low = linear_cross_entropy(learnt, part, targets, chunk=4)
        torch.testing.assert_close(low, right, rtol=2e-2, atol=2e-2)  # and both are float32
        low.backward()
        assert learnt.grad.dtype == torch.float32
        torch.testing.assert_close(linear_cross_entropy(hidden, part.detach(), targets), right)

    dist_prims.spawn(body, 2, timeout=60)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            self.found = max(self.found, each.numel() if isinstance(each, torch.Tensor) else 0)
        return out


def test_full_logits_never_exist() -> None:
    rows, words, features, chunk = 256, 1000, 16, 8

    def largest(loss: Callable[..., torch.Tensor]) -> int:
        hidden = torch.randn(rows, features, requires_grad=True)
        weight = torch.randn(words // 2, features, requires_grad=True)
        with Largest() as seen:
            loss(hidden, weight, torch.zeros(rows, dtype=torch.int64)).backward()
        return seen.found

    def body() -> None:
        limit = max(chunk * words // 2, rows * features, words // 2 * features)
        assert largest(lambda h, w, t: linear_cross_entropy(h, w, t, chunk=chunk)) == limit
        assert largest(lambda h, w, t: split_cross_entropy(h @ w.t(), t)) == rows * words // 2

    dist_prims.spawn(body, 2, timeout=60)


def test_a_second_backward() -> None:
    def body() -> None:
        logits, targets = case(4, 6)
        part = mine(logits)
        loss = split_cross_entropy(part, targets)
        loss.backward(retain_graph=True)
        once = part.grad.clone()
        loss.backward()
        assert torch.equal(part.grad, 2 * once)
        hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        fused = linear_cross_entropy(hidden, mine(torch.ones(6, 3), 0), targets)
        fused.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second backward"):
            fused.backward()

    dist_prims.spawn(body, 2, timeout=60)


def test_any_split_gives_the_same() -> None:
    def body() -> None:
        for seed in range(30):
            random = torch.Generator().manual_seed(seed)
            columns = torch.randint(4, (dist.get_world_size(),), generator=random)
            columns[seed % 3] += 1  # one word at least
            rows, words = seed % 5, int(columns.sum())
            logits = torch.randn(rows, words, generator=random) * 100
            targets = torch.randint(words, (rows,), generator=random)
            part = logits.split(columns.tolist(), 1)[dist.get_rank()]
            loss = split_cross_entropy(part, targets, reduction="none")
            torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=1e-5)

    dist_prims.spawn(body, 3, timeout=60, backend="dist_prims")


def on_a_device() -> None:
    (logits, targets), here = case(9, 50), device()
    loss = split_cross_entropy(mine(logits).to(here), targets.to(here))
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(logits, targets))


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")
def test_on_devices() -> None:
    on_two_ranks(on_a_device)


def test_in_a_subgroup() -> None:
    def body() -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        logits, targets = case(5, 10)
        half = logits[:, :4] if group.rank() == 0 else logits[:, 4:]
        torch.testing.assert_close(split_cross_entropy(half, targets, group=group), F.cross_entropy(logits, targets))
        with pytest.raises(ValueError, match="not a member of the given group"):
            split_cross_entropy(half, targets, group=groups[1 - dist.get_rank() % 2])

    dist_prims.spawn(body, 4, timeout=60)


def refused(problem: type[Exception], words: str, call: Callable[..., Any], **arguments: Any) -> None:
    """On every rank, and the group can go on."""
    with pytest.raises(problem, match=words):
        call(**arguments)
    dist_prims.barrier()


def test_bad_input_is_refused_on_every_rank() -> None:
    def body() -> None:
        rank = dist.get_rank()
        logits, targets = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)

        def no(problem: type[Exception], words: str, **changed: Any) -> None:
            refused(problem, words, split_cross_entropy, **{"logits": logits, "targets": targets, **changed})

        far = torch.tensor([0, 0, 6, 0])
        no(ValueError, rf"rank {rank}: .* target 6 is out of range: .* 6 columns, .* 0 to 5", targets=far)
        no(ValueError, "target -1 is out of range", targets=targets - 1)
        more = {"logits": torch.zeros(4 + rank, 3), "targets": torch.zeros(4 + rank).long()}
        no(MismatchError, r"Rank 0 has rows \(4,\).* rank 1 has rows \(5,\)", **more)
        no(MismatchError, "torch.float32.* rank 1 has .*torch.float64", logits=logits.double() if rank else logits)
        no(MismatchError, "targets .* rank 1 has .* targets ", targets=targets + rank)
        no(MismatchError, "label_smoothing=0.0.*label_smoothing=0.5", label_smoothing=rank / 2)
        no(MismatchError, "without class_weight.*with class_weight", class_weight=torch.ones(3) if rank else None)
        mine, its = r"rank 1: .* targets are torch.float32", "rank 1 failed: .*targets are torch.float32"
        no(ValueError if rank else MismatchError, mine if rank else its, targets=targets.float() if rank else targets)
        no(ValueError, "there are .4,. rows", targets=targets[:3])
        no(ValueError, "must be from 0 to 1", label_smoothing=1.5)
        no(ValueError, "reduction='avg'; choose one of", reduction="avg")
        no(ValueError, "class_weight has shape .2,.; this rank has 3", class_weight=torch.ones(2))
        refused(ValueError, "two or more dimensions", split_log_softmax, logits=torch.zeros(3))
        learn = torch.zeros(2, 2, requires_grad=rank == 1)
        refused(MismatchError, "without a gradient.*with a gradient", split_log_softmax, logits=learn)

    dist_prims.spawn(body, 2, timeout=60)


def test_bad_input_of_the_linear_one() -> None:
    def body() -> None:
        rank = dist.get_rank()
        hidden, weight, targets = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)

        def no(problem: type[Exception], words: str, **changed: Any) -> None:
            given = {"hidden": hidden, "weight": weight, "targets": targets, **changed}
            refused(problem, words, linear_cross_entropy, **given)

        no(ValueError, r"hidden \(4, 3\) and weight \(5, 2\) do not fit", weight=torch.zeros(5, 2))
        no(ValueError, "bias has shape .4,.; this rank has 5 columns", bias=torch.zeros(4))
        no(ValueError, "dtypes torch.float32, torch.float64", weight=weight.double())
        no(ValueError, "chunk=0 must be", chunk=0)
        no(ValueError, "reduction='none' would need", reduction="none")
        no(MismatchError, "chunk=4.*chunk=5", chunk=4 + rank)
        no(
            MismatchError,
            "hidden without a gradient.*hidden with a gradient",
            hidden=hidden.clone().requires_grad_(rank == 1),
        )

    dist_prims.spawn(body, 2, timeout=60)
