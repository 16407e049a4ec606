"""Local SGD: when the ranks average, what they hold afterwards, and that it learns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import REASON, device, on_two_ranks

import dist_prims
from dist_prims.datasets import digits
from dist_prims.errors import MismatchError
from dist_prims.training import local_sgd
from dist_prims.training.local_sgd import LocalSGD

Outer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def bits(model: torch.nn.Module) -> list[bytes]:
    return [bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy()) for tensor in model.state_dict().values()]


def of_all_ranks(thing: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def same_everywhere(model: torch.nn.Module) -> bool:
    first, *others = of_all_ranks(bits(model))
    return all(other == first for other in others)


class Kinds(torch.nn.Module):
    """Parameters and buffers of several dtypes and layouts, one frozen, one empty."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.across = torch.nn.Parameter(torch.randn(5, 3).T)
        self.fine = torch.nn.Parameter(torch.randn(7).double())
        self.coarse = torch.nn.Parameter(torch.randn(7).bfloat16())
        self.turning = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.randn(0))
        self.scalar = torch.nn.Parameter(torch.randn(()))
        self.frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
        self.mean: torch.Tensor
        self.count: torch.Tensor
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("count", torch.tensor(seed))


@pytest.mark.parametrize(("size", "backend"), [(1, "dist_prims"), (2, "gloo"), (3, "dist_prims")])
def test_parameters_become_their_mean(size: int, backend: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        model = Kinds(rank)
        local = LocalSGD(model, every=3)
        assert bits(model) == bits(Kinds(0))  # all begin as rank 0 does
        before = copy.deepcopy(model)
        kept = dict(model.named_parameters())
        with torch.no_grad():
            for tensor in [*model.parameters(), model.mean]:
                if tensor is not model.frozen:
                    tensor += rank
            model.count += rank
        assert [local.step() for _ in range(3)] == [False, False, True]
        assert same_everywhere(model)
        assert dict(model.named_parameters()) == kept  # the same objects, that the optimiser holds
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        middle = (size - 1) / 2
        for name, tensor in model.state_dict().items():
            wanted = before.state_dict()[name] + (0 if name in ("frozen", "count") else middle)
            torch.testing.assert_close(tensor, wanted, msg=name)
        assert model.count.dtype == torch.int64

    dist_prims.spawn(body, size, backend=backend, timeout=60)


def test_half_types_are_added_in_float32() -> None:
    def body() -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((2,), 40000.0, dtype=torch.float16))])
        LocalSGD(model, every=1).step()
        assert model[0].tolist() == [40000.0, 40000.0]  # their sum is beyond float16

    dist_prims.spawn(body, 4, timeout=60)


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


class Trainer:
    """A net that learns digits, rank 0 of 2 from the even ones and rank 1 from the odd ones."""

    def __init__(self, lr: float = 0.3, **options: Any) -> None:
        self.model = net(dist.get_rank())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.5)
        with_optimizer = options.pop("with_optimizer", False)
        self.local = LocalSGD(self.model, optimizer=self.optimizer if with_optimizer else None, **options)
        self.images, self.labels = digits().tensors

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.loss_of(step, dist.get_rank()).backward()
            self.local.average_gradients()
            self.optimizer.step()
            averaged = self.local.step()
            assert same_everywhere(self.model) == (averaged or step < self.local.warm_up), step

    def loss_of(self, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        own = (self.labels % 2 == rank).nonzero().view(-1)
        batch = own[torch.randint(len(own), (32,), generator=generator)]
        return torch.nn.functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])

    @torch.no_grad()
    def loss(self) -> float:
        return float(torch.nn.functional.cross_entropy(self.model(self.images), self.labels))


