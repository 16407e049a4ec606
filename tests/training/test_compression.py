"""Compressors of gradients: that they bring the mean, lose nothing at last, and send as few bytes as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nccl_ranks import REASON, device, on_two_ranks

import dist_prims
from dist_prims.datasets import digits
from dist_prims.errors import MismatchError
from dist_prims.training.compression import Half, Int8, PowerSGD, TopK, make
from dist_prims.training.compression.stages import Staged
from dist_prims.training.compression.top_k import largest
from dist_prims.training.gradients import Bucket, GradientAverager

Maker = Callable[[], Staged]
MAKERS: dict[str, Maker] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": lambda: Int8(block=5),
    "int8 by chance": lambda: Int8(block=64, stochastic=True, seed=3),
    "topk": lambda: TopK(ratio=0.3),
    "powersgd": lambda: PowerSGD(rank=2, warm_up=0),
}
LAYOUTS: list[list[tuple[int, ...]]] = [[(12, 30), (7,)], [(1,)], [(0, 3)], [(33, 4), (), (5,), (8, 3, 3, 3), (2, 2)]]


def bucket_of(index: int, shapes: list[tuple[int, ...]], values: torch.Tensor) -> Bucket:
    views, end = [], 0
    for shape in shapes:
        views.append(values[end : end + math.prod(shape)].view(shape))
        end += math.prod(shape)
    return Bucket(index, values, views)


def drawn(count: int, *seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    number = sum(each * 1009**place for place, each in enumerate(seed, start=1))
    return torch.randn(count, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(dtype)


def mean_by(compressor: Staged, values: torch.Tensor, index: int = 0) -> torch.Tensor:
    """One bucket, started and ended."""
    flat = values.clone()
    compressor.start(bucket_of(index, [tuple(values.shape)], flat), None)()
    return flat


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, bytes(tensor.cpu().view(-1).view(torch.uint8).numpy()))
    return len(set(by_rank)) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "backend"), [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims"), (4, "dist_prims")])
def test_what_is_lost_comes_later(size: int, backend: str) -> None:
    """Over some steps and a few without gradients, as much arrives as was computed: of every dtype and layout."""

    def body(make_one: Maker, dtype: torch.dtype) -> None:
        rank, compressor = dist.get_rank(), make_one()
        counts = [sum(math.prod(shape) for shape in shapes) for shapes in LAYOUTS]
        computed, arrived = ([torch.zeros(count).double() for count in counts] for _ in range(2))
        results: list[torch.Tensor] = []
        for step in range(10):
            finish = []
            for index, (shapes, count) in enumerate(zip(LAYOUTS, counts, strict=True)):
                draws = [drawn(count, step, index, each, dtype=dtype) * (step < 3) for each in range(size)]
                computed[index] += torch.stack(draws).double().mean(0)
                bucket = bucket_of(index, shapes, draws[rank])
                finish.append((bucket, compressor.start(bucket, None)))
            for bucket, end in finish:  # all under way before the first is ended
                end()
                end()  # once more: nothing happens
                arrived[bucket.index] += bucket.flat.double()
                results.append(bucket.flat)
        assert same_on_all_ranks(torch.cat(results)), compressor
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-4}.get(dtype, 0.05)
        for got, wanted in zip(arrived, computed, strict=True):
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0, msg=lambda text: f"{compressor}: {text}")

    def bodies() -> None:
        for make_one in MAKERS.values():
            body(make_one, torch.float32)
        dtypes = [torch.float64, torch.bfloat16, torch.float16]
        for make_one, dtype in zip(MAKERS.values(), dtypes * 2, strict=True):
            body(make_one, dtype)

    dist_prims.spawn(bodies, size, backend=backend, timeout=110)


def test_without_feedback_it_is_lost() -> None:
    """The same values each step, too small to be sent: with feedback their sum arrives, without it nothing does."""
    beside_one = torch.full((8,), 1e-3).index_fill_(0, torch.tensor([0]), 1.0)  # of 127 steps up to 1, not a half
    cases: list[tuple[Callable[[bool], Staged], torch.Tensor]] = [
        (lambda feedback: Half(torch.float16, feedback=feedback), torch.full((8,), 1e-8)),  # float16 begins at 6e-8
        (lambda feedback: Half(torch.bfloat16, feedback=feedback), torch.full((8,), 1 + 1e-3)),  # 8 bits
        (lambda feedback: Int8(feedback=feedback), beside_one),
        (lambda feedback: TopK(ratio=0.25, feedback=feedback), beside_one),
    ]

    def body() -> None:
        for make_one, values in cases:
            kept, lost = make_one(True), make_one(False)
            mean = sum(mean_by(kept, values) for _ in range(200)) / 200
            torch.testing.assert_close(mean, values, rtol=0.1, atol=0, msg=f"{kept}: {{}}".format)
            once = mean_by(lost, values)
            assert torch.equal(once, mean_by(lost, values))  # it errs each time alike
            assert not torch.allclose(once, values, rtol=2e-4, atol=0), lost

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_what_needs_no_rounding_is_exact() -> None:
    def body() -> None:
        rank = dist.get_rank()
        whole = (torch.arange(255.0) - 127).repeat(3)[:700]
        for compressor in (Half(torch.float16), Half(), Int8(block=255), TopK(ratio=1), PowerSGD()):
            assert torch.equal(mean_by(compressor, whole), whole), compressor
        low = torch.outer(torch.arange(1.0, 41), torch.arange(30.0)) + torch.outer(torch.ones(40), drawn(30, 1))
        for compressor in (PowerSGD(rank=2, warm_up=0), PowerSGD(rank=2, warm_up=1)):
            for scale in (rank + 1.0, 2.0 * rank):  # a mean of 2, and of 2 again
                values = low * scale + rank - 1
                torch.testing.assert_close(mean_by(compressor, values), 2 * low, rtol=1e-3, atol=0.01)

    dist_prims.spawn(body, 3, timeout=60)


def test_rounding_by_chance_is_right_on_average_and_can_be_repeated() -> None:
    def body() -> None:
        values = drawn(64, 5)
        compressor, again, other = (Int8(64, stochastic=True, feedback=False, seed=seed) for seed in (1, 1, 2))
        draws = [mean_by(compressor, values) for _ in range(500)]
        scale = float(values.abs().max()) / 127
        # two roundings, each with a deviation of half a step at most, the first averaged over 2 ranks
        assert float((torch.stack(draws).mean(0) - values).abs().max()) < 5 * scale * (0.25 + 0.125) ** 0.5 / 500**0.5
        assert torch.stack(draws).std(0).max() > scale / 10
        assert torch.equal(mean_by(again, values), draws[0])
        assert not torch.equal(mean_by(other, values), draws[0])
        compressor.reset()
        assert torch.equal(mean_by(compressor, values), draws[0])

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_so_on_all_ranks_and_only_once(bad: float) -> None:
    def body() -> None:
        for make_one in MAKERS.values():
            compressor = make_one()
            for step in range(4):
                values = drawn(120, step, dist.get_rank())
                values[17] = bad if step == 1 and dist.get_rank() == 2 else 1.0
                bucket = bucket_of(0, [(12, 10)], values)
                compressor.start(bucket, None)()
                assert same_on_all_ranks(bucket.flat)
                assert bool(bucket.flat[17].isfinite()) == (step != 1), (compressor, step, bucket.flat[17])
                assert bool(bucket.flat.isfinite().all()) == (step != 1), (compressor, step)
        for compressor in (Half(torch.float16), Half(torch.float16, feedback=False)):
            assert mean_by(compressor, torch.full((5,), 60000.0)).tolist() == [60000.0] * 5  # their sum is too large
            assert mean_by(compressor, torch.full((5,), 1e5)).tolist() == [math.inf] * 5

    dist_prims.spawn(body, 3, timeout=60)


def test_a_value_that_int8_cannot_scale() -> None:
    def body() -> None:
        for dtype, tiny, huge in ((torch.float32, 1e-40, 1e38), (torch.float64, 1e-305, 5e307)):
            found = mean_by(Int8(block=2), torch.tensor([tiny, tiny, huge, 0.0], dtype=dtype))
            assert found[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]
            assert float(found[2]) == pytest.approx(huge)

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("size", [1, 3])
def test_bytes_are_those_of_the_formulas(size: int) -> None:
    def body() -> None:
        count = 3000
        piece = -(-count // size)
        blocks = -(-piece // 512)
        padded = blocks * -(-piece // blocks)
        expected: dict[str, tuple[Staged, int]] = {
            "half": (Half(), 2 * (size - 1) * 2 * piece),
            "int8": (Int8(), 2 * (size - 1) * (padded + 4 * blocks)),
            "topk": (TopK(0.01), (size - 1) * 30 * (4 + 4)),
            "first": (PowerSGD(rank=2, warm_up=1), 2 * (size - 1) * 4 * count // size),
        }
        for name, (compressor, sent) in expected.items():
            bucket = bucket_of(0, [(50, 50), (500,)], drawn(count, 1))
            compressor.start(bucket, None)()
            assert (compressor.sent_bytes, compressor.dense_bytes) == (sent, 2 * (size - 1) * 4 * count // size), name
            assert compressor.ratio() == (1.0 if size == 1 else compressor.dense_bytes / sent)
        power = expected["first"][0]
        before = power.sent_bytes
        power.start(bucket, None)()
        lefts, rights = 4 * (50 * 2 + 500), 4 * 50 * 2
        assert power.sent_bytes - before == 2 * (size - 1) * lefts // size + 2 * (size - 1) * rights // size
        assert Int8().bytes_of(piece) == padded + 4 * blocks

    dist_prims.spawn(body, size, timeout=60)


def test_a_matrix_in_any_memory_order() -> None:
    def body() -> None:
        values = torch.outer(drawn(24, 1), drawn(36, 2)).view(-1)
        for view in (values.view(24, 36), values.view(24, 36).T, values.view(24, 3, 3, 4).permute(0, 3, 1, 2)):
            compressor = PowerSGD(rank=1, warm_up=0)
            flat = values.clone()
            laid_out = flat.as_strided(view.shape, view.stride())
            compressor.start(Bucket(0, flat, [laid_out]), None)()
            torch.testing.assert_close(flat, values, rtol=1e-4, atol=1e-4)
            assert compressor.sent_bytes == 4 * (24 + 36)

    dist_prims.spawn(body, 2, timeout=60)


def test_a_sub_group() -> None:
    def body() -> None:
        group = dist.new_group([0, 2])
        rank = dist.get_rank()
        for make_one in MAKERS.values():
            bucket = bucket_of(0, [(3,)], torch.full((3,), float(rank)))
            if rank == 1:
                with pytest.raises(ValueError, match="rank 1 is not in the group"):
                    make_one().start(bucket, group)
            else:
                make_one().start(bucket, group)()
                assert bucket.flat.tolist()[0] == pytest.approx(1.0)

    dist_prims.spawn(body, 3, timeout=60)


def test_ranks_that_disagree_all_get_an_error() -> None:
    def body() -> None:
        rank = dist.get_rank()
        values = torch.ones(10)
        with pytest.raises(MismatchError, match=r"Rank 0 has TopK\(ratio=0.5.*rank 1 has TopK\(ratio=0.25"):
            mean_by(TopK(0.25 if rank == 1 else 0.5), values)
        with pytest.raises(MismatchError, match=r"of 10 elements.*rank 2 has.*of 11 elements"):
            mean_by(Half(), torch.ones(11 if rank == 2 else 10))
        assert torch.equal(mean_by(Half(), values), values)  # no rank still waits

    dist_prims.spawn(body, 3, timeout=60)


def test_bad_input_is_refused() -> None:
    def body() -> None:
        for dtype in (torch.int32, torch.complex64):
            with pytest.raises(ValueError, match=f"rank {dist.get_rank()}: Half.*bucket 4 are {dtype}"):
                mean_by(Half(), torch.ones(3, dtype=dtype), index=4)
        compressor = TopK()
        mean_by(compressor, torch.ones(3))
        with pytest.raises(ValueError, match=r"has 3 elements.* now 4; call reset\(\)"):
            mean_by(compressor, torch.ones(4))
        compressor.reset()
        assert mean_by(compressor, torch.ones(4)).sum() == 1

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: make("int4"),
        lambda: Half(torch.float32),
        lambda: Int8(0),
        lambda: TopK(0),
        lambda: TopK(1.5),
        lambda: PowerSGD(0),
        lambda: PowerSGD(warm_up=-1),
    ],
)
def test_bad_arguments_are_refused(wrong: Callable[[], Staged]) -> None:
    with pytest.raises(ValueError, match=r"int4|dtype=torch.float32|block=0|ratio=|rank=0|warm_up=-1"):
        wrong()


def test_a_failed_bucket_is_not_taken_for_done() -> None:
    class Broken(TopK):
        def stages(self, *arguments: Any) -> Any:
            yield next(super().stages(*arguments))
            raise OSError("the network is gone")

    def body() -> None:
        finish = Broken().start(bucket_of(0, [(3,)], torch.ones(3)), None)
        for _ in range(2):
            with pytest.raises(OSError, match="the network is gone"):
                finish()

    dist_prims.spawn(body, 2, timeout=60)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), share=st.floats(0.0001, 1), ties=st.booleans(), bad=st.integers(0, 3))
@example(seed=1, share=0.01, ties=True, bad=2)
def test_the_largest_are_found(seed: int, share: float, ties: bool, bad: int) -> None:
    values = drawn(300_000, seed)
    values = values.round() if ties else values
    values[:bad] = math.nan
    count = max(1, int(share * len(values)))
    found = largest(values, count)
    assert len(set(found.tolist())) == count
    sizes = values.abs().nan_to_num(nan=math.inf)
    assert torch.equal(sizes[found].sort().values, sizes.topk(count).values.sort().values)


def test_sorted_gradients_have_the_same_largest() -> None:
    """A sample that tells nothing of the rest costs time, not correctness."""
    values = torch.zeros(300_001)
    values[1::4] = torch.arange(75_000.0) + 1  # the sample falls beside them
    assert sorted(largest(values, 100).tolist()) == [299_601 - 4 + 4 * place for place in range(1, 101)]


def averaged(compress: str | Staged | None, overlap: bool = True) -> float:
    """The loss of a small net on all digits, its gradients averaged in several buckets during backward."""
    images, labels = digits().tensors
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    averager = GradientAverager(model, bucket_mb=0.005, overlap=overlap, compress=compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        batch = torch.randint(len(images), (32,), generator=generator)
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    averager.remove()
    assert same_on_all_ranks(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return float(torch.nn.functional.cross_entropy(model(images), labels))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["gloo", "dist_prims"])
def test_with_the_gradient_averager(backend: str) -> None:
    def body() -> None:
        plain = averaged(None)
        for name in ("fp16", "topk") if backend == "gloo" else ("bf16", "powersgd"):
            assert averaged(name) < 1.4 * plain, name
        close, thin = Int8(), PowerSGD(rank=2, warm_up=10)
        if backend == "gloo":
            assert averaged(close, overlap=False) == pytest.approx(plain, rel=0.03)
            assert close.ratio() > 3.5
        else:
            assert averaged(close) == pytest.approx(plain, rel=0.03)
            assert averaged(thin, overlap=False) < 1.4 * plain
            assert thin.ratio() > 3

    dist_prims.spawn(body, 2, backend=backend, timeout=100)


def test_ranks_that_compress_differently_get_an_error() -> None:
    def body() -> None:
        model = torch.nn.Linear(8, 8)
        with pytest.raises(MismatchError, match=r"ratio=0.5.*rank 1 has .*ratio=0.25"):
            GradientAverager(model, compress=TopK(0.25 if dist.get_rank() else 0.5))
        with pytest.raises(MismatchError if dist.get_rank() else ValueError, match="compress='int4'"):
            GradientAverager(model, compress="fp16" if dist.get_rank() else "int4")

    dist_prims.spawn(body, 2, timeout=60)


def on_gpu() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for make_one in MAKERS.values():
        compressor = make_one()
        computed, arrived = torch.zeros(360, device=device()), torch.zeros(360, device=device())
        for step in range(10):
            draws = [drawn(360, step, each).to(device()) * (step < 3) for each in range(size)]
            computed += torch.stack(draws).mean(0)
            bucket = bucket_of(0, [(12, 30)], draws[rank])
            compressor.start(bucket, None)()
            arrived += bucket.flat
            assert same_on_all_ranks(bucket.flat), compressor
        torch.testing.assert_close(arrived, computed, atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")
def test_on_two_gpu_ranks() -> None:
    on_two_ranks(on_gpu)
