"""Checkpoints: bit for bit, on any number of ranks, and nothing that does not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import dist_prims
from dist_prims.training import ShardedIterable, ShardedSampler
from dist_prims.training.checkpoint import Checkpoints, Padded
from dist_prims.training.checkpoint.shards import agreed, describe, join, rows_of


def spawn(body: Callable[..., Any], size: int, backend: str = "dist_prims") -> list[Any]:
    return dist_prims.spawn(body, size, timeout=60, backend=backend)


class Run:
    """A small training that draws from every source of random numbers."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, 9)
        self.sampler = ShardedSampler(97, seed=5)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        state: dict[str, Any] = {"model": self.model, "adam": self.adam, "rate": self.rate, "sampler": self.sampler}
        # Each rank has seen other samples.
        own: dict[str, Any] = {"generator": self.generator, "statistics": self.model[1]}
        self.checkpoints = Checkpoints(folder, state, own=own)

    def train(self, steps: int) -> torch.Tensor:
        for indices in [list(self.sampler)[:3] for _ in range(steps)]:
            noise = torch.randn(3, 4, generator=self.generator) + random.random() + float(np.random.rand())
            self.model.zero_grad()
            self.model(noise + torch.tensor(indices).unsqueeze(1)).square().mean().backward()
            dist_prims.average_gradients(self.model)
            self.adam.step()
            self.rate.step()
            self.sampler.advance(3)
        return torch.cat([each.flatten().double() for each in self.model.state_dict().values()])