@pytest.mark.parametrize(
    "chosen",
    [["local", "outer"], pytest.param(["local", "with momentum", "post-local", "outer"], marks=pytest.mark.slow)],
)
def test_ranks_learn_together_what_one_alone_does_not(chosen: list[str]) -> None:
    """Margins: alone a rank comes to 3 or more, knowing half of the digits; together to 0.2 or so."""

    def body() -> dict[str, float]:
        kinds: dict[str, dict[str, Any]] = {
            "every step": {"every": 1, "with_optimizer": True},
            "local": {"every": 8},
            "with momentum": {"every": 8, "with_optimizer": True},
            "post-local": {"every": 8, "warm_up": 20},
            "outer": {"every": 8, "outer": nesterov},
            "alone": {"every": 1000},
        }
        losses = {}
        for name in ("every step", *chosen, "alone"):
            trainer = Trainer(**kinds[name])
            trainer.steps(0, 100)
            if name != "alone":
                trainer.local.average()
                assert same_everywhere(trainer.model)
            losses[name] = trainer.loss()
        return losses

    losses = dist_prims.spawn(body, 2, backend="dist_prims", timeout=100)[0]
    assert losses.pop("alone") > 10 * losses["every step"]
    for name, loss in losses.items():
        assert loss < 1.6 * losses["every step"], (name, losses)


def test_the_outer_optimiser_is_given_what_the_ranks_moved_on_average() -> None:
    def body() -> None:
        rank = dist.get_rank()
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([10.0 + rank]))])
        local = LocalSGD(model, every=2, warm_up=1, outer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5))
        found = []
        for _ in range(7):
            local.average_gradients()
            with torch.no_grad():
                model[0] -= 1 + rank  # as an optimiser would
            local.step()
            if local.steps % 2:
                local.average()  # once more, with nothing new
            found.append(model[0].item())
        # step 1 ends warm-up: the mean of 9 and 8. From then on two steps move the mean by -3:
        # velocity 3, 3 + 3/2, 3 + 9/4; the step is half of it
        assert found[::2] == [8.5, 8.5 - 1.5, 7 - 2.25, 4.75 - 2.625]

    dist_prims.spawn(body, 2, timeout=60)


def test_in_small_buckets_it_is_the_same() -> None:
    def body() -> None:
        results = []
        for limit in (1, 100, 10**6):
            local_sgd._BUCKET_BYTES = limit
            model = Kinds(0)
            local = LocalSGD(model, every=1)
            with torch.no_grad():
                for parameter in local._parameters:
                    parameter.mul_(1 + dist.get_rank())
            local.step()
            results.append(bits(model))
        assert results[0] == results[1] == results[2]

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("options", [{"every": 4, "warm_up": 3}, {"every": 4, "outer": nesterov}])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(options: dict[str, Any]) -> None:
    def body() -> None:
        whole = Trainer(**options)
        whole.steps(0, 10)
        saved = copy.deepcopy([each.state_dict() for each in (whole.model, whole.optimizer, whole.local)])
        whole.steps(10, 20)
        resumed = Trainer(**options)
        each: Any
        for each, state in zip((resumed.model, resumed.optimizer, resumed.local), saved, strict=True):
            each.load_state_dict(state)
        resumed.steps(10, 20)
        assert bits(resumed.model) == bits(whole.model)
        other, words = (None, "4 parameters .* has 0") if "outer" in options else (nesterov, "0 parameters .* has 4")
        with pytest.raises(ValueError, match=words):
            LocalSGD(net(), outer=other).load_state_dict(saved[2])

    dist_prims.spawn(body, 2, backend="dist_prims", timeout=60)


def test_ranks_that_disagree_all_get_an_error() -> None:
    def body() -> None:
        rank = dist.get_rank()
        with pytest.raises(MismatchError, match=r"Rank 0 has LocalSGD: every=4.*rank 1 has LocalSGD: every=5"):
            LocalSGD(net(), every=4 + rank)
        with pytest.raises(MismatchError, match=r"Rank 0 has.* 4 tensors.*rank 1 has.* 2 tensors"):
            LocalSGD(net() if rank == 0 else torch.nn.Linear(64, 10))
        model = net(rank)
        local = LocalSGD(model, every=4)
        if rank == 1:
            local.step()  # a batch more than the others
        before = bits(model)
        with pytest.raises(MismatchError, match=r"Rank 0 has average after step 0.*rank 1 has average after step 1"):
            local.average()
        assert bits(model) == before
        with pytest.raises(MismatchError, match=r"optimizer=SGD.*optimizer=None"):
            LocalSGD(model, optimizer=None if rank else torch.optim.SGD(model.parameters(), momentum=0.9))
        local = LocalSGD(model, outer=nesterov if rank else lambda p: torch.optim.SGD(p, lr=1))
        with pytest.raises(MismatchError, match="average after step 0"):
            local.average()
        LocalSGD(model).average()  # no rank still waits

    dist_prims.spawn(body, 2, timeout=60)


