"""Accelerate trains a small model: accelerate_training.py BACKEND. Rank 0 prints the results."""

import json
import sys

import torch
from accelerate import Accelerator

backend = sys.argv[1]
# Accelerate uses the group that exists; by itself it chooses gloo
torch.distributed.init_process_group(backend)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == torch.distributed.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
data = torch.randn(50, 8)
pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True), torch.arange(50))
loader = torch.utils.data.DataLoader(pairs, batch_size=4, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(2):
    losses, items = [], []
    for x, y, item in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        items += accelerator.gather_for_metrics(item).tolist()
    assert sorted(items) == [*range(50)], "an item is missing or was seen twice"

results = {
    "losses": losses,
    "norm": norm.item(),
    "sum of integers": accelerator.reduce(torch.tensor([7, 2**40]) + accelerator.process_index, "sum").tolist(),
    "padded": accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index)).tolist(),
}
if accelerator.is_main_process:
    print(json.dumps(results))
accelerator.end_training()
