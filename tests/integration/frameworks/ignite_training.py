"""Ignite trains a small model: ignite_training.py BACKEND, which Ignite must know. Rank 0 prints the results."""

import json
import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine
from ignite.metrics import MeanAbsoluteError


def training(local_rank):
    torch.manual_seed(idist.get_rank())  # DistributedDataParallel takes rank 0's parameters
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    torch.manual_seed(0)
    data = torch.randn(48, 8)
    pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
    loader = idist.auto_dataloader(pairs, batch_size=8)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    Engine(step).run(loader, max_epochs=3)
    evaluator = Engine(lambda engine, batch: (model(batch[0]), batch[1]))
    MeanAbsoluteError().attach(evaluator, "error")
    results = {
        "model": type(model).__name__,
        "backend": idist.backend(),
        "weights": idist.all_gather(next(model.parameters()).detach()[:1]).tolist(),
        "error": evaluator.run(loader).metrics["error"],
        "sum": idist.all_reduce(torch.tensor([1.0, 2.0])).tolist(),
    }
    if idist.get_rank() == 0:
        print(json.dumps(results), flush=True)


with idist.Parallel(backend=sys.argv[1]) as parallel:
    parallel.run(training)