def scramble(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize(("size", "backend"), [(1, "gloo"), (2, "dist_prims"), (3, "gloo"), (4, "dist_prims")])
def test_a_restored_run_goes_on_bit_for_bit(size: int, backend: str, tmp_path: Path) -> None:
    def body() -> None:
        scramble(dist.get_rank())
        undisturbed = Run(tmp_path)
        assert undisturbed.checkpoints.restore() == 0
        undisturbed.train(2)
        undisturbed.checkpoints.save(2)
        wanted = undisturbed.train(2)
        scramble(99)
        again = Run(tmp_path)
        assert not torch.equal(again.train(1), wanted)
        assert again.checkpoints.restore() == 2
        assert torch.equal(again.train(2), wanted)
        assert list(again.sampler) == list(undisturbed.sampler)

    spawn(body, size, backend)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
wholes = st.tuples(st.integers(0, 20), st.lists(st.integers(0, 3), max_size=2), st.sampled_from(DTYPES))


@settings(deadline=None)
@given(tensors=st.lists(wholes, max_size=3), saved=st.integers(1, 7), size=st.integers(1, 7), padded=st.booleans())
def test_rows_saved_by_any_number_are_read_by_any_other(tensors: Any, saved: int, size: int, padded: bool) -> None:
    tensors = [(tensors[0][0], row, dtype) for _, row, dtype in tensors] if padded else tensors  # one number of rows
    wholes = [torch.randint(0, 99, (count, *row)).to(dtype) for count, row, dtype in tensors]

    def state(rank: int, size: int) -> Any:
        def part(whole: torch.Tensor) -> torch.Tensor:
            rows = rows_of(len(whole), size, padded)
            end = torch.cat([whole, whole.new_zeros(sum(rows) - len(whole), *whole.shape[1:])])
            return end.split(rows)[rank]

        return {"state": {number: part(whole) for number, whole in enumerate(wholes)}, "plain": (1, "a", None)}

    parts = [state(rank, saved) for rank in range(saved)]
    rows = tensors[0][0] if tensors and padded else None
    about = json.loads(json.dumps(agreed("x", [describe("x", part) for part in parts], rows)))
    for rank in range(size):
        found, wanted = join("x", about, rank, size, parts.__getitem__), state(rank, size)
        assert found["plain"] == wanted["plain"]
        for number, tensor in wanted["state"].items():
            assert torch.equal(found["state"][number], tensor)
            assert found["state"][number].dtype == tensor.dtype


def zero(count: int, padded: bool) -> tuple[torch.optim.Adam, torch.Tensor]:
    """An Adam of this rank's rows of a vector, stepped three times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = rows_of(count, size, padded)
    whole = torch.zeros(sum(rows))
    whole[:count] = torch.arange(count).float()
    shard = nn.Parameter(whole.split(rows)[rank].clone())
    adam = torch.optim.Adam([shard], lr=0.1)
    return adam, shard


def stepped(adam: torch.optim.Adam, shard: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        shard.grad = shard.detach() * 2
        adam.step()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "saved", "size", "padded"), [(11, 1, 4, False), (1, 2, 3, False), (11, 3, 2, True), (11, 2, 2, False)]
)
def test_a_sharded_optimizer_on_another_number_of_ranks(
    count: int, saved: int, size: int, padded: bool, tmp_path: Path
) -> None:
    def checkpoints(adam: Any, shard: torch.Tensor) -> Checkpoints:
        sharded = {"adam": adam, "shard": shard}
        return Checkpoints(
            tmp_path, {}, sharded={k: Padded(v, count) for k, v in sharded.items()} if padded else sharded
        )

    def save() -> None:
        adam, shard = zero(count, padded)
        stepped(adam, shard, 3)
        checkpoints(adam, shard).save(3)

    def restore() -> None:
        adam, shard = zero(count, padded)
        assert checkpoints(adam, shard).restore() == 3
        stepped(adam, shard, 2)
        wanted_adam, wanted = zero(count, padded)
        stepped(wanted_adam, wanted, 5)
        assert torch.equal(shard, wanted)
        assert adam.state_dict()["state"][0]["step"] == 5

    spawn(save, saved)
    spawn(restore, size)


def test_streams_go_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    def objects() -> tuple[Checkpoints, ShardedSampler, ShardedIterable]:
        sampler, stream = ShardedSampler(20, seed=1), ShardedIterable([range(5), range(5, 13)], seed=2)
        return Checkpoints(tmp_path, {"sampler": sampler, "stream": stream}), sampler, stream

    def save() -> tuple[list[int], list[int]]:
        checkpoints, sampler, stream = objects()
        first = list(sampler)[: 2 + dist.get_rank()]  # not in step
        sampler.advance(len(first))
        batch = next(stream.batches(2 + dist.get_rank())).tolist()
        checkpoints.save(1)
        return first, batch

    def restore() -> tuple[list[int], list[int]]:
        checkpoints, sampler, stream = objects()
        checkpoints.restore()
        return list(sampler), [item for batch in stream.batches(4, list) for item in batch]

    parts = [*spawn(save, 2), *spawn(restore, 3)]
    assert sorted(item for items, _ in parts for item in items) == list(range(20))
    assert sorted(item for _, items in parts for item in items) == list(range(13))


def test_new_ranks_draw_numbers_of_their_own(tmp_path: Path) -> None:
    def save() -> None:
        scramble(dist.get_rank())
        Checkpoints(tmp_path, {}).save(1)

    def restore() -> tuple[float, float, float]:
        scramble(7)
        Checkpoints(tmp_path, {}).restore()
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    spawn(save, 2)
    first, again = spawn(restore, 4), spawn(restore, 4)
    assert first == again
    for drawn in zip(*first, strict=True):
        assert len(set(drawn)) == 4
    random.seed(1)
    assert first[1][2] == random.random()  # who was there goes on


def values(folder: Path, start: float = 0.0, **options: Any) -> tuple[torch.Tensor, Checkpoints]:
    value = torch.full((1000,), start)
    return value, Checkpoints(folder, {"value": value}, sharded={"rows": torch.zeros(3, 2)}, **options)


def test_ranks_that_disagree_write_nothing(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        sharded: Any
        for words, step, state, sharded in [
            ("differ in step: rank 0 has 1, rank 1 has 2", 1 + rank, {}, {}),
            ("differ in state: rank 0 has .'a'., rank 1 has .'b'.", 1, {"ab"[rank]: torch.ones(1)}, {}),
            (
                "'x' has .2, 3. rows by rank.*split evenly, they would be .2, 3.|.3, 2.",
                1,
                {},
                {"x": torch.ones(3 - rank)},
            ),
            ("'x' holds .*float32 rows of .1. on rank 0 and .*rows of .2.", 1, {}, {"x": torch.ones(2, 1 + rank)}),
            ("'x' has .2, 2. rows.*padded, 5 rows, they would be .3, 3.", 1, {}, {"x": Padded(torch.ones(2), 5)}),
            ("steps are counted from 0", -1, {}, {}),
        ]:
            with pytest.raises(ValueError, match=words):
                Checkpoints(tmp_path / "x", state, sharded=sharded).save(step)
        with pytest.raises(ValueError, match=r"rank 1: 'x' holds a ndarray at \[\]; only tensors"):
            Checkpoints(tmp_path / "x", {}, own={"x": Numbers() if rank else torch.ones(1)}).save(1)
        with pytest.raises(ValueError, match="differ in own"):
            Checkpoints(tmp_path / "x", {}, own={"x": torch.ones(1)} if rank else {}).restore()
        assert not (tmp_path / "x").exists()

    spawn(body, 2)


class Numbers:
    def state_dict(self) -> Any:
        return np.ones(2)

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never loaded")


def adam(*rows: int) -> tuple[torch.optim.Adam, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.ones(count, 2)) for count in rows]
    return torch.optim.Adam(parameters), parameters


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def save() -> None:
        optimizer, parameters = adam(2, 2)
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        state: dict[str, Any] = {"a": torch.ones(2), "net": nn.Linear(2, 2), "adam": optimizer}
        Checkpoints(tmp_path, state, own={"b": torch.ones(1)}).save(1)

    def restore() -> None:
        a, larger = torch.zeros(2), nn.Linear(2, 2)
        larger.register_buffer("more", torch.ones(1))
        state: Any
        more: Any
        for words, state, more in [
            (r"'net' is \(2, 2\) of .* at \['weight'\] in the checkpoint and \(3, 2\)", {"net": nn.Linear(2, 3)}, {}),
            (r"'net' in the checkpoint has bias, unlike here", {"net": nn.Linear(2, 2, bias=False)}, {}),
            (r"'net' in the checkpoint lacks more, unlike here", {"net": larger}, {}),
            (r"'net' is .* of float32 at \['weight'\].* of float64 here", {"net": nn.Linear(2, 2).double()}, {}),
            (r"'adam' is of groups of \[2\] parameters in the checkpoint and \[1\] here", {"adam": adam(3)[0]}, {}),
            (r"'adam' is \(2, 2\) at 0, 'exp_avg' in the checkpoint and \(3, 2\)", {"adam": adam(3, 3)[0]}, {}),
            (r"'c' not in the state of this checkpoint, which has 'a', 'adam', 'net'", {"c": torch.ones(1)}, {}),
            (r"'b': own= was saved by 2 ranks, and this group has 3", {}, {"own": {"b": torch.ones(1)}}),
            (r"'s' not in the sharded of this checkpoint, which has nothing", {}, {"sharded": {"s": torch.ones(1)}}),
        ]:
            with pytest.raises(ValueError, match=words):
                Checkpoints(tmp_path, {"a": a, **state}, **more).restore()
            assert a.eq(0).all()
        assert Checkpoints(tmp_path, {"a": a}).restore() == 1  # a part of it, as for an evaluation
        assert a.eq(1).all()

    spawn(save, 2)
    spawn(restore, 3)


def test_the_last_ones_are_kept_and_no_run_overwrites_another(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    def body() -> None:
        value, checkpoints = values(tmp_path, keep=3)
        for step in (1, 5, 10, 11, 11):
            value.fill_(step)
            checkpoints.save(step)
            dist.barrier()
        assert checkpoints.steps() == [11, 10, 5]
        dist.barrier()
        with pytest.raises(ValueError, match=r"has a checkpoint of step 11; restore\(\) it first"):
            checkpoints.save(9)

    spawn(body, 2)
    assert len(list(tmp_path.iterdir())) == 2 * 3 + 1


def test_a_group_of_some_ranks(tmp_path: Path) -> None:
    def body() -> None:
        group = dist.new_group([2, 0])
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                values(tmp_path, group=group)
            return
        value, checkpoints = values(tmp_path, 4.0, group=group)
        checkpoints.save(1)
        value.zero_()
        assert checkpoints.restore() == 1
        assert value.eq(4).all()

    spawn(body, 3)


class Special(torch.Tensor):
    pass


def test_of_a_tensor_that_is_in_parts_no_part_is_taken_for_the_whole(tmp_path: Path) -> None:
    """A DTensor saved as state came back as rank 0's part on every rank, and nothing was said."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        for kind, remedy, tensor in (
            ("DTensor", r"\.to_local\(\) as sharded=", whole),
            ("Special", r"\.as_subclass\(torch.Tensor\)", torch.ones(4).as_subclass(Special)),
        ):
            checkpoints = Checkpoints(tmp_path / kind, {"t": tensor})
            with pytest.raises(ValueError, match=rf"'t' holds a {kind} at \[\]; .*{remedy}"):
                checkpoints.save(1)
            Checkpoints(tmp_path / kind, {"t": torch.ones(2)}).save(1)
            with pytest.raises(ValueError, match=rf"'t' holds a {kind} at"):
                checkpoints.restore()
        mine = whole.to_local()
        checkpoints = Checkpoints(tmp_path / "parts", {}, sharded={"t": mine})
        checkpoints.save(1)
        with torch.no_grad():
            mine.zero_()
        checkpoints.restore()
        assert whole.full_tensor().tolist() == [0, 1, 2, 3]

    spawn(body, 2, "gloo")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="keep=0"):
            Checkpoints("x", {}, keep=0)
        with pytest.raises(ValueError, match="each name once"):
            Checkpoints("x", {"a": torch.ones(1)}, own={"a": torch.ones(1)})
        for words, arguments in (
            ("'epoch' is a int; give a tensor", {"state": {"epoch": 3}}),
            ("'p' is a Padded, which belongs in sharded", {"state": {}, "own": {"p": Padded(torch.ones(1), 1)}}),
        ):
            with pytest.raises(ValueError, match=words):
                Checkpoints("x", **arguments)
        for rows in (2.0, True, -1):
            with pytest.raises(ValueError, match=rf"Padded: rows[ =]{rows}"):
                Padded(torch.ones(1), rows)  # type: ignore[arg-type]
        two: Any = np.int64(2)
        checkpoints = Checkpoints(tmp_path, {}, sharded={"p": Padded(torch.ones(2), two)})
        for step in (2.0, True, "2"):
            with pytest.raises(ValueError, match=f"step {step!r} is a .*; give a whole number"):
                checkpoints.save(step)  # type: ignore[arg-type]
        assert checkpoints.save(two + 1).name == "step-3.json"
        assert Checkpoints(tmp_path, {}).restore() == 3

    spawn(body, 1)


def on_a_gpu(folder: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).cuda()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        model.zero_grad()
        model(torch.randn(3, 4, device="cuda")).sum().backward()
        adam.step()
        return model[0].weight.detach().clone()

    step()
    checkpoints = Checkpoints(folder, {"model": model, "adam": adam}, own={"own": torch.ones(2, device="cuda")})
    checkpoints.save(1)
    wanted = step()
    assert checkpoints.restore() == 1
    assert adam.state[model[0].weight]["exp_avg"].is_cuda
    assert torch.equal(step(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_is_on_a_gpu_comes_back_there(tmp_path: Path) -> None:
    dist_prims.spawn(on_a_gpu, 1, (tmp_path,), start_method="spawn", timeout=100)
