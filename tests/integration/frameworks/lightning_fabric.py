"""Fabric trains a small model: lightning_fabric.py BACKEND [ddp | fsdp2]. Rank 0 prints the results."""

import json
import sys

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


backend, kind = sys.argv[1], (sys.argv[2:] or ["ddp"])[0]
if kind == "ddp":
    strategy = DDPStrategy(process_group_backend=backend)
else:
    strategy = ModelParallelStrategy(shard, process_group_backend=backend)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
assert torch.distributed.get_backend() == backend

seed_everything(0, verbose=False)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
if kind == "ddp":
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
else:
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
data = torch.randn(64, 8)
pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(pairs, batch_size=4))
losses = []
for _ in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())

integers = torch.tensor([7, -3, 2**40]) + fabric.global_rank
results = {
    "losses": losses,
    "norm": (norm.full_tensor() if isinstance(norm, DTensor) else norm).item(),
    "mean of integers": fabric.all_reduce(integers, reduce_op="mean").tolist(),
    "sum of integers": fabric.all_reduce(integers, reduce_op="sum").tolist(),
    "gathered": fabric.all_gather({"rank": torch.tensor(fabric.global_rank)})["rank"].tolist(),
    "broadcast": fabric.broadcast({"sender": fabric.global_rank}),
}
fabric.barrier()
if fabric.is_global_zero:
    print(json.dumps(results))
