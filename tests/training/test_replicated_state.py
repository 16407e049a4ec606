"""Training whose ranks die in real steps: the survivors end with the bits of the same steps on as many ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from survivors import run_ranks
from torch import nn
from torch.nn.utils import parameters_to_vector

import dist_prims
from dist_prims.collectives.call import group_of
from dist_prims.errors import CommError, LeftOutError, MismatchError
from dist_prims.rendezvous.deadline import until
from dist_prims.training import GradientAverager, ReplicatedState, ShardedIterable, ShardedSampler, randomness
from dist_prims.training.data import GlobalBatches
from dist_prims.training.sharding import ShardedParameters
from dist_prims.training.state_transfer import transfer

STEPS, FAILS_AT = 7, 3
DATA = [(torch.randn(6, generator=torch.Generator().manual_seed(n)), torch.tensor(n % 3)) for n in range(48)]

BUFFERS = 16 + 16 + 1  # elements of the running statistics
BEFORE, AVERAGING, AVERAGED, STEPPED, ENDED = "before", "averaging", "averaged", "stepped", "ended"


class Parts:
    """What a training has: with dropout, running statistics, momentum and a schedule of the learning rate."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 3)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.batches = GlobalBatches(DATA, 12, seed=1)

    def targets(self) -> dict[str, Any]:
        return vars(self).copy()

    def step(self, at: Callable[[str], None] = lambda point: None) -> None:
        x, labels, weight = next(self.batches)
        at(BEFORE)
        self.optimizer.zero_grad()
        hidden = self.model[:4](x)
        hidden.register_hook(lambda gradient: at(AVERAGING))  # the gradients of the last layers are on their way
        (nn.functional.cross_entropy(self.model[4:](hidden), labels) * weight).backward()
        at(AVERAGED)
        self.optimizer.step()
        self.scheduler.step()
        at(STEPPED)

    def weights(self) -> list[float]:
        buffers = [each.double().reshape(-1) for each in self.model.buffers()]
        return torch.cat([parameters_to_vector(self.model.parameters()).detach().double(), *buffers]).tolist()


def averager(model: nn.Module) -> GradientAverager:
    return GradientAverager(model, bucket_mb=1e-4)  # every parameter is sent alone, so that some are before others


def train(
    parts: Parts,
    seed: int,
    at: Callable[[str, int], None] = lambda point, step: None,
    more: dict[str, Any] | None = None,
    place: str = "",
) -> Any:
    """The loop of docs/repair.md: the size of the group in each step, and the weights.

    With a ``place``, new ranks are admitted there.
    """
    torch.manual_seed(seed)
    sizes = torch.zeros(STEPS, dtype=torch.int64)
    state = ReplicatedState({**parts.targets(), "sizes": sizes, **(more or {})})
    current: GradientAverager | None = None
    while True:
        try:
            if place and state.group is dist.group.WORLD:
                dist_prims.grow(place)
                while state.step == FAILS_AT and dist.get_world_size() < 3:  # there is a new rank, sooner or later
                    dist_prims.grow(place)
            if state.group is not dist.group.WORLD:
                state.resize()
                if current is None:
                    current = averager(parts.model)
                else:
                    current.resize()
            if state.step == STEPS:
                dist.barrier()
                return sizes.tolist(), parts.weights()
            step = state.step
            with state.attempt():
                parts.step(lambda point, step=step: at(point, step))  # type: ignore[misc]
                sizes[step] = dist.get_world_size()
            at(ENDED, step)
        except (MismatchError, LeftOutError):
            raise
        except CommError:
            dist_prims.shrink()


def phase(size: int, states: list[Any], steps: int, folder: Path) -> list[Any]:
    """Steps of ``size`` ranks that begin with these states: by the rule, without the code under test."""

    def body(rank: int) -> Any:
        parts = Parts()
        torch.manual_seed(1 + rank)
        if states:
            saved, own = copy.deepcopy(states[min(rank, len(states) - 1)])  # torch sends tensors in shared memory
            for name, target in parts.targets().items():
                target.load_state_dict(saved[name])
            if rank < len(states):
                randomness.restore(own)
            else:
                randomness.derive(states[0][1], rank)
        current = averager(parts.model)
        for _ in range(steps):
            parts.step()
        current.remove()
        saved = {name: target.state_dict() for name, target in parts.targets().items()}
        return (saved, randomness.capture()), parts.weights()

    return run_ranks(body, size, folder)


