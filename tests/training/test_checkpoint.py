"""Checkpoints: bit for bit, on any number of ranks, and nothing that does not fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from averaging import spawn
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import dist_prims
from dist_prims.errors import MismatchError
from dist_prims.training import ShardedIterable, ShardedSampler
from dist_prims.training.checkpoint import CheckpointError, Checkpoints
from dist_prims.training.pipeline import split


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


def a_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


class Fsdp2:
    """A model and an Adam whose tensors are DTensors, by the functions of torch that name the state of an optimizer."""

    def __init__(self, seed: int) -> None:
        self.model = a_model(seed)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "adam"), get_state_dict(self.model, self.adam), strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.adam, model_state_dict=state["model"], optim_state_dict=state["adam"])

    def train(self, steps: int) -> list[Any]:
        """The same batch on every rank, so the number of ranks does not count."""
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
        for _ in range(steps):
            self.adam.zero_grad()
            self.model(batch).square().mean().backward()
            self.adam.step()
        return [parameter.full_tensor().tolist() for parameter in self.model.parameters()]  # type: ignore[attr-defined]


def test_dtensors_of_a_model_and_its_optimizer_are_read_on_another_number_of_ranks(tmp_path: Path) -> None:
    def save() -> list[Any]:
        run = Fsdp2(0)
        run.train(2)
        Checkpoints(tmp_path, {"run": run}).save(2)
        return run.train(2)

    def restore() -> list[Any]:
        run = Fsdp2(9)
        assert Checkpoints(tmp_path, {"run": run}).restore() == 2
        return run.train(2)

    expected = spawn(save, 2, "gloo")[0]
    for size in (1, 3):
        for weights in spawn(restore, size, "gloo"):
            for weight, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(torch.tensor(weight), torch.tensor(other))


def test_stages_are_read_by_another_number_of_stages(tmp_path: Path) -> None:
    """Stages have the names of the whole model; a dictionary takes those of several stages."""

    def stages(model: nn.Sequential) -> dict[str, torch.Tensor]:
        count = 2 * dist.get_world_size() - 1
        sizes = {1: [3], 3: [1, 1, 1]}[count]
        own = split(model, count, by=sizes)[dist.get_rank() :: dist.get_world_size()]
        return {name: tensor for stage in own for name, tensor in stage.state_dict().items()}

    def save() -> None:
        Checkpoints(tmp_path, {"model": stages(a_model())}).save(1)

    def restore() -> None:
        model, whole = a_model(9), a_model(8)
        part = stages(model)
        assert Checkpoints(tmp_path, {"model": part}).restore() == 1
        for name, tensor in part.items():
            assert torch.equal(tensor, a_model().state_dict()[name])
            assert torch.equal(tensor, model.state_dict()[name])
        assert Checkpoints(tmp_path, {"model": dict(whole.state_dict())}).restore() == 1
        assert all(torch.equal(tensor, a_model().state_dict()[name]) for name, tensor in whole.state_dict().items())

    spawn(save, 2)
    spawn(restore, 1)
    spawn(restore, 2)


def test_an_optimizer_of_shards_as_state_is_refused_and_as_own_comes_back(tmp_path: Path) -> None:
    """Each rank has moments of its own parameters. After a restore, every rank had those of rank 0."""

    def body() -> None:
        rank = dist.get_rank()
        shard = nn.Parameter(torch.full((5,), float(rank)))
        adam = torch.optim.AdamW([shard], lr=0.1)
        shard.grad = torch.full((5,), rank + 1.0)
        adam.step()
        words = r"adam\.state\.0\.exp_avg differs between the ranks 0 and 1; give .* as own=, or as DTensors"
        with pytest.raises(CheckpointError, match=words):
            Checkpoints(tmp_path / "x", {"adam": adam}).save(1)
        assert not (tmp_path / "x").exists()
        own = {"adam": adam, "shard": shard}
        Checkpoints(tmp_path, {}, own=own).save(1)
        moments = adam.state[shard]["exp_avg"].clone()
        adam.step()
        assert Checkpoints(tmp_path, {}, own=own).restore() == 1
        assert torch.equal(adam.state[shard]["exp_avg"], moments)

    def restore() -> None:
        shard = nn.Parameter(torch.zeros(5))
        with pytest.raises(CheckpointError, match=r"own=\['shard'\] was saved by 2 ranks, not 3; start as many"):
            Checkpoints(tmp_path, {}, own={"shard": shard}).restore()

    spawn(body, 2)
    spawn(restore, 3)


def test_of_buffers_that_differ_those_of_rank_0_are_saved(tmp_path: Path) -> None:
    def body() -> list[float]:
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(dist.get_rank())
        norm.running_var.fill_(dist.get_rank() + 5)
        checkpoints = Checkpoints(tmp_path, {"norm": norm})
        checkpoints.save(1)
        norm.reset_running_stats()
        assert checkpoints.restore() == 1
        return [norm.running_mean.max().item(), norm.running_var.max().item()]

    assert spawn(body, 3) == [[0.0, 5.0]] * 3


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_save_in_the_background_has_the_state_of_its_call(backend: str, tmp_path: Path) -> None:
    def body() -> None:
        dist.new_group([0])  # the second group of the checkpoints has the same name on ranks with other groups
        value = torch.zeros(100_000)
        checkpoints = Checkpoints(tmp_path, {"value": value}, own={"rank": torch.tensor(dist.get_rank())})
        for step in (1, 2):
            value.fill_(step)
            checkpoints.save(step, background=True)
            value.fill_(9)
            for _ in range(20):  # collectives of the training go on
                total = torch.ones(10)
                dist.all_reduce(total)
                assert total[0] == dist.get_world_size()
        assert checkpoints.steps() == [1]
        checkpoints.wait()
        assert checkpoints.steps() == [2, 1]
        assert checkpoints.restore() == 2
        assert value.eq(2).all()

    spawn(body, 3, backend)


def test_ranks_that_disagree_write_nothing(tmp_path: Path) -> None:
    def body() -> None:
        rank = dist.get_rank()
        adam = torch.optim.SGD([torch.ones(1)], lr=0.1 + rank)
        state: Any
        own: Any
        for words, step, state, own in [
            ("Rank 0 has .*step 1; rank 1 has .*step 2. Give all ranks the same", 1 + rank, {}, {}),
            ("Rank 0 has a; rank 1 has b", 1, {"ab"[rank]: torch.ones(1)}, {}),
            (r"x differs between the ranks 0 and 1", 1, {"x": torch.full((3,), 1.0 + rank)}, {}),
            (r"sgd \(names, shapes and plain values\) differs", 1, {"sgd": adam}, {}),
            ("step -1 is not a number of steps", -1, {}, {}),
            (
                "rank 1: .*values that cannot be loaded: .*numpy",
                1,
                {},
                {"x": Numbers() if rank else torch.ones(1)},
            ),
        ]:
            with pytest.raises((CheckpointError, MismatchError), match=words):
                Checkpoints(tmp_path / "x", state, own=own).save(step)
        with pytest.raises(
            MismatchError, match=r"Rank 0 has nothing more; rank 1 has x|Rank 0 has x; rank 1 has nothing"
        ):
            Checkpoints(tmp_path / "x", {}, own={"x": torch.ones(1)} if rank else {}).restore()
        assert not (tmp_path / "x").exists()

    spawn(body, 2)


class Numbers:
    def state_dict(self) -> Any:
        return np.ones(2, dtype=object)

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never loaded")


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def save() -> None:
        state: dict[str, Any] = {"a": torch.ones(2), "net": nn.Linear(2, 2)}
        nn.init.ones_(state["net"].weight)
        nn.init.ones_(state["net"].bias)
        Checkpoints(tmp_path, state).save(1)

    def restore() -> None:
        a, larger = torch.zeros(2), nn.Linear(2, 2)
        larger.register_buffer("more", torch.ones(1))
        state: Any
        for words, state in [
            (r"'net.weight' is \(2, 2\) of .* in the saved state and \(3, 2\)", {"net": nn.Linear(2, 3)}),
            (r"net is unlike the saved one in \['bias'\]", {"net": nn.Linear(2, 2, bias=False)}),
            (r"net is unlike the saved one in \['more'\]", {"net": larger}),
            (r"'net.*' is .* of torch.float32 in .* of torch.float64 here", {"net": nn.Linear(2, 2).double()}),
            (r"\['c'\] not in .*, which has \['a', 'net'\]", {"c": torch.ones(1)}),
            (r"Size mismatch between saved torch.Size\(\[2\]\) and current: torch.Size\(\[3\]\)", {"a": torch.ones(3)}),
        ]:
            with pytest.raises(CheckpointError, match=words):
                Checkpoints(tmp_path, {"a": a, **state}).restore()
            assert a.eq(0).all()
        assert Checkpoints(tmp_path, {"a": a}).restore() == 1  # a part of it, as for an evaluation
        assert a.eq(1).all()

    spawn(save, 2)
    spawn(restore, 3)


def test_the_last_ones_are_kept_and_no_run_overwrites_another(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-007").mkdir()

    def body() -> None:
        value = torch.zeros(3)
        checkpoints = Checkpoints(tmp_path, {"value": value}, keep=3)
        for step in (1, 5, 10, 11):
            checkpoints.save(step)
        assert checkpoints.steps() == [11, 10, 5]
        for step in (9, 11):
            with pytest.raises(CheckpointError, match=r"has step 11; restore\(\) it, or choose another directory"):
                checkpoints.save(step)

    spawn(body, 2)
    assert len(list(tmp_path.iterdir())) == 3 + 2


@pytest.mark.parametrize("backend", ["dist_prims", "gloo"])
def test_a_group_of_some_ranks(backend: str, tmp_path: Path) -> None:
    def body() -> None:
        group = dist.new_group([2, 0])
        value = torch.full((1000,), 4.0)
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                Checkpoints(tmp_path, {"value": value}, group=group)
            return
        checkpoints = Checkpoints(tmp_path, {"value": value}, group=group)
        checkpoints.save(1)
        checkpoints.save(2, background=True)
        value.zero_()
        assert checkpoints.restore() == 2
        assert value.eq(4).all()

    spawn(body, 3, backend)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="keep=0"):
            Checkpoints("x", {}, keep=0)
        with pytest.raises(ValueError, match="a name in state or in own, not in both"):
            Checkpoints("x", {"a": torch.ones(1)}, own={"a": torch.ones(1)})
        with pytest.raises(ValueError, match="'epoch' is a int; give an object with a state_dict"):
            Checkpoints("x", {"epoch": 3})
        for step in (2.0, True, "2"):
            with pytest.raises(CheckpointError, match=f"step {step!r} is not a number of steps; give an int"):
                Checkpoints(tmp_path, {}).save(step)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"two tensors have the name a\.b"):
            Checkpoints(tmp_path, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}).save(1)

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
