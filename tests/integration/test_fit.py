"""What PyTorch builds on a backend, over ours: each part of torch.distributed does its usual work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def reference_gradients(size: int) -> list[torch.Tensor]:
    """Of one process that sees the batches of all ranks."""
    model = net()
    torch.stack([model(batch(rank)).square().mean() for rank in range(size)]).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


def ddp(hook: Callable[..., Any] | None = None, tolerance: float = 1e-5, **options: Any) -> None:
    model = nn.parallel.DistributedDataParallel(net(), **options)
    if hook:
        model.register_comm_hook(None, hook)
    model(batch(dist.get_rank())).square().mean().backward()
    close([parameter.grad for parameter in model.parameters()], reference_gradients(dist.get_world_size()), tolerance)


def test_ddp() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def body() -> None:
        ddp()
        ddp(find_unused_parameters=True)
        ddp(static_graph=True, gradient_as_bucket_view=True)
        ddp(default_hooks.allreduce_hook)
        ddp(default_hooks.fp16_compress_hook, tolerance=1e-3)

    spawn(body, 2)


def test_ddp_with_power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def body() -> None:
        model = nn.parallel.DistributedDataParallel(net())
        model.register_comm_hook(
            power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), power.powerSGD_hook
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(20):
            loss = model(batch(dist.get_rank())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2

    spawn(body, 2)


def test_ddp_with_uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join

    def body() -> None:
        model = nn.parallel.DistributedDataParallel(net())
        with Join([model]):
            for step in range(2 + dist.get_rank()):
                model(batch(step)).sum().backward()

    spawn(body, 2)


def test_ddp_with_sparse_gradients() -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
        model(torch.tensor([dist.get_rank(), 5])).sum().backward()
        gradient = model.module.weight.grad.to_dense()
        assert gradient[:, 0].tolist() == [0.5, 0.5, 0, 0, 0, 1, 0, 0, 0, 0]

    spawn(body, 2)


def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def body() -> None:
        model, twin = nn.parallel.DistributedDataParallel(net()), nn.parallel.DistributedDataParallel(net())
        sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        whole = torch.optim.Adam(twin.parameters(), lr=0.01)
        for step in range(3):
            for each, optimizer in ((model, sharded), (twin, whole)):
                optimizer.zero_grad()
                each(batch(step + 10 * dist.get_rank())).square().mean().backward()
                optimizer.step()
        close(model.parameters(), twin.parameters())

    spawn(body, 2)


def test_fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def body() -> None:
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
        model(batch(dist.get_rank())).square().mean().backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            close([each.grad for each in model.parameters()], reference_gradients(2))

    spawn(body, 2)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=["fsdp2", "hsdp"])
def test_fully_shard(shape: tuple[int, ...]) -> None:
    from torch.distributed.fsdp import fully_shard

    def body() -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
        model = net()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(batch(dist.get_rank())).square().mean().backward()
        parameters: list[Any] = list(model.parameters())
        close([each.grad.full_tensor() for each in parameters], reference_gradients(dist.get_world_size()))

    spawn(body, 2 if len(shape) == 1 else 4)


def test_dtensor_and_tensor_parallel() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        whole = torch.arange(24.0).view(4, 6)
        split: Any = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal((split @ split.t()).full_tensor(), whole @ whole.t())
        assert torch.equal(split.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
        model = net()
        expected = copy.deepcopy(model)(batch(0))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        close([model(batch(0))], [expected])

    spawn(body, 4)


def test_functional_collectives_eager_and_compiled() -> None:
    import torch.distributed._functional_collectives as functional

    def body() -> None:
        def calls(x: torch.Tensor) -> torch.Tensor:
            total = functional.all_reduce(x, "sum", dist.group.WORLD)
            gathered = functional.all_gather_tensor(total, 0, dist.group.WORLD)
            return functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) + 1

        x = torch.arange(4.0) + dist.get_rank()
        expected = 2 * (2 * torch.arange(4.0) + 1) + 1
        assert torch.equal(calls(x), expected)
        assert torch.equal(torch.compile(calls, fullgraph=True, backend="aot_eager")(x), expected)

    spawn(body, 2)


def test_coalescing_and_batches_of_point_to_point() -> None:
    def body() -> None:
        rank = dist.get_rank()
        tensors = [torch.full((5,), float(rank + i)) for i in range(3)]
        dist.all_reduce_coalesced(tensors)
        assert [each[0].item() for each in tensors] == [1.0, 3.0, 5.0]
        sent, received = torch.full((4,), float(rank)), torch.zeros(4)
        batch = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert received.tolist() == [1.0 - rank] * 4

    spawn(body, 2)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_pipelining(name: str) -> None:
    from torch.distributed import pipelining

    def body() -> None:
        rank, stages = dist.get_rank(), 4 if "Interleaved" in name else 2
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(stages)]
        whole = nn.Sequential(*copy.deepcopy(layers))
        mine = [
            pipelining.PipelineStage(layers[number], number, stages, torch.device("cpu"))
            for number in range(rank, stages, 2)
        ]
        schedule = getattr(pipelining, name)(
            mine if stages == 4 else mine[0], 4, loss_fn=lambda out, y: (out - y).square().sum()
        )
        x, y = batch(0).repeat(2, 1)[:8], torch.zeros(8, 8)
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
        whole(x).sub(y).square().sum().backward()
        for number in range(rank, stages, 2):
            close([layers[number].weight.grad * (4 if schedule.scale_grads else 1)], [whole[number].weight.grad], 1e-4)

    spawn(body, 2)


def test_checkpoints(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    def body() -> None:
        state = {"whole": torch.arange(6.0), "rank": torch.full((2,), float(dist.get_rank()))}
        checkpoint.save(state, checkpoint_id=str(tmp_path / "sync"))
        saving: Any = checkpoint.async_save(state, checkpoint_id=str(tmp_path / "async"))
        saving.result(60)
        for name in ("sync", "async"):
            found = {"whole": torch.zeros(6)}
            checkpoint.load(found, checkpoint_id=str(tmp_path / name))
            assert found["whole"].tolist() == list(range(6))

    spawn(body, 2)


def test_objects_and_differentiable_collectives() -> None:
    import torch.distributed.nn.functional as differentiable

    def body() -> None:
        rank = dist.get_rank()
        by_rank: list[Any] = [None, None]
        dist.all_gather_object(by_rank, {"rank": rank, "text": "x" * 1000 * rank})
        assert [each["rank"] for each in by_rank] == [0, 1]
        objects = [{"a": 1}] if rank == 0 else [None]
        dist.broadcast_object_list(objects, 0)
        assert objects == [{"a": 1}]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ["zero", "one"] if rank == 0 else None, 0)
        assert mine == [["zero", "one"][rank]]
        x = torch.ones(3, requires_grad=True)
        (differentiable.all_reduce(x) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [3.0] * 3

    spawn(body, 2)


def test_detail_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    def body() -> None:
        dist.set_debug_level_from_env()
        group = dist.new_group()
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 3

    spawn(body, 2)


def test_the_profiler_names_each_collective() -> None:
    def body() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            dist.all_reduce(torch.ones(3))
            dist.barrier()
        names = {event.key for event in profiled.key_averages()}
        assert {"dist_prims:all_reduce", "dist_prims:barrier"} <= names

    spawn(body, 2)