def expected(sizes: list[int], lost: list[set[int]], folder: Path) -> list[list[float]]:
    """The weights of each rank after phases of these sizes; at the end of each the ranks ``lost`` are lost."""
    states: list[Any] = []
    weights: list[list[float]] = []
    for number, (size, steps) in enumerate([(size, len([*same])) for size, same in groupby(sizes)]):
        found = phase(size, states, steps, folder)
        states, weights = map(list, zip(*found, strict=True))
        gone = lost[number] if number < len(lost) else {}
        states = [state for rank, state in enumerate(states) if rank not in gone]
    return weights


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("point", "victim"),
    [
        (BEFORE, 0),
        (AVERAGING, 1),
        (STEPPED, 0),
        *(
            pytest.param(point, victim, marks=pytest.mark.slow)
            for point, victim in [(AVERAGING, 0), (AVERAGED, 0), (AVERAGED, 1), (STEPPED, 1), (ENDED, 0), (ENDED, 1)]
        ),
    ],
)
def test_a_rank_dies_at_each_point_of_a_step(point: str, victim: int, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        def at(here: str, step: int) -> None:
            if (here, step, rank) == (point, FAILS_AT, victim):
                die()

        return train(Parts(), 1 + rank, at)

    found = run_ranks(body, 3, tmp_path)
    assert found.pop(victim) == -signal.SIGKILL
    (sizes, _), (other_sizes, _) = found
    assert sizes == other_sizes
    done = sizes.count(3)
    assert sizes == [3] * done + [2] * (STEPS - done)
    assert done in {BEFORE: {3}, AVERAGING: {3}, AVERAGED: {3, 4}, STEPPED: {3, 4}, ENDED: {4, 5}}[point]
    assert [weights for _, weights in found] == expected(sizes, [{victim}], tmp_path)


@pytest.mark.parametrize(("victim", "ahead"), [(1, 0), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_ranks_that_are_a_step_behind_take_the_state_of_one_that_is_ahead(
    victim: int, ahead: int, tmp_path: Path
) -> None:
    """One rank completes the step, the other fails between the averaging and the optimizer's step."""

    def body(rank: int) -> Any:
        behind = dist.new_group([each for each in range(3) if each != ahead])

        def at(here: str, step: int) -> None:
            if (here, step) == (AVERAGED, FAILS_AT) and rank != ahead:
                if rank == victim:
                    die()
                dist.all_reduce(torch.ones(1), group=behind)
                raise AssertionError("the other rank has died")

        return train(Parts(), 1 + rank, at)

    found = run_ranks(body, 3, tmp_path)
    assert found.pop(victim) == -signal.SIGKILL
    assert [sizes for sizes, _ in found] == [[3] * 4 + [2] * 3] * 2
    wanted = expected([3] * 4 + [2] * 3, [{victim}], tmp_path)
    # Their running statistics are those of the rank that is ahead, and rank 0 may be another one.
    assert [weights[:-BUFFERS] for _, weights in found] == [weights[:-BUFFERS] for weights in wanted]


def test_a_new_rank_joins_after_a_death(tmp_path: Path) -> None:
    """It receives parameters, momentum, schedule and position; its random states follow from those of rank 0."""
    place, died = f"file://{tmp_path}/place", tmp_path / "died"

    def body(rank: int) -> Any:
        if rank == 3:
            until(died.exists, time.monotonic() + 60, "the death")
            dist_prims.join(place, timeout=60)
            return train(Parts(), 77, place=place)
        rendezvous = f"file://{tmp_path}/running"
        dist.init_process_group("dist_prims", init_method=rendezvous, rank=rank, world_size=3)

        def at(here: str, step: int) -> None:
            if (here, step, rank) == (BEFORE, 1, 1):
                died.touch()
                die()

        return train(Parts(), 1 + rank, at, place=place)

    found = run_ranks(body, 4, tmp_path, join=False)
    assert found.pop(1) == -signal.SIGKILL
    sizes = found[0][0]
    assert [each for each, _ in found] == [sizes] * 3
    assert [size for size, _ in groupby(sizes)] == [3, 2, 3]
    assert [weights for _, weights in found] == expected(sizes, [{1}], tmp_path)


class DiesInResize:
    """A target that ends its rank when the data is shared over a group, which is after the state has been sent."""

    def __init__(self, at: int | None) -> None:
        self.at, self.resizes = at, 0

    def resize(self, group: dist.ProcessGroup) -> None:
        self.resizes += 1
        if self.resizes == self.at:
            die()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


def test_another_rank_dies_in_resize(tmp_path: Path) -> None:
    """It is the lowest rank, whose state the others would have taken. Some ranks have resized, and do it again."""

    def body(rank: int) -> Any:
        def at(here: str, step: int) -> None:
            if (here, step, rank) == (BEFORE, FAILS_AT, 2):
                die()

        return train(Parts(), 1 + rank, at, {"dies": DiesInResize(2 if rank == 0 else None)})

    found = run_ranks(body, 4, tmp_path)
    assert [found.pop(2), found.pop(0)] == [-signal.SIGKILL] * 2
    assert [sizes for sizes, _ in found] == [[4] * 3 + [2] * 4] * 2
    assert [weights for _, weights in found] == expected(found[0][0], [{0, 2}], tmp_path)


@pytest.mark.parametrize("is_new", [False, True], ids=["a running rank", "a new rank"])
def test_the_source_of_a_state_dies_after_it_was_sent(is_new: bool, tmp_path: Path) -> None:
    """The rank that has received it goes on with it. It was once refused, or counted as the state of step 0, because
    the positions in the data were exchanged after the state was loaded."""

    def body(rank: int) -> Any:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        stream = ShardedIterable([range(10), range(10)])
        dies = DiesInResize(None)
        state = ReplicatedState({"model": model, "optimizer": optimizer, "data": stream, "dies": dies})

        def step() -> None:
            with state.attempt():
                model.weight.grad = -torch.ones(1, 1)
                optimizer.step()

        if not is_new:
            state.resize()
        elif rank == 0:
            state.group = dist.group.WORLD  # as after an earlier resize
        if not is_new or rank == 0:
            for _ in range(5 + (rank == 0)):
                step()
        if not is_new and rank == 1:
            fail(state, lambda: None)
        dies.at = dies.resizes + 1 if rank == 0 else None
        with contextlib.suppress(CommError):
            state.resize()
        dist_prims.shrink()
        state.resize()
        return state.step, model.weight.item()

    assert run_ranks(body, 2, tmp_path) == [-signal.SIGKILL, (6, 6.0)]


def test_mappings_arrive_as_they_are(tmp_path: Path) -> None:
    """Those of another type than torch's own states have arrive as dicts."""
    kinds = [{"a": 1}, OrderedDict(b=2), Counter("c"), defaultdict(int, {"d": 3})]

    def body(rank: int) -> Any:
        found = transfer(kinds if rank == 0 else None, 0, group_of(None, "test"), take=True)
        return [type(each) for each in found], found == kinds

    assert run_ranks(body, 2, tmp_path) == [([dict, OrderedDict, Counter, dict], True)] * 2


def fail(state: ReplicatedState, after: Callable[[], object]) -> None:
    """A step that fails at its end."""

    def attempt() -> None:
        with state.attempt():
            after()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempt()


def test_a_collective_after_the_step_is_found(tmp_path: Path) -> None:
    """One rank has changed parameters in a step that failed; it takes the state of a rank that has not. If all have
    changed them, no state is left."""

    def body(rank: int) -> Any:
        parts = Parts()
        state = ReplicatedState(parts.targets())
        state.resize()
        with state.attempt():
            parts.step()
        before = parts.weights()
        fail(state, parts.step if rank == 1 else list)
        with pytest.raises(RuntimeError, match=r"step 1 has begun and not ended; after an error call resize\(\)"):
            state.attempt().__enter__()
        state.resize()
        weights = parts.weights()
        fail(state, parts.step)
        with pytest.raises(RuntimeError, match=r"rank \d: .*on all ranks the parameters have changed in a step"):
            state.resize()
        return rank == 1 or weights == before, weights

    (kept, weights), (_, others) = run_ranks(body, 2, tmp_path)
    assert kept
    assert weights == others


def test_what_changes_outside_of_an_optimizer_is_found(tmp_path: Path) -> None:
    def body(rank: int) -> float:
        layer = nn.Linear(1, 1)
        torch.nn.init.zeros_(layer.weight)
        state = ReplicatedState({"layer": layer})
        state.resize()
        fail(state, functools.partial(nn.init.ones_, layer.weight) if rank == 0 else list)
        state.resize()
        return layer.weight.item()

    assert run_ranks(body, 2, tmp_path) == [0, 0]


def test_targets_that_cannot_be_replicated(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        parts = Parts()
        with pytest.raises(ValueError, match="'model' is a ShardedParameters, whose state is sharded"):
            ReplicatedState({"model": ShardedParameters(nn.Linear(1, 1))})
        names = {"model": parts.model} if rank else {"network": parts.model}
        with pytest.raises(MismatchError, match=r"Rank 0 has targets=\['network'\]; rank 1 has targets=\['model'\]"):
            ReplicatedState(names).resize()
        with pytest.raises(MismatchError, match="Build the same model"):
            ReplicatedState({"layer": nn.Linear(1 + rank, 1)}).resize()
        return "refused"

    assert run_ranks(body, 2, tmp_path) == ["refused", "refused"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "point"), [("sampler", BEFORE), ("sampler", AVERAGED), ("stream", AVERAGED), ("stream", ENDED)]
)
def test_items_of_a_real_loader_are_used_once(kind: str, point: str, tmp_path: Path) -> None:
    """Each rank writes down what it draws; what belongs to steps that are done is every item, once."""

    def body(rank: int) -> Any:
        items = torch.arange(60)
        if kind == "sampler":
            data: Any = ShardedSampler(60, seed=2, uneven="keep")
            loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(items), 4, sampler=data)
        else:
            data = ShardedIterable([range(start, start + 20) for start in range(0, 60, 20)], seed=2, window=3)
        layer = nn.Linear(1, 1)
        sizes = torch.zeros(30, dtype=torch.int64)
        state = ReplicatedState({"layer": layer, "data": data, "sizes": sizes})
        drawn, is_done = [], False
        while not is_done:
            try:
                if state.group is not dist.group.WORLD:
                    state.resize()
                    average = GradientAverager(layer)
                    if kind == "sampler":
                        batches: Any = (batch for (batch,) in data.follow(loader))
                    else:
                        batches = data.batches(4)
                step, size = state.step, dist.get_world_size()
                with state.attempt():
                    batch = next(batches, torch.empty(0, dtype=torch.int64))
                    drawn.append((step, size, batch.tolist()))
                    (tmp_path / f"rank{rank}").write_text(repr(drawn))
                    if (point, step, rank) == (BEFORE, 2, 1):
                        die()
                    layer(batch.float().reshape(-1, 1)).sum().backward()
                    left = torch.tensor([len(batch)])
                    dist.all_reduce(left)
                    if (point, step, rank) == (AVERAGED, 2, 1):
                        die()
                    sizes[step] = size
                    is_done = not left
                if (point, step, rank) == (ENDED, 2, 1):
                    die()
            except CommError:
                dist_prims.shrink()
        average.remove()
        return sizes.tolist()

    found = run_ranks(body, 3, tmp_path)
    assert found.pop(1) == -signal.SIGKILL
    assert found[0] == found[1]
    used = []
    for rank in range(3):
        last = {
            step: items for step, size, items in eval((tmp_path / f"rank{rank}").read_text()) if size == found[0][step]
        }
        used += [item for items in last.values() for item in items]
    assert sorted(used) == [*range(60)]


def test_the_cost_of_a_step_is_small() -> None:
    """The copy at the beginning of a step has the buffers, not the parameters."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ReplicatedState({"model": model, "optimizer": optimizer})
    with state.attempt():
        assert state._begun is not None
        sizes = {name: each.nbytes for name, each in state._begun.buffers.items()}
        assert (sum(sizes.values()), state._begun.states) == (8008, {})