@pytest.mark.parametrize("size", [1, 3])
def test_momentum_that_some_ranks_do_not_have(size: int) -> None:
    """State was matched by its place in the list: the momentum of one parameter was averaged with another one's."""

    def body() -> None:
        rank = dist.get_rank()
        experts = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(size))
        both, some = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(3, 1, bias=False)
        model = torch.nn.ModuleList([experts, both, some])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        local = LocalSGD(model, every=1, optimizer=optimizer)
        used = (experts[rank](torch.ones(1, 1)) + both(torch.ones(1, 1))) * (1 + rank)
        (used + (some(torch.ones(1, 3)) if rank == 0 else 0)).sum().backward()
        optimizer.step()
        local.step()
        assert same_everywhere(model)
        momenta = [optimizer.state.get(each, {}).get("momentum_buffer") for each in model.parameters()]
        alone = [None if expert != rank else [[1.0 + rank]] for expert in range(size)]
        wanted = [*alone, [[(1 + size) / 2]], None if rank else [[1.0] * 3]]
        assert [None if each is None else each.tolist() for each in momenta] == wanted

    dist_prims.spawn(body, size, timeout=60)


@pytest.mark.parametrize("shape", [(2,), ()])
def test_counts_of_steps_remain_each_ranks_own(shape: tuple[int, ...]) -> None:
    """Also those of a scalar parameter, whose shape they have."""

    def body() -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(shape))])
        optimizer = torch.optim.Adam(model.parameters())
        local = LocalSGD(model, every=1, optimizer=optimizer)
        for _ in range(1 + dist.get_rank()):
            model[0].grad = torch.full(shape, 1.0 + dist.get_rank())
            optimizer.step()
        local.step()
        (state,) = optimizer.state.values()
        assert state["step"].item() == 1 + dist.get_rank()
        assert len({str(each) for each in of_all_ranks(state["exp_avg"].tolist())}) == 1

    dist_prims.spawn(body, 2, timeout=60)


def test_bad_use_is_refused() -> None:
    def body() -> None:
        bad: list[dict[str, Any]] = [{"every": 0}, {"warm_up": -1}]
        for options in bad:
            with pytest.raises(ValueError, match=r"LocalSGD\(every="):
                LocalSGD(net(), **options)
        local = LocalSGD(net(), warm_up=2)
        with pytest.raises(ValueError, match=r"step 0 of rank . is one of the first warm_up=2: call average_gradients"):
            local.step()
        model: Any = net()
        model[1].requires_grad_(False)
        local = LocalSGD(model)
        model[1].requires_grad_(True)
        with pytest.raises(ValueError, match="trains 4 parameters and trained 2"):
            local.average()

    dist_prims.spawn(body, 2, timeout=60)


def test_a_sub_group_and_a_model_without_parameters() -> None:
    def body() -> None:
        group = dist.new_group([1, 2])
        rank = dist.get_rank()
        LocalSGD(torch.nn.ReLU(), every=1).step()
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([float(rank)]))])
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not in the group"):
                LocalSGD(model, group=group)
        else:
            local = LocalSGD(model, every=1, group=group)
            assert model[0].item() == 1.0
            with torch.no_grad():
                model[0] += rank
            local.step()
            assert model[0].item() == 2.5

    dist_prims.spawn(body, 3, timeout=60)


def test_buffers_of_batch_norm_are_averaged() -> None:
    def body() -> None:
        model = torch.nn.BatchNorm1d(2)
        local = LocalSGD(model, every=1)
        model(torch.full((3, 2), 10.0 * dist.get_rank()))
        local.step()
        assert model.running_mean.tolist() == [0.5, 0.5]  # of 0 and 1
        assert model.num_batches_tracked.item() == 1

    dist_prims.spawn(body, 2, timeout=60)


def on_gpu() -> None:
    model = net(dist.get_rank()).to(device())
    local = LocalSGD(model, every=2, outer=nesterov)
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(dist.get_rank() + 1)
        averaged = local.step()
        assert averaged == same_everywhere(model)


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "there is CUDA")
def test_on_two_gpu_ranks() -> None:
    on_two_ranks(on_gpu)
