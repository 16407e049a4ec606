"""Trainer trains and validates: lightning_trainer.py BACKEND [ddp | fsdp]. Rank 0 prints the metrics."""

import json
import sys

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP on the CPU: Trainer refuses FSDPStrategy itself where there is no GPU, and accepts a subclass."""


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("binary")
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def configure_model(self):
        if isinstance(self.trainer.strategy, FSDPStrategy):
            # Where there is no GPU, torch needs the device, which Trainer does not pass.
            self.layers = FullyShardedDataParallel(self.layers, device_id=torch.device("cpu"), use_orig_params=True)

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        found = self.layers(x)
        self.accuracy(found.sigmoid(), (y > 0).int())
        self.log("accuracy", self.accuracy)
        self.log("val_loss", torch.nn.functional.mse_loss(found, y), sync_dist=True)
        positive = (found > 0).sum()
        for reduction in ("mean", "sum", "min", "max"):
            self.log(f"positive_{reduction}", positive, sync_dist=True, reduce_fx=reduction)
        self.log("rank", self.global_rank, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


backend, kind = sys.argv[1], (sys.argv[2:] or ["ddp"])[0]
if kind == "ddp":
    strategy = DDPStrategy(process_group_backend=backend)
else:
    strategy = CPUFSDPStrategy(process_group_backend=backend, state_dict_type="sharded")
seed_everything(0, verbose=False)
data = torch.randn(60, 8)
pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(pairs, batch_size=4), torch.utils.data.DataLoader(pairs, batch_size=7))
assert torch.distributed.get_backend() == backend
mean = trainer.strategy.reduce(torch.tensor([7, -3, 2**40]) + trainer.global_rank, reduce_op="mean")
trainer.save_checkpoint("model.ckpt")
if trainer.is_global_zero:
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    print(json.dumps({**metrics, "mean of integers": mean.tolist()}))
