"""A ResNet cut into stages, one a rank, that learns the digits by a pipeline plan.

No stage can check the whole result. Therefore rank 0 also trains the unsplit model on the same first batches in the
same micro-batches, and compares the losses. The picture shows the plan next to the recorded run.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from .._console import Console
from ..datasets import digits
from ..models.resnet import BasicBlock, ResNet
from ..schedules.pipelines import draw_gantt, predict
from ..training import Pipeline, split
from ..training.pipeline.action_executor import cut_batch

__all__: list[str] = []

_SEED, _BATCH, _MICROS, _RATE, _EPOCHS = 7, 64, 8, 0.02, 2
_PLAN, _COMPARED = "1f1b", 3
_GOAL, _TOLERANCE = 0.9, 1e-4


def train_pipeline(console: Console, out: Path) -> list[Path]:
    """Train, check, and return the path of the picture on rank 0."""
    size = dist.get_world_size()
    model = _resnet()
    if size > len(model.layers()):
        console.say(f"\nA ResNet of {len(model.layers())} layers has no stages for {size} ranks: no pipeline is shown")
        return []
    console.title(f"A ResNet of {size} stage{'s' * (size != 1)} learns the same digits in a pipeline: plan {_PLAN}")
    images, labels = digits().tensors
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SEED))
    learned, held_out = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    batches = [batch for _ in range(_EPOCHS) for batch in torch.split(learned, _BATCH)]

    stages = split(model, size, sample=images[: _BATCH // _MICROS])
    console.say(f"  layers of the stages: {', '.join(str(len(stage.names)) for stage in stages)}")
    metrics = {"right": lambda output, target: (output.argmax(1) == target).float().mean()}
    pipeline = Pipeline(stages, _PLAN, loss=F.cross_entropy, num_microbatches=_MICROS, metrics=metrics)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=_RATE, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        pipeline.record = step == len(batches) - 2  # the last batch may be smaller
        optimizer.zero_grad()
        losses.append(float(pipeline.step(images[batch], labels[batch])))
        optimizer.step()
        if (last := step + 1 == len(batches)) or step % 10 == 9:
            console.progress(f"  step {step + 1:2} of {len(batches)}   loss {losses[-1]:.4f}", last)
    rows = pipeline.rows()
    pipeline.eval().evaluate(images[held_out], labels[held_out])
    right = float(pipeline.measured["right"])
    console.check(right >= _GOAL, f"{right:.1%} of {len(held_out)} held-out images are classified right, on all ranks")
    chosen = [(images[batch], labels[batch]) for batch in batches[:_COMPARED]]
    apart = max(abs(a - b) for a, b in zip(losses, _alone(chosen) if console.rank == 0 else losses, strict=False))
    console.check(apart <= _TOLERANCE, f"the first {_COMPARED} losses equal the unsplit model's within {_TOLERANCE:g}")
    if console.rank != 0:
        return []
    panels = {"planned, with the measured durations": predict(pipeline.plan, rows).rows, "as it ran": rows}
    return [draw_gantt(out / "pipeline.svg", panels, f"{_PLAN}, {size} ranks, {_MICROS} micro-batches: a step")]


def _resnet() -> ResNet:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, in_channels=1, small_images=True)


def _alone(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The losses of the unsplit model, in the same micro-batches."""
    model: nn.Module = _resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for x, y in cut_batch((images, labels), _MICROS, "images"):
            part = F.cross_entropy(model(x), y) * (len(x) / len(images))
            torch.autograd.backward(part)
            loss += part.detach()
        optimizer.step()
        losses.append(float(loss))
    return losses
